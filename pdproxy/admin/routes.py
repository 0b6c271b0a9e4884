"""The operators' routes: nodes, live state, and the page that shows both."""

import base64
import dataclasses
import hashlib
import importlib.resources
import re
from collections.abc import Mapping
from typing import Annotated

from fastapi import APIRouter, Query, Response

from pdproxy.admin.context import AdminContext, readiness
from pdproxy.admin.schemas import NewNode, NodeList, NodeStatus, status
from pdproxy.nodes.drain import AfterDrain
from pdproxy.observe.labels import Phase
from pdproxy.orchestration.in_flight import InFlightRequest, LegFailure, Timeline

Seconds = Annotated[float | None, Query(ge=0, le=86400, allow_inf_nan=False)]


def router(desk: AdminContext) -> APIRouter:
    """The endpoints under /nodes; who may use them is the application's matter."""
    routes = APIRouter()

    @routes.get("/nodes")
    async def list_nodes() -> NodeList:
        """Every node as it stands."""
        now = desk.pool.snapshot()
        return NodeList(nodes=[status(view, now.bars) for view in now.nodes])

    @routes.post("/nodes", status_code=201)
    async def add_node(new: NewNode) -> NodeStatus:
        """Take a node in; it serves once its preflight is passed."""
        node = new.node()
        desk.pool.add(node)
        return status(desk.pool.view(node.name), desk.pool.bars)

    @routes.get("/nodes/{name}")
    async def show_node(name: str) -> NodeStatus:
        """One node as it stands."""
        return status(desk.pool.view(name), desk.pool.bars)

    @routes.delete("/nodes/{name}", status_code=202)
    async def remove_node(name: str, seconds: Seconds = None) -> NodeStatus:
        """Drain the node, then forget it; ``seconds=0`` makes running streams leave at once."""
        desk.drainer.start(name, desk.drain_seconds if seconds is None else seconds, AfterDrain.REMOVE)
        return status(desk.pool.view(name), desk.pool.bars)

    @routes.post("/nodes/{name}/drain", status_code=202)
    async def drain_node(name: str, seconds: Seconds = None) -> NodeStatus:
        """No new requests from now on; running ones end or move elsewhere within ``seconds``."""
        desk.drainer.start(name, desk.drain_seconds if seconds is None else seconds, AfterDrain.KEEP)
        return status(desk.pool.view(name), desk.pool.bars)

    @routes.post("/nodes/{name}/rejoin", status_code=202)
    async def rejoin_node(name: str) -> NodeStatus:
        """End a drain: the node passes its preflight again, then serves."""
        desk.drainer.stop(name)
        desk.pool.rejoin(name)
        return status(desk.pool.view(name), desk.pool.bars)

    return routes


SHOWN = 50
"""Requests on the way that are shown; of the others their number is told."""
_LONGEST = 200
"""Characters of a model's name: a client can send any."""
_BARS = (Phase.PLAN, Phase.PREFILL, Phase.HANDOVER, Phase.DECODE)


def state(desk: AdminContext) -> Mapping[str, object]:
    """Everything at one moment; times in seconds."""
    now, pool = desk.clock.now(), desk.pool.snapshot()
    return {
        "ready": readiness(desk),
        "nodes": [status(view, pool.bars).model_dump(mode="json") for view in pool.nodes],
        "on_the_way": len(desk.live),
        "requests": [_ride(ride) for ride in desk.live.newest(SHOWN)],
        "hits": [{"way": route, **dataclasses.asdict(sums)} for route, sums in desk.live.cache_stats.items()],
        "failures": [_failure(failure, now) for failure in desk.live.failures()],
    }


def _ride(ride: InFlightRequest) -> Mapping[str, object]:
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


def _failure(failure: LegFailure, now: float) -> Mapping[str, object]:
    ride = failure.request
    return {
        "ago": round(now - failure.at, 1),
        "id": failure.name,
        "leg": failure.leg,
        "node": failure.node,
        "fault": failure.fault,
        "step": failure.step,
        "outcome": "" if ride is None else ride.outcome or "on_the_way",
    }


def page_router() -> APIRouter:
    """The page itself: it shows nothing until it has asked for the state."""
    routes = APIRouter()
    text = importlib.resources.files("pdproxy.admin").joinpath("live.html").read_text(encoding="utf-8")
    headers = {
        "content-type": "text/html; charset=utf-8",
        "content-security-policy": policy(text),
        "cache-control": "no-cache",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }

    @routes.get("/ui")
    async def page() -> Response:
        """For a browser."""
        return Response(text, headers=headers)

    return routes


def state_router(desk: AdminContext) -> APIRouter:
    """What the page shows; who may see it is the application's matter."""
    routes = APIRouter()

    @routes.get("/ui/state")
    async def show_state(response: Response) -> dict[str, object]:
        """Nodes, requests on the way, hits and failures at this moment."""
        response.headers["cache-control"] = "no-store"
        return dict(state(desk))

    return routes


def policy(text: str) -> str:
    """A Content-Security-Policy that allows the page's own style and script, and questions to where it came from."""
    style, script = (_hash_of(re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)) for tag in ("style", "script"))
    return (
        f"default-src 'none'; style-src {style}; script-src {script}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _hash_of(elements: list[str]) -> str:
    (content,) = elements
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
