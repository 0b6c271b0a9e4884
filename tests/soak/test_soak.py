"""The soak of each scenario, in three lengths. SOAK_SECONDS sets the short one's, of all scenarios together."""

import gc
import logging
import os
import sys

import pytest

from pdproxy.nodes.node import Role
from pdproxy.observe.labels import BatchOutcome, Forgotten, IdsOutcome, LookUp, Move, Replay, SilenceOutcome
from tests.soak.soak import Scenario, soak
from tests.soak.tally import Tally

LONG = 450.0
SHORT = float(os.environ.get("SOAK_SECONDS", "30"))


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Pytest keeps every line that is logged: the process would grow by it."""
    caplog.set_level(logging.CRITICAL, "pdproxy")


@pytest.mark.parametrize("scenario", Scenario)
async def test_short_soak(scenario: Scenario) -> None:
    tally = await soak(scenario, SHORT / len(Scenario), seed=1)
    assert tally.ended["complete"] > 0
    check_that_silence_cost_nothing(scenario, tally)
    assert tally.count("phase_seconds_count", phase="queue") > 0, "nothing waited in the queue"
    show(scenario, tally)
    if scenario is Scenario.EVENTS:
        check_that_events_counted(tally)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("scenario", Scenario)
async def test_long_soak(scenario: Scenario) -> None:
    before = blocks_of_memory()
    tally = await soak(scenario, LONG, seed=2)
    show(scenario, tally)
    check_that_silence_cost_nothing(scenario, tally)
    print(tally)
    requests = sum(tally.ended.values())
    assert tally.ended["complete"] > 100
    assert (blocks_of_memory() - before) / requests < 0.25, "objects that a request leaves for ever"
    if scenario is Scenario.EVENTS:
        check_that_events_counted(tally)
        assert swollen(tally) < 1.5, "what is known of caches, and expected of them, is bounded"
    else:
        assert grown(tally) < 0.25, "objects that a request leaves"
    if scenario is Scenario.NODES:
        assert tally.by("pdproxy_stream_stall_seconds_count").keys() == set(Move), "streams moved in all ways"


def blocks_of_memory() -> int:
    """The blocks that Python's objects have."""
    gc.collect()
    return sys.getallocatedblocks()


def swollen(tally: Tally) -> float:
    """How many times as much memory as in the second third the process had in the last: the most of each."""
    third = len(tally.objects) // 3
    return max(tally.objects[-third:]) / max(tally.objects[third:-third])


def show(scenario: Scenario, tally: Tally) -> None:
    """Show the run in figures."""
    print(f"{scenario.value}: {dict(tally.ended)}, {tally.kills} kills, {tally.pauses} pauses")
    shown = ["pdproxy_silence_probes_total", "pdproxy_stream_stall_seconds_count"]
    if scenario is Scenario.EVENTS:
        shown += [
            "pdproxy_plans_total",
            "pdproxy_planned_hit_tokens_total",
            "pdproxy_real_hit_tokens_total",
            "soak_hits_total",
        ]
        shown += [
            f"pdproxy_{name}_total" for name in ("prompt_lookups", "token_ids", "kv_event_batches", "kv_event_replays")
        ]
        shown += ["pdproxy_kv_places_forgotten_total"]
    for name in shown:
        values = tally.by(name)
        print(
            name,
            ", ".join(f"{label} {value:g} ({value / sum(values.values()):.0%})" for label, value in values.items()),
        )


def check_that_silence_cost_nothing(scenario: Scenario, tally: Tally) -> None:
    """Nodes were silent, and none was given up for it."""
    probes = {
        outcome: [tally.count("silence_probes_total", role=role, outcome=outcome) for role in Role]
        for outcome in SilenceOutcome
    }
    assert probes[SilenceOutcome.GIVEN_UP] == probes[SilenceOutcome.TOO_MANY] == [0, 0], "a false alarm"
    if scenario is Scenario.SILENCE:
        assert tally.pauses > 0
        assert all(probes[SilenceOutcome.ANSWERED]), "no node was silent"
    else:
        assert tally.kills > 0


def check_that_events_counted(tally: Tally) -> None:
    """They were used, and they were wrong."""
    hits = tally.by("soak_hits_total")
    assert hits["right"] > 0
    assert hits["too_many"] > 0
    assert hits["too_few"] > 0
    assert sum(tally.by("pdproxy_planned_hit_tokens_total").values()) > 0
    assert tally.by("pdproxy_plans_total").keys() > {"cached", "resumes", "nothing_cached"}
    assert tally.by("pdproxy_kv_event_batches_total").keys() == set(BatchOutcome)
    assert tally.by("pdproxy_kv_event_replays_total").keys() >= {Replay.COMPLETE, Replay.RESTARTED}
    assert tally.by("pdproxy_kv_places_forgotten_total").keys() >= {Forgotten.GAP, Forgotten.JUNK, Forgotten.RESTART}
    outcomes = tally.by("pdproxy_token_ids_total").keys()
    assert outcomes >= {IdsOutcome.FETCHED, IdsOutcome.FAILED}
    assert tally.by("pdproxy_prompt_lookups_total").keys() >= {LookUp.KNOWN, LookUp.ASKED}
    assert IdsOutcome.BUSY not in outcomes, "fewer are asked at once than may be"


def grown(tally: Tally) -> float:
    """Objects by which the process grew, per request, from the first third to the last: the means of each."""
    third = len(tally.objects) // 3
    first, last = sum(tally.objects[:third]) / third, sum(tally.objects[-third:]) / third
    return (last - first) / (sum(tally.ended.values()) * 2 / 3)
