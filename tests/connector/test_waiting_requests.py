"""The table of waiting requests: what a delivery finds, whatever came first; and nothing is kept for ever."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector.counters import Counters, WaitEnd
from connector.ticket import Ticket
from connector.ticket_fields import Refusal, RefusalReason
from connector.transfer_params import AwaitTicket, ComputeLocally, DeliverTicket, ReadTicket
from connector.waiting_requests import KEEP, MOST_BLOCKS, Delivered, WaitingRequests
from tests.connector.tickets import good

ID = "wait-0123456789abcdef"
TICKET = DeliverTicket(ID, good())
NONE = DeliverTicket(ID, None)
READ = ReadTicket(good())
OTHER_PROMPT = Refusal(RefusalReason.DIGEST, "the ticket is for another prompt")


def request(name: str = "r", prompt: str = "mine") -> Any:
    return SimpleNamespace(request_id=name, prompt=prompt)


def fit(request: Any, ticket: Ticket | Refusal) -> ReadTicket | Refusal:
    """Requests whose prompt is another's are refused."""
    if isinstance(ticket, Refusal):
        return ticket
    return ReadTicket(ticket) if request.prompt == "mine" else OTHER_PROMPT


def table(most: int = 4, longest: float = 300) -> WaitingRequests:
    return WaitingRequests(most, longest, fit, Counters())


def order(wait: str = ID, seconds: float = 10) -> AwaitTicket:
    return AwaitTicket(wait, seconds)


def ends(waits: WaitingRequests) -> dict[str, int]:
    """How waits have ended since the last call."""
    return {labels[0]: count for name, labels, count in waits.counters.drain().counts if name == "ticket_waits"}


def test_it_waits_until_its_ticket_comes() -> None:
    waits, one = table(), request()
    assert waits.begin(one, order(), now=0) == order()
    assert waits.must_wait("r", now=9.9)
    assert waits.deliver(TICKET, now=9.9) == Delivered(((one, READ),))
    assert not waits.must_wait("r", now=9.9)
    assert ends(waits) == {"ticket": 1}


def test_word_that_there_is_none_lets_it_compute() -> None:
    waits, one = table(), request()
    waits.begin(one, order(), now=0)
    assert waits.deliver(NONE, now=1) == Delivered(((one, ComputeLocally()),))
    assert ends(waits) == {"no_ticket": 1}


def test_a_ticket_that_does_not_fit_is_refused_of_that_request_alone() -> None:
    waits, mine, other = table(), request("r-0"), request("r-1", "another")
    for one in (mine, other):
        waits.begin(one, order(), now=0)
    assert waits.deliver(TICKET, now=1).requests == ((mine, READ), (other, OTHER_PROMPT))
    assert ends(waits) == {"ticket": 1, "refused": 1}


def test_a_bad_ticket_is_refused() -> None:
    waits, bad = table(), Refusal(RefusalReason.BAD_SIGNATURE, "no")
    waits.begin(request(), order(), now=0)
    ((_, settled),) = waits.deliver(DeliverTicket(ID, bad), now=1).requests
    assert settled == bad


def test_another_id_s_ticket_changes_nothing() -> None:
    waits = table()
    waits.begin(request(), order(), now=0)
    assert waits.deliver(DeliverTicket("another-0123456789", good()), now=1) == Delivered()
    assert waits.must_wait("r", now=1)


def test_the_first_delivery_counts() -> None:
    waits = table()
    waits.begin(request(), order(), now=0)
    waits.deliver(TICKET, now=1)
    assert waits.deliver(TICKET, now=2) == Delivered()
    assert waits.deliver(NONE, now=2) == Delivered()
    assert waits.begin(request("late sample"), order(), now=2) == READ


@pytest.mark.parametrize(("delivery", "settled"), [(TICKET, READ), (NONE, ComputeLocally())])
def test_a_delivery_may_come_first(delivery: DeliverTicket, settled: object) -> None:
    waits = table()
    assert waits.deliver(delivery, now=0) == Delivered()
    assert waits.begin(request(), order(), now=KEEP - 1) == settled
    assert len(waits) == 0


def test_a_delivery_that_nobody_asks_for_is_dropped_after_a_while() -> None:
    waits = table()
    waits.deliver(TICKET, now=0)
    assert waits.begin(request(), order(), now=KEEP) == order()
    assert waits.remembered == 0


def test_the_deadline_is_its_own_or_the_node_s() -> None:
    waits = table(longest=5)
    waits.begin(request("short"), order(seconds=1), now=0)
    waits.begin(request("long"), order(seconds=10**400), now=0)
    assert waits.must_wait("short", now=1)
    assert ends(waits) == {"deadline": 1}
    assert not waits.must_wait("short", now=1), "it was asked for again, and looked up before"
    assert waits.must_wait("long", now=4.9)
    assert ends(waits) == {}
    assert waits.must_wait("long", now=5)
    assert not waits.must_wait("long", now=5)
    assert ends(waits) == {"deadline": 1}


def test_vllm_does_not_look_it_up_but_where_it_would_run_it() -> None:
    """It skips the look-up of a request that is marked when a step begins, and runs one that is marked when it asks."""
    waits, one = table(), request()
    waits.begin(one, order(), now=0)
    for _ in range(2):
        assert one.skip_reading_prefix_cache
        waits.must_wait("r", now=1)
        assert not one.skip_reading_prefix_cache
        waits.on_step_planned()
    waits.deliver(TICKET, now=2)
    assert not one.skip_reading_prefix_cache
    waits.on_step_planned()
    assert not one.skip_reading_prefix_cache


@pytest.mark.parametrize("how", [WaitEnd.DEADLINE, WaitEnd.UNNEEDED])
def test_it_is_looked_up_when_it_computes(how: WaitEnd) -> None:
    waits, one = table(), request()
    waits.begin(one, order(), now=0)
    waits.must_wait("r", now=1)
    waits.end("r", how, now=1)
    waits.on_step_planned()
    assert not one.skip_reading_prefix_cache


def test_a_ticket_that_comes_after_the_deadline_and_before_vllm_asked_is_taken() -> None:
    waits, one = table(), request()
    waits.begin(one, order(seconds=1), now=0)
    assert waits.deliver(TICKET, now=2) == Delivered(((one, READ),))


@pytest.mark.parametrize("how", [WaitEnd.GONE, WaitEnd.UNNEEDED, WaitEnd.DEADLINE])
def test_of_a_wait_that_is_over_the_ticket_goes_back_once(how: WaitEnd) -> None:
    waits = table()
    for name in ("r-0", "r-1"):
        waits.begin(request(name), order(), now=0)
        assert waits.end(name, how, now=1)
    assert not waits.end("r-0", how, now=1)
    assert ends(waits) == {how: 2}
    assert waits.deliver(TICKET, now=2) == Delivered(too_late=2)
    assert waits.deliver(TICKET, now=2 + KEEP) == Delivered()


def test_there_is_nothing_to_give_back_where_there_is_no_ticket() -> None:
    waits = table()
    waits.begin(request(), order(), now=0)
    waits.end("r", WaitEnd.GONE, now=1)
    assert waits.deliver(NONE, now=2) == Delivered()


def test_one_too_many_computes_and_its_ticket_goes_back() -> None:
    waits = table(most=2)
    for number in range(2):
        waits.begin(request(f"r-{number}"), order(f"{ID}-{number}"), now=0)
    assert waits.begin(request("r-2"), order(), now=0) == ComputeLocally()
    assert ends(waits) == {"too_many": 1}
    assert waits.deliver(TICKET, now=1) == Delivered(too_late=1)


def test_of_too_many_deliveries_and_ids_the_oldest_are_forgotten() -> None:
    waits = table(most=2)
    for number in range(3):
        waits.deliver(DeliverTicket(f"{ID}-{number}", good()), now=0)
    assert waits.remembered == 2
    assert waits.begin(request(), order(f"{ID}-0"), now=0) == order(f"{ID}-0")
    for number in range(3):
        waits.begin(request(f"r-{number}"), order(f"gone-0123456789-{number}"), now=0)
        waits.end(f"r-{number}", WaitEnd.GONE, now=0)
    assert waits.remembered == 4


def test_none_waits_on_a_node_that_lets_none() -> None:
    assert table(most=0).begin(request(), order(), now=0) == ComputeLocally()


def test_the_gauge_follows() -> None:
    waits = table()

    def level() -> list[tuple[str, list[str], int]]:
        return waits.counters.drain().gauges

    assert level() == [("waiting_requests", [], 0)]
    waits.begin(request(), order(), now=0)
    assert level() == [("waiting_requests", [], 1)]
    waits.deliver(TICKET, now=1)
    assert level() == [("waiting_requests", [], 0)]


def test_it_is_told_how_long_each_waited() -> None:
    waits = table()
    waits.begin(request(), order(), now=1)
    waits.deliver(TICKET, now=3.5)
    waits.begin(request("second sample"), order(), now=4)
    assert waits.counters.drain().seconds == [("ticket_wait_seconds", 2.5), ("ticket_wait_seconds", 0.0)]


IDS = [f"{ID}-{number}" for number in range(6)]
EVENTS = st.lists(
    st.tuples(st.sampled_from(["begin", "ticket", "none", "end", "ask"]), st.integers(0, 5), st.floats(0, 20)),
    max_size=60,
)


@given(EVENTS)
def test_every_wait_ends_once_and_all_that_is_kept_is_bounded(events: list[tuple[str, int, float]]) -> None:
    waits, now, begun, seen = table(most=3, longest=25), 0.0, 0, Counter[str]()
    for number, (what, which, passed) in enumerate(events):
        now += passed
        match what:
            case "begin":
                waits.begin(request(f"r-{number}"), order(IDS[which], 30), now)
                begun += 1
            case "ticket" | "none":
                waits.deliver(DeliverTicket(IDS[which], good() if what == "ticket" else None), now)
            case "end":
                waits.end(f"r-{which}", WaitEnd.GONE, now)
            case "ask":
                waits.must_wait(f"r-{which}", now)
        seen.update(ends(waits))
        assert len(waits) <= 3
        assert waits.remembered <= 6
        assert seen.total() + len(waits) == begun


# ---- a ticket that the prefill node sends itself

AGAIN = good(request_id="cmpl-2-0")
"""Of a second prefill of the same prompt."""


def ways(waits: WaitingRequests) -> dict[tuple[str, ...], int]:
    """Deliveries by way and effect, since the last call."""
    counts = waits.counters.drain().counts
    return {tuple(labels): count for name, labels, count in counts if name == "ticket_deliveries"}


def test_a_direct_ticket_settles_the_wait_and_the_proxy_s_changes_nothing() -> None:
    waits, one = table(), request()
    waits.begin(one, order(), now=0)
    assert waits.deliver_directly(ID, good(), now=1) == ((one, READ),)
    assert not waits.must_wait("r", now=1)
    assert waits.deliver(TICKET, now=1) == Delivered()
    assert waits.deliver_directly(ID, good(), now=1) == ()
    assert ways(waits) == {("direct", "first"): 1, ("proxy", "none"): 1, ("direct", "none"): 1}


def test_a_direct_ticket_that_comes_second_changes_nothing() -> None:
    waits, one = table(), request()
    waits.begin(one, order(), now=0)
    waits.deliver(TICKET, now=1)
    assert waits.deliver_directly(ID, AGAIN, now=1) == ()
    assert waits.begin(request("r-1"), order(), now=2) == READ
    assert ways(waits) == {("proxy", "first"): 1, ("direct", "none"): 1}


def test_a_direct_ticket_may_overtake_its_requests() -> None:
    waits = table()
    assert waits.deliver_directly(ID, good(), now=0) == ()
    assert waits.begin(request("0"), order(), now=1) == READ
    waits.deliver(TICKET, now=1)
    assert waits.begin(request("1"), order(), now=2) == READ
    assert ends(waits) == {"ticket": 2}


def test_a_direct_ticket_that_does_not_fit_leaves_the_request_waiting() -> None:
    waits, other = table(), request(prompt="another")
    waits.begin(other, order(), now=0)
    assert waits.deliver_directly(ID, good(), now=1) == ()
    assert waits.must_wait("r", now=1)
    late = request("r-1", "another")
    assert waits.begin(late, order(), now=1) == order()
    assert ends(waits) == {}
    assert waits.deliver(NONE, now=2).requests == ((other, ComputeLocally()), (late, ComputeLocally()))


def test_a_direct_ticket_that_is_too_late_is_left_to_the_proxy_s_delivery() -> None:
    """Which alone gives it back: the wait may have moved to another node, and the ticket with it."""
    waits = table()
    waits.begin(request(), order(), now=0)
    waits.end("r", WaitEnd.GONE, now=1)
    assert waits.deliver_directly(ID, good(), now=2) == ()
    assert waits.deliver(TICKET, now=2) == Delivered(too_late=1)


def test_another_ticket_for_those_that_have_one_is_given_back_once_for_each() -> None:
    waits, both = table(), [request("0"), request("1")]
    waits.begin(both[0], order(), now=0)
    waits.deliver_directly(ID, good(), now=1)
    waits.begin(both[1], order(), now=1)
    assert waits.deliver(DeliverTicket(ID, AGAIN), now=2) == Delivered(too_late=2)
    assert waits.deliver(DeliverTicket(ID, AGAIN), now=2) == Delivered()
    assert waits.begin(request("2"), order(), now=3) == ReadTicket(AGAIN)


def test_direct_tickets_are_kept_no_longer_and_no_more_than_the_proxy_s() -> None:
    waits = table(most=2)
    for number in range(5):
        waits.deliver_directly(f"wait-{number}-0123456789", good(), now=number)
    assert waits.remembered == 2
    waits.deliver_directly(ID, good(), now=KEEP + 5)
    assert waits.remembered == 1


def test_direct_tickets_are_bounded_by_their_blocks() -> None:
    waits = table(most=100)
    long = good(block_ids=(tuple(range(MOST_BLOCKS // 2)),))
    for number in range(5):
        waits.deliver_directly(f"wait-{number}-0123456789", long, now=0)
    assert waits.remembered == 2
