from connector.tiers.pending_loads import Load, Offer, PendingLoads
from connector.tiers.rank_loads import RankLoads
from connector.tiers.stats import SelectionCounters, SelectionSnapshot

BLOCKS = ((1, 2, 3), (9,))
MINE, OTHERS = Offer(0, 0, 48), Offer(1, 0, 32)


class Books:
    def __init__(self) -> None:
        self.tally = SelectionCounters()
        self.desk = PendingLoads(["pull", "disk"], self.tally)

    def begin(self, request_id: str, *, asynchronous: bool = True, tokens: int = 48) -> int | None:
        self.desk.answered(request_id, [MINE, OTHERS], MINE, asynchronous=asynchronous)
        return self.desk.admitted(request_id, BLOCKS, tokens)

    def counts(self) -> dict[tuple[str, str], int]:
        balance = self.tally.drain(self.desk.pending())
        return {(name.removeprefix("child_"), child): number for name, child, number in balance.counts}


def test_an_admission_is_counted_once_however_often_it_was_tried() -> None:
    books = Books()
    for _ in range(5):
        books.desk.answered("r", [MINE, OTHERS], MINE, asynchronous=True)
    assert books.counts() == {}
    assert books.begin("r") == 0
    assert books.counts() == {
        ("queries", "pull"): 1,
        ("wins", "pull"): 1,
        ("tokens_won", "pull"): 48,
        ("queries", "disk"): 1,
        ("losses", "disk"): 1,
    }


def test_what_is_loaded_counts_and_not_what_was_claimed() -> None:
    """The scheduler may find more locally in between: then nobody has won, and nothing needs taking back."""
    books = Books()
    assert books.begin("r", tokens=0) is None
    assert books.counts() == {
        ("queries", "pull"): 1,
        ("losses", "pull"): 1,
        ("queries", "disk"): 1,
        ("losses", "disk"): 1,
    }
    assert books.desk.pending() == {"pull": 0, "disk": 0}


def test_queries_are_wins_losses_and_misses() -> None:
    books = Books()
    for number, claims in enumerate([[MINE, OTHERS], [MINE, Offer(1, 0, 0)], [Offer(0, 0, 0), Offer(1, 0, None)]]):
        chosen = MINE if MINE in claims else None
        books.desk.answered(str(number), claims, chosen, asynchronous=True)
        books.desk.admitted(str(number), BLOCKS, 48 if chosen else 0)
    counts = books.counts()
    for child in ("pull", "disk"):
        parts = sum(counts.get((name, child), 0) for name in ("wins", "losses", "misses"))
        assert counts["queries", child] == parts == 3


def test_a_second_allocation_for_a_loaded_request_is_no_admission() -> None:
    books = Books()
    books.begin("r")
    books.counts()
    books.desk.ended(["r"])
    assert books.desk.admitted("r", BLOCKS, 0) is None
    assert books.counts() == {}


def test_a_load_is_pending_until_it_ended_whatever_became_of_its_request() -> None:
    books = Books()
    books.begin("r")
    books.desk.leave("r")
    assert books.desk.pending() == {"pull": 1, "disk": 0}
    assert books.desk.loading("r") == 0
    books.desk.ended(["r"])
    assert books.desk.pending() == {"pull": 0, "disk": 0}
    assert len(books.desk) == 0


def test_a_load_within_a_step_is_not_waited_for() -> None:
    books = Books()
    assert books.begin("r", asynchronous=False) == 0
    assert books.desk.take_new() == {}
    assert books.desk.pending() == {"pull": 0, "disk": 0}


def test_workers_hear_of_a_load_once() -> None:
    books = Books()
    books.begin("r")
    assert list(books.desk.take_new()) == ["r"]
    assert books.desk.take_new() == {}


def test_a_child_that_failed_is_barred_for_that_request_alone() -> None:
    books = Books()
    books.begin("r")
    assert books.desk.failed(["r", "unknown"], ()) == {"r"}
    books.desk.fail("r", bar=True)
    books.desk.ended(["r"])
    assert books.desk.barred("r") == {0}
    assert books.desk.barred("other") == frozenset()
    books.desk.answered("r", [OTHERS], OTHERS, asynchronous=True)
    books.desk.admitted("r", BLOCKS, 32)
    assert books.desk.barred("r") == {0}
    books.desk.leave("r")
    assert books.desk.barred("r") == frozenset()


def test_nothing_is_remembered_of_an_aborted_request_whose_load_fails() -> None:
    books = Books()
    books.begin("r")
    books.desk.leave("r")
    books.desk.fail("r", bar=True)
    books.desk.ended(["r"])
    assert len(books.desk) == 0
    assert books.counts()["failed_loads", "pull"] == 1


def test_after_a_load_that_was_given_up_nothing_else_is_loaded_for_its_request() -> None:
    books = Books()
    books.begin("r")
    books.desk.give_up("r")
    assert books.desk.barred("r") == {0, 1}
    assert books.desk.failed(["r"], {3}) == set(), "its failure was told"
    assert books.desk.pending() == {"pull": 1, "disk": 0}
    books.desk.leave("r")
    assert books.desk.loading("r") == 0
    books.desk.ended(["r"])
    assert len(books.desk) == 0
    assert books.counts()["failed_loads", "pull"] == 1


def test_a_block_that_was_not_loaded_names_its_request() -> None:
    books = Books()
    books.begin("r")
    assert books.desk.failed((), {3}) == {"r"}
    assert books.desk.failed((), {4}) == set()


def test_waiting_begins_with_the_first_question_and_again_after_an_admission() -> None:
    books = Books()
    assert [books.desk.waited("r", now) for now in (10.0, 10.3, 11.0)] == [0.0, 10.3 - 10.0, 1.0]
    books.begin("r")
    books.desk.ended(["r"])
    assert books.desk.waited("r", 20.0) == 0.0


def test_a_counter_never_goes_back() -> None:
    tally = SelectionCounters()
    for number in (5, -7, 0):
        tally.add("child_tokens_won", "disk", number)
    assert tally.drain({}) == SelectionSnapshot([("child_tokens_won", "disk", 5)], {})


def test_pending_is_told_when_it_changes() -> None:
    tally = SelectionCounters()
    assert tally.drain({"disk": 1}).pending == {"disk": 1}
    assert tally.drain({"disk": 1}).pending == {}
    assert tally.drain({"disk": 0}).pending == {"disk": 0}


def test_a_rank_gives_up_what_still_runs_and_tells_of_its_end_apart() -> None:
    failures = RankLoads()
    failures.expect({"r": Load(0, BLOCKS), "done": Load(0, ((4,),)), "other": Load(1, ((5,),))})
    failures.settle(["done"])
    assert failures.give_up(["r", "done", "unknown"]) == {"r"}
    assert failures.give_up(["r"]) == set()
    assert failures.take_report() == ({"r": 1}, {})
    assert failures.take_report() == ({}, {})
    assert not failures.waits_for_given_up(), "another load runs"
    failures.settle(["other"])
    assert failures.waits_for_given_up()
    assert failures.of_given_up({1, 7}) == {1}
    assert failures.withhold(["other"]) == set()
    assert failures.withhold(["r", "other"]) == {"r"}
    assert failures.take_report() == ({}, {"r": 1})
    assert not failures.waits_for_given_up()
    assert failures.withhold(["r"]) == set()


def test_failed_blocks_become_failed_requests_of_the_child_that_said_so() -> None:
    books = Books()
    books.begin("r")
    failures = RankLoads()
    failures.expect(books.desk.take_new())
    failures.hear(1, {2})
    assert failures.settle(()) == set()
    failures.hear(0, {9})
    assert failures.settle(["other"]) == set()
    assert failures.settle(["r"]) == {"r"}
    assert failures.settle(["r"]) == set()
    assert len(failures) == 0
