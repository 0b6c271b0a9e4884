from connector.tiers.pending_loads import ChildLoad, Offer, PendingLoads
from connector.tiers.rank_loads import RankLoads
from connector.tiers.stats import SelectionCounters, SelectionSnapshot

BLOCKS = ((1, 2, 3), (9,))
MINE, OTHERS = Offer(0, 0, 48), Offer(1, 0, 32)


class Scheduler:
    def __init__(self) -> None:
        self.counters = SelectionCounters()
        self.loads = PendingLoads(["pull", "disk"], self.counters)

    def admit(self, request_id: str, *, asynchronous: bool = True, tokens: int = 48) -> int | None:
        self.loads.record_choice(request_id, [MINE, OTHERS], MINE, asynchronous=asynchronous)
        return self.loads.admitted(request_id, BLOCKS, tokens)

    def counts(self) -> dict[tuple[str, str], int]:
        snapshot = self.counters.drain(self.loads.pending())
        return {(name.removeprefix("child_"), child): number for name, child, number in snapshot.counts}


def test_an_admission_is_counted_once_however_often_it_was_tried() -> None:
    scheduler = Scheduler()
    for _ in range(5):
        scheduler.loads.record_choice("r", [MINE, OTHERS], MINE, asynchronous=True)
    assert scheduler.counts() == {}
    assert scheduler.admit("r") == 0
    assert scheduler.counts() == {
        ("queries", "pull"): 1,
        ("wins", "pull"): 1,
        ("tokens_won", "pull"): 48,
        ("queries", "disk"): 1,
        ("losses", "disk"): 1,
    }


def test_what_is_loaded_counts_and_not_what_was_offered() -> None:
    """The scheduler may find more locally in between: then no child has won, and nothing needs subtracting."""
    scheduler = Scheduler()
    assert scheduler.admit("r", tokens=0) is None
    assert scheduler.counts() == {
        ("queries", "pull"): 1,
        ("losses", "pull"): 1,
        ("queries", "disk"): 1,
        ("losses", "disk"): 1,
    }
    assert scheduler.loads.pending() == {"pull": 0, "disk": 0}


def test_queries_are_wins_losses_and_misses() -> None:
    scheduler = Scheduler()
    for number, offers in enumerate([[MINE, OTHERS], [MINE, Offer(1, 0, 0)], [Offer(0, 0, 0), Offer(1, 0, None)]]):
        chosen = MINE if MINE in offers else None
        scheduler.loads.record_choice(str(number), offers, chosen, asynchronous=True)
        scheduler.loads.admitted(str(number), BLOCKS, 48 if chosen else 0)
    counts = scheduler.counts()
    for child in ("pull", "disk"):
        parts = sum(counts.get((name, child), 0) for name in ("wins", "losses", "misses"))
        assert counts["queries", child] == parts == 3


def test_a_second_allocation_for_a_loaded_request_is_no_admission() -> None:
    scheduler = Scheduler()
    scheduler.admit("r")
    scheduler.counts()
    scheduler.loads.ended(["r"])
    assert scheduler.loads.admitted("r", BLOCKS, 0) is None
    assert scheduler.counts() == {}


def test_a_load_is_pending_until_it_ended_whatever_became_of_its_request() -> None:
    scheduler = Scheduler()
    scheduler.admit("r")
    scheduler.loads.on_request_finished("r")
    assert scheduler.loads.pending() == {"pull": 1, "disk": 0}
    assert scheduler.loads.loading("r") == 0
    scheduler.loads.ended(["r"])
    assert scheduler.loads.pending() == {"pull": 0, "disk": 0}
    assert len(scheduler.loads) == 0


def test_a_load_within_a_step_is_not_waited_for() -> None:
    scheduler = Scheduler()
    assert scheduler.admit("r", asynchronous=False) == 0
    assert scheduler.loads.pop_new() == {}
    assert scheduler.loads.pending() == {"pull": 0, "disk": 0}


def test_workers_get_a_load_once() -> None:
    scheduler = Scheduler()
    scheduler.admit("r")
    assert list(scheduler.loads.pop_new()) == ["r"]
    assert scheduler.loads.pop_new() == {}


def test_a_child_that_failed_is_barred_for_that_request_alone() -> None:
    scheduler = Scheduler()
    scheduler.admit("r")
    assert scheduler.loads.failed_requests(["r", "unknown"], ()) == {"r"}
    scheduler.loads.fail("r")
    scheduler.loads.ended(["r"])
    assert scheduler.loads.barred("r") == {0}
    assert scheduler.loads.barred("other") == frozenset()
    scheduler.loads.record_choice("r", [OTHERS], OTHERS, asynchronous=True)
    scheduler.loads.admitted("r", BLOCKS, 32)
    assert scheduler.loads.barred("r") == {0}
    scheduler.loads.on_request_finished("r")
    assert scheduler.loads.barred("r") == frozenset()


def test_nothing_is_remembered_of_an_aborted_request_whose_load_fails() -> None:
    scheduler = Scheduler()
    scheduler.admit("r")
    scheduler.loads.on_request_finished("r")
    scheduler.loads.fail("r")
    scheduler.loads.ended(["r"])
    assert len(scheduler.loads) == 0
    assert scheduler.counts()["failed_loads", "pull"] == 1


def test_after_a_load_that_was_given_up_nothing_else_is_loaded_for_its_request() -> None:
    scheduler = Scheduler()
    scheduler.admit("r")
    scheduler.loads.give_up("r")
    assert scheduler.loads.barred("r") == {0, 1}
    assert scheduler.loads.failed_requests(["r"], {3}) == set(), "its failure was reported"
    assert scheduler.loads.pending() == {"pull": 1, "disk": 0}
    scheduler.loads.on_request_finished("r")
    assert scheduler.loads.loading("r") == 0
    scheduler.loads.ended(["r"])
    assert len(scheduler.loads) == 0
    assert scheduler.counts()["failed_loads", "pull"] == 1


def test_a_block_that_was_not_loaded_names_its_request() -> None:
    scheduler = Scheduler()
    scheduler.admit("r")
    assert scheduler.loads.failed_requests((), {3}) == {"r"}
    assert scheduler.loads.failed_requests((), {4}) == set()


def test_waiting_begins_with_the_first_question_and_again_after_an_admission() -> None:
    scheduler = Scheduler()
    assert [scheduler.loads.waited("r", now) for now in (10.0, 10.3, 11.0)] == [0.0, 10.3 - 10.0, 1.0]
    scheduler.admit("r")
    scheduler.loads.ended(["r"])
    assert scheduler.loads.waited("r", 20.0) == 0.0


def test_a_counter_never_goes_back() -> None:
    counters = SelectionCounters()
    for number in (5, -7, 0):
        counters.add("child_tokens_won", "disk", number)
    assert counters.drain({}) == SelectionSnapshot([("child_tokens_won", "disk", 5)], {})


def test_pending_is_reported_when_it_changes() -> None:
    counters = SelectionCounters()
    assert counters.drain({"disk": 1}).pending == {"disk": 1}
    assert counters.drain({"disk": 1}).pending == {}
    assert counters.drain({"disk": 0}).pending == {"disk": 0}


def test_a_rank_gives_up_what_still_runs_and_reports_its_end_apart() -> None:
    rank_loads = RankLoads()
    rank_loads.start({"r": ChildLoad(0, BLOCKS), "done": ChildLoad(0, ((4,),)), "other": ChildLoad(1, ((5,),))})
    rank_loads.finish(["done"])
    assert rank_loads.give_up(["r", "done", "unknown"]) == {"r"}
    assert rank_loads.give_up(["r"]) == set()
    assert rank_loads.pop_report() == ({"r": 1}, {})
    assert rank_loads.pop_report() == ({}, {})
    assert not rank_loads.has_only_given_up(), "another load runs"
    rank_loads.finish(["other"])
    assert rank_loads.has_only_given_up()
    assert rank_loads.blocks_of_given_up({1, 7}) == {1}
    assert rank_loads.pop_given_up(["other"]) == set()
    assert rank_loads.pop_given_up(["r", "other"]) == {"r"}
    assert rank_loads.pop_report() == ({}, {"r": 1})
    assert not rank_loads.has_only_given_up()
    assert rank_loads.pop_given_up(["r"]) == set()


def test_failed_blocks_become_failed_requests_of_the_child_that_reported_them() -> None:
    scheduler = Scheduler()
    scheduler.admit("r")
    rank_loads = RankLoads()
    rank_loads.start(scheduler.loads.pop_new())
    rank_loads.on_load_errors(1, {2})
    assert rank_loads.finish(()) == set()
    rank_loads.on_load_errors(0, {9})
    assert rank_loads.finish(["other"]) == set()
    assert rank_loads.finish(["r"]) == {"r"}
    assert rank_loads.finish(["r"]) == set()
    assert len(rank_loads) == 0
