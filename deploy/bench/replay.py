"""A trace over HTTP: simulated nodes on loopback, a proxy in front of them, and a client that asks what the trace says.

Times are those of the trace divided by `Site.faster`; what is reported is multiplied by it again.
"""

import asyncio
import contextlib
import json
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

import httpx

from deploy.bench.outcome import Outcome
from deploy.bench.routers import Front, Router
from deploy.bench.simulate import MODEL, Fleet
from deploy.bench.simulated_nodes import Site, text_of
from deploy.bench.traces import Request, Trace, token_ids
from deploy.local.paths import ROOT, VENV
from deploy.local.ports import free_ports
from deploy.local.supervise import Supervisor, inherited
from pdproxy.nodes.node import Role

READY_SECONDS = 60.0
PATIENCE = 120.0
SESSION_HEADERS = ("x-session-id", "x-session-affinity", "x-correlation-id", "x-smg-routing-key")
"""A client that names its session does so in all of them, so that each proxy finds the one that it reads."""


class ReplayError(Exception):
    """There is no outcome; the message says why."""


class Replay:
    """The client's side of one run."""

    def __init__(self, trace: Trace, url: str, faster: float, outcome: Outcome) -> None:
        self._trace, self._url, self._faster, self._outcome = trace, url, faster, outcome
        self._followers = trace.followers()

    async def run(self) -> None:
        """Ask all, to the end."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
        clients = httpx.AsyncClient(limits=limits, timeout=PATIENCE, trust_env=False)
        async with clients as client, asyncio.TaskGroup() as tasks:
            for number, request in enumerate(self._trace.requests):
                if request.after is None:
                    tasks.create_task(self._line(number, client, tasks))

    async def _line(self, number: int, client: httpx.AsyncClient, tasks: asyncio.TaskGroup) -> None:
        """One request at its time, and after it those that come after it."""
        request = self._trace.requests[number]
        await asyncio.sleep(request.at / self._faster)
        try:
            first = await self._ask(client, request)
        except (httpx.HTTPError, ValueError, LookupError) as error:
            self._outcome.failed += 1
            print(f"    request {number} failed: {type(error).__name__}: {error}"[:300], file=sys.stderr)
        else:
            self._outcome.add_first_token(request.tokens, first * self._faster)
        for follower in self._followers.get(number, ()):
            tasks.create_task(self._line(follower, client, tasks))

    async def _ask(self, client: httpx.AsyncClient, request: Request) -> float:
        """Seconds until the first token. Raises ValueError where the answer is not as it should be."""
        headers = {} if request.session is None else dict.fromkeys(SESSION_HEADERS, f"session-{request.session}")
        body = {"model": MODEL, "prompt": text_of(token_ids(request.prompt)), "max_tokens": request.output}
        began, first, ended = time.perf_counter(), None, False
        asked = {**body, "stream": True, "temperature": 0}
        async with client.stream("POST", f"{self._url}/v1/completions", json=asked, headers=headers) as answer:
            if answer.status_code != 200:
                raise ValueError(f"status {answer.status_code}: {(await answer.aread())[:200]!r}")
            async for line in answer.aiter_lines():
                if first is None and _has_token(line):
                    first = time.perf_counter() - began
                ended = ended or line == "data: [DONE]"
        if first is None or not ended:
            raise ValueError("the stream has no token or no end")
        return first


def _has_token(line: str) -> bool:
    if not line.startswith("data: {"):
        return False
    choices = json.loads(line.removeprefix("data: ")).get("choices") or ()
    return any(choice.get("text") for choice in choices)


def run(trace: Trace, router: Router, fleet: Fleet, faster: float, supervisor: Supervisor) -> Outcome:
    """Start nodes and the proxy, replay, and count; the caller's supervisor ends both when it is left.

    Raises:
        ReplayError: the proxy does not get ready, or more than one request in a hundred failed.
        PartEndedError: the proxy or the nodes ended.
    """
    clients, operators, *ports = free_ports(2 + len(fleet.roles()))
    site = Site(fleet, tuple(ports), faster)
    urls, python = site.urls(), str(VENV / "bin" / "python")
    supervisor.start("nodes", [python, "-m", "deploy.bench.simulated_http", site.to_json()], inherited(), ROOT)
    _until(lambda: all(_get(f"{url}/v1/models") for url in urls.values()), "the nodes", supervisor)
    front = Front(clients, operators, _by_role(fleet, urls))
    supervisor.start("router", router.command(front), inherited(), ROOT)
    _until(lambda: _joined(router, front), f"{router.name} to listen", supervisor)
    url = f"http://127.0.0.1:{clients}"
    _until(lambda: _answers(url), router.name, supervisor)
    for node in urls.values():
        _post(f"{node}/simulated", {})
    outcome = Outcome(router.name, fleet.roles())
    asyncio.run(Replay(trace, url, faster, outcome).run())
    supervisor.require_all_alive()
    if outcome.failed * 100 > len(trace.requests):
        raise ReplayError(f"{router.name}: {outcome.failed} of {len(trace.requests)} requests failed")
    for name, node in urls.items():
        told = json.loads(_get(f"{node}/simulated") or b"{}")
        outcome.computed[name] = told["computed"]
        outcome.moved += told["moved"]
        outcome.late = max(outcome.late, told["late"] / max(1, told["waits"]))
    outcome.planned, outcome.resumed = (_planned(operators, kind) for kind in ("planned", "real"))
    return outcome


def _planned(operators: int, kind: str) -> int:
    """This project's count of hits, summed over roles; 0 of another proxy."""
    metric = f"pdproxy_{kind}_hit_tokens_total{{"
    lines = _get(f"http://127.0.0.1:{operators}/metrics").decode().splitlines()
    return round(sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(metric)))


def _by_role(fleet: Fleet, urls: Mapping[str, str]) -> dict[Role, list[str]]:
    roles = fleet.roles()
    return {role: [url for name, url in urls.items() if role in roles[name]] for role in Role}


def _joined(router: Router, front: Front) -> bool:
    with contextlib.suppress(OSError):
        router.joins(front)
        return True
    return False


def _answers(url: str) -> bool:
    """Whether a short prompt is answered."""
    return bool(_post(f"{url}/v1/completions", {"model": MODEL, "prompt": "w1 w2 w3", "max_tokens": 1}))


def _until(met: Any, what: str, supervisor: Supervisor) -> None:
    until = time.monotonic() + READY_SECONDS
    while not met():
        supervisor.require_all_alive()
        if time.monotonic() > until:
            raise ReplayError(f"waited {READY_SECONDS:g} s for {what}")
        time.sleep(0.2)


def _get(url: str) -> bytes:
    return _fetch(urllib.request.Request(url))


def _post(url: str, body: Mapping[str, Any]) -> bytes:
    asked = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    return _fetch(asked)


def _fetch(asked: urllib.request.Request) -> bytes:
    """The body; b"" where there is no good answer yet."""
    try:
        with urllib.request.urlopen(asked, timeout=10) as answer:
            return bytes(answer.read())
    except (OSError, urllib.error.HTTPError):
        return b""
