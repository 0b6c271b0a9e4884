"""The live page for a browser, and the state that it shows."""

import base64
import dataclasses
import hashlib
import importlib.resources
import re
import time
from collections.abc import Mapping

from fastapi import APIRouter, Response

from pdproxy import __version__
from pdproxy.admin.context import SERVES, AdminContext, readiness, unserved_since
from pdproxy.admin.incident import incident
from pdproxy.admin.next_step import next_step
from pdproxy.admin.nodes import status
from pdproxy.admin.seen import Seen
from pdproxy.nodes.node import PoolState
from pdproxy.observe.gen_ai import LONGEST_MODEL
from pdproxy.observe.labels import Phase
from pdproxy.orchestration.context import OrchestrationConfig
from pdproxy.orchestration.in_flight import LegFailure
from pdproxy.orchestration.request_record import AnswerRecord

SHOWN = 50
"""Requests in flight that are shown one by one; all are counted."""
_BARS = (Phase.PLAN, Phase.PREFILL, Phase.HANDOVER, Phase.DECODE)


def page_route() -> APIRouter:
    """The page itself, which holds nothing until its script has fetched the state."""
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
        """The live page, for a browser."""
        return Response(text, headers=headers)

    return routes


def state_route(context: AdminContext) -> APIRouter:
    """The state that the page shows; `guarded_app` guards it."""
    routes = APIRouter()

    @routes.get("/ui/state")
    async def show_state(response: Response) -> dict[str, object]:
        """Nodes, cohorts, requests in flight, cache hits, plans and failures at this moment; times in seconds."""
        response.headers["cache-control"] = "no-store"
        return _state(context)

    return routes


def _state(context: AdminContext) -> dict[str, object]:
    now, pool, live = context.clock.now(), context.pool.state(), context.live
    return {
        "version": __version__,
        # Seconds since 1970 by this host's clock, as in the log: the browser's may differ.
        "at": time.time(),
        "ready": readiness(context),
        "nodes": [status(view, pool.bars, context.caches(view.node.name)) for view in pool.nodes],
        "incident": _incident(context, now, pool),
        "advice": dataclasses.asdict(context.advice()),
        "cohorts": [dataclasses.asdict(cohort) for cohort in context.cohorts.report()],
        "on_the_way": len(live),
        "requests": [_request(each) for each in live.newest(SHOWN)],
        "hits": [{"way": route, **dataclasses.asdict(sums)} for route, sums in live.cache_stats.items()],
        "planned_hits": [{"role": role, **dataclasses.asdict(sums)} for role, sums in live.planned_hits.items()],
        "plans": dict(live.plans),
        "failures": [_failure(each, now) for each in live.failures()],
    }


def _incident(context: AdminContext, now: float, pool: PoolState) -> Mapping[str, object]:
    ready, orchestration = readiness(context), context.orchestration
    config = OrchestrationConfig() if orchestration is None else orchestration.config
    seen = Seen(
        now,
        pool.nodes,
        context.live.recent,
        pool.bars,
        "" if ready in SERVES else ready.value,
        context.hand_overs,
        context.on_prefill_failure,
        context.on_no_decode,
        unserved_since(context),
        context.queue(),
        config.queue,
        config.migrations,
    )
    found = incident(seen)
    step = next_step(seen, found, context.commands)
    told = None if step is None else {**dataclasses.asdict(step), "docs": step.docs}
    return {**dataclasses.asdict(found), "next": told}


def _request(each: AnswerRecord) -> Mapping[str, object]:
    first = each.first
    return {
        "id": each.name,
        "endpoint": each.path,
        "model": each.model[:LONGEST_MODEL],
        "prefill": first.nodes.get(Phase.PREFILL, ""),
        "decode": first.nodes.get(Phase.HANDOVER, ""),
        "phase": first.phase,
        "seconds": _seconds(each),
    }


def _seconds(each: AnswerRecord) -> Mapping[str, float]:
    """Seconds in each phase; the time before the plan is part of the wait."""
    spent = {phase: each.first.so_far(phase) for phase in (*_BARS, Phase.QUEUE)}
    spent[Phase.QUEUE] += each.first.began - each.request.arrived
    return {phase.value: round(seconds, 4) for phase, seconds in spent.items()}


def _failure(failure: LegFailure, now: float) -> Mapping[str, object]:
    return {
        "ago": round(now - failure.at, 1),
        "id": failure.name,
        "leg": failure.leg,
        "node": failure.node,
        "fault": failure.fault,
        "step": failure.step,
        "outcome": failure.request.outcome or "on_the_way",
    }


def policy(text: str) -> str:
    """A Content-Security-Policy that allows the page's own style and script, and requests to its own origin."""
    style, script = (_hash_of(re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)) for tag in ("style", "script"))
    return (
        f"default-src 'none'; style-src {style}; script-src {script}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _hash_of(elements: list[str]) -> str:
    (content,) = elements
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
