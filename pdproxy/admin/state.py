"""What the live page shows, as JSON."""

import dataclasses
from collections.abc import Mapping

from pdproxy.admin.bodies import status
from pdproxy.admin.desk import Desk, readiness
from pdproxy.drive.live import Failure, Ride
from pdproxy.drive.timeline import Timeline
from pdproxy.observe.labels import Phase

SHOWN = 50
"""Requests on the way that are shown; of the others their number is told."""
_LONGEST = 200
"""Characters of a model's name: a client can send any."""
_BARS = (Phase.PLAN, Phase.PREFILL, Phase.HANDOVER, Phase.DECODE)


def state(desk: Desk) -> Mapping[str, object]:
    """Everything at one moment; times in seconds."""
    now, pool = desk.clock.now(), desk.pool.snapshot()
    return {
        "ready": readiness(desk),
        "nodes": [status(view, pool.bars).model_dump(mode="json") for view in pool.nodes],
        "on_the_way": len(desk.live),
        "requests": [_ride(ride) for ride in desk.live.newest(SHOWN)],
        "hits": [{"way": way, **dataclasses.asdict(sums)} for way, sums in desk.live.hits.by_way.items()],
        "failures": [_failure(failure, now) for failure in desk.live.failures()],
    }


def _ride(ride: Ride) -> Mapping[str, object]:
    request, timeline = ride.request, ride.timeline
    return {
        "id": request.request_id,
        "endpoint": request.endpoint,
        "model": request.model[:_LONGEST],
        "prefill": timeline.nodes.get(Phase.PREFILL, ""),
        "decode": timeline.nodes.get(Phase.HANDOVER, ""),
        "phase": timeline.now,
        "seconds": _seconds(timeline),
    }


def _seconds(timeline: Timeline) -> Mapping[str, float]:
    """By phase; the wait before the plan is apart."""
    spent = {phase: timeline.so_far(phase) for phase in _BARS}
    spent[Phase.QUEUE] = timeline.began - timeline.start
    return {phase.value: round(seconds, 4) for phase, seconds in spent.items()}


def _failure(failure: Failure, now: float) -> Mapping[str, object]:
    ride = failure.ride
    return {
        "ago": round(now - failure.at, 1),
        "id": failure.name,
        "leg": failure.leg,
        "node": failure.node,
        "fault": failure.fault,
        "step": failure.step,
        "outcome": "" if ride is None else ride.outcome or "on_the_way",
    }
