"""Which of the requests that wait goes next."""

import collections
import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdproxy.planning.queue import DepartureRate, FairQueue, Queued

EVER = math.inf


def entry(key: str = "k", priority: int = 0, cost: float = 1.0, deadline: float = EVER) -> Queued:
    return Queued(key, priority, cost, deadline)


def queue_of(*entries: Queued) -> FairQueue[Queued]:
    made: FairQueue[Queued] = FairQueue(lambda _: None)
    for each in entries:
        made.push(each)
    return made


def drained(queue: FairQueue[Queued], most: int = 10**6) -> list[Queued]:
    """The prompts that go, in their order, at most so many."""
    gone: list[Queued] = []
    while len(gone) < most and (head := queue.head(0.0)) is not None:
        queue.served(head)
        gone.append(head)
    return gone


def test_a_lower_priority_goes_first_and_equals_go_in_order_of_arrival() -> None:
    late, first, second, urgent = entry(priority=5), entry(), entry(), entry(priority=-3)
    assert drained(queue_of(late, first, second, urgent)) == [urgent, first, second, late]


def test_a_flood_of_one_key_delays_another_key_by_one_request_at_most() -> None:
    flood = [entry("flood", cost=100.0) for _ in range(1000)]
    queue = queue_of(*flood)
    drained(queue, 300)
    quiet = entry("quiet", cost=5000.0)
    queue.push(quiet)
    assert quiet in drained(queue, 2)


def test_shares_are_of_tokens_not_of_requests() -> None:
    small, large = [entry("small", cost=10.0) for _ in range(200)], [entry("large", cost=100.0) for _ in range(200)]
    gone = drained(queue_of(*large, *small), 110)
    tokens = collections.Counter[str]()
    for each in gone:
        tokens[each.key] += int(each.cost)
    assert tokens["small"] == pytest.approx(tokens["large"], abs=100)


def test_shares_are_by_weight() -> None:
    queue = queue_of(*(entry(key, cost=10.0) for key in "ab" for _ in range(200)))
    tokens = collections.Counter[str]()
    for _ in range(100):
        head = queue.head(0.0)
        assert head is not None
        queue.served(head, {"a": 3.0, "b": 1.0}[head.key])
        tokens[head.key] += int(head.cost)
    assert tokens["a"] == pytest.approx(3 * tokens["b"], abs=40)


def test_a_key_that_may_not_go_is_passed_and_has_saved_up_nothing() -> None:
    blocked, others = [entry("a") for _ in range(50)], [entry(key) for key in "bc" for _ in range(100)]
    queue = queue_of(*blocked, *others)
    for _ in range(100):
        head = queue.head(0.0, lambda key: key != "a")
        assert head is not None
        assert head.key != "a"
        queue.served(head)
    assert queue.head(0.0, lambda key: False) is None
    keys = [each.key for each in drained(queue, 30)]
    assert keys.count("a") in (10, 11), "its share from now on"
    assert len(queue) == 250 - 130


def test_those_behind_one_that_is_passed_go_in_their_order() -> None:
    urgent, first, second = entry("a", -1), entry("b"), entry("c", 1)
    queue = queue_of(second, first, urgent)
    assert queue.head(0.0, lambda key: key != "a") is first
    assert queue.head(0.0, lambda key: key == "c") is second
    assert queue.head(0.0) is urgent


def test_what_is_past_its_deadline_is_told_though_others_are_passed() -> None:
    told: list[Queued] = []
    queue: FairQueue[Queued] = FairQueue(told.append)
    blocked, late, good = entry("a"), entry("b", deadline=1.0), entry("c")
    for each in (blocked, late, good):
        queue.push(each)
    assert queue.head(2.0, lambda key: key != "a") is good
    assert told == [late]
    assert queue.head(2.0) is blocked


def test_a_key_pays_for_what_its_request_really_cost() -> None:
    queue = queue_of(*(entry(key, cost=10.0) for key in "ab" for _ in range(50)))
    [first, _] = drained(queue, 2)
    assert first.key == "a"
    queue.correct(first, 110.0)
    keys = [each.key for each in drained(queue, 12)]
    assert keys.count("a") in (1, 2)
    queue.correct(entry("nobody"), 1000.0)
    queue.correct(entry("a", priority=7), 1000.0)
    assert len(queue) == 100 - 14


def test_a_key_that_was_idle_has_saved_up_nothing() -> None:
    busy = [entry("busy", cost=10.0) for _ in range(100)]
    queue = queue_of(entry("idle", cost=10.0), *busy[:50])
    drained(queue, 40)
    for each in busy[50:]:
        queue.push(each)
    for _ in range(20):
        queue.push(entry("idle", cost=10.0))
    keys = [each.key for each in drained(queue, 20)]
    assert keys.count("idle") in (10, 11)


def test_a_key_that_had_its_share_before_its_turn_has_to_wait_though_it_left_the_queue() -> None:
    queue = queue_of(entry("a", cost=1000.0), *(entry("b", cost=10.0) for _ in range(200)))
    drained(queue, 2)
    again = entry("a")
    queue.push(again)
    assert again not in drained(queue, 95)
    assert again in drained(queue, 10)


def test_one_that_leaves_is_not_charged() -> None:
    queue = queue_of(*(entry("a", cost=10.0) for _ in range(5)))
    leavers = [entry("b", cost=1e6) for _ in range(3)]
    for each in leavers:
        queue.push(each)
        queue.remove(each)
    stays = entry("b")
    queue.push(stays)
    assert stays in drained(queue, 2)
    assert len(queue) == 4
    queue.remove(stays)
    assert len(queue) == 4, "twice does no harm"


def test_what_is_past_its_deadline_is_told_and_not_served() -> None:
    told: list[Queued] = []
    queue: FairQueue[Queued] = FairQueue(told.append)
    late, later, good = entry(deadline=5.0), entry(deadline=7.0), entry(deadline=9.0)
    for each in (late, later, good):
        queue.push(each)
    assert queue.head(4.9) is late
    assert queue.head(7.0) is good
    assert (told, len(queue)) == ([late, later], 1)


def test_the_newest_of_a_key_is_its_least_urgent() -> None:
    urgent, patient, newer = entry("a", -1), entry("a", 3), entry("a", 3)
    queue = queue_of(entry("b", 9), patient, newer, urgent)
    assert queue.newest("a") is newer
    queue.remove(newer)
    assert queue.newest("a") is patient
    assert queue.newest("nobody") is None


def test_coming_and_going_leaves_nothing_behind() -> None:
    queue = queue_of(entry("stays"))
    for number in range(10_000):
        each = entry(f"k{number}", priority=number % 50)
        queue.push(each)
        queue.remove(each)
    assert len(queue._heap) < 20
    assert len(queue._levels) == 1
    assert len(queue._levels[0].flows) < 300, "keys that are remembered while one waits: as many as there are keys"


MOVES = st.lists(
    st.one_of(
        st.tuples(st.just("push"), st.sampled_from("abc"), st.integers(-1, 1), st.integers(1, 50)),
        st.tuples(st.just("serve"), st.just(""), st.just(0), st.just(0)),
        st.tuples(st.just("leave"), st.just(""), st.just(0), st.integers(0, 10)),
    ),
    max_size=60,
)


@given(MOVES)
def test_whatever_comes_and_goes(moves: list[tuple[str, str, int, int]]) -> None:
    """The most urgent goes, of one key in order of arrival; every one once; none is lost."""
    queue, waiting = queue_of(), list[Queued]()
    for move, key, priority, number in moves:
        if move == "push":
            waiting.append(entry(key, priority, float(number)))
            queue.push(waiting[-1])
        elif move == "leave" and waiting:
            queue.remove(waiting.pop(number % len(waiting)))
        elif move == "serve" and waiting:
            head = queue.head(0.0)
            assert head is not None
            assert head.priority == min(each.priority for each in waiting)
            own = [each for each in waiting if (each.key, each.priority) == (head.key, head.priority)]
            assert head is own[0]
            waiting.remove(head)
            queue.served(head)
        assert len(queue) == len(waiting)
    assert sorted(map(id, drained(queue))) == sorted(map(id, waiting))


@given(st.lists(st.integers(1, 100), min_size=1, max_size=30), st.lists(st.integers(1, 100), min_size=1, max_size=30))
def test_while_two_keys_wait_neither_gets_ahead_by_more_than_one_request_of_each(
    first: list[int], second: list[int]
) -> None:
    """The bound of start-time fair queueing."""
    queue = queue_of(*(entry("a", cost=float(c)) for c in first), *(entry("b", cost=float(c)) for c in second))
    had, left = {"a": 0.0, "b": 0.0}, {"a": len(first), "b": len(second)}
    while left["a"] and left["b"]:
        [gone] = drained(queue, 1)
        had[gone.key] += gone.cost
        left[gone.key] -= 1
        assert abs(had["a"] - had["b"]) <= max(first) + max(second)


def test_none_starves_under_a_stream_of_others() -> None:
    poor = entry("poor", cost=1000.0)
    queue = queue_of(*(entry("rich") for _ in range(10)), poor)
    others = itertools.count()
    while poor not in drained(queue, 1):
        queue.push(entry(f"other-{next(others) % 5}"))
        assert next(others) < 100


def test_a_wait_is_told_by_how_fast_others_left() -> None:
    rate = DepartureRate()
    assert rate.seconds_to_leave(3, 0.0) == math.inf
    rate.first_waits(0.0)
    for second in range(1, 5):
        rate.departed(2.0 * second)
    assert rate.seconds_to_leave(3, 8.0) == pytest.approx(6.0)
    assert rate.seconds_to_leave(3, 18.0) == pytest.approx(30.0), "nothing has left for ten seconds"
    rate.first_waits(500.0)
    assert rate.seconds_to_leave(3, 501.0) == pytest.approx(6.0), "while none waited none could leave"
