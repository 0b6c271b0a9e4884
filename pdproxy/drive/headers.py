"""Response headers that the proxy writes. Nothing of a node gets into them but its content type."""

from collections.abc import Sequence

from pdproxy.drive.passage import Passage
from pdproxy.drive.timeline import Timeline
from pdproxy.request import ClientRequest, Headers

JSON = "application/json"
EVENTS = "text/event-stream; charset=utf-8"


def own(request: ClientRequest, timeline: Timeline) -> Headers:
    """The id, and where the time went."""
    return (("x-pdproxy-request-id", request.request_id), ("server-timing", timeline.header()))


def route(passages: Sequence[Passage]) -> Headers:
    """Which way the answer came; `x-pdproxy-recomputed` where it is known in time (not for streams)."""
    if all(passage.hand_over is None for passage in passages):
        return (("x-pdproxy-route", "local"),)
    way = ("x-pdproxy-route", "disaggregated")
    return (way, ("x-pdproxy-recomputed", "1")) if any(passage.recomputed for passage in passages) else (way,)


def streamed(request: ClientRequest, timeline: Timeline, passages: Sequence[Passage]) -> Headers:
    """Of a stream."""
    return (("content-type", EVENTS), ("cache-control", "no-cache"), *own(request, timeline), *route(passages))


def whole(request: ClientRequest, timeline: Timeline, passages: Sequence[Passage]) -> Headers:
    """Of an answer in one piece."""
    return (("content-type", JSON), *own(request, timeline), *route(passages))
