"""Pages of reference that are made of the code: commands (`docs/cli.md`) and paths (`docs/http.md`)."""

import asyncio
import contextlib
import inspect
import io
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import cast

from fastapi import APIRouter
from fastapi.routing import APIRoute
from prometheus_client import CollectorRegistry

from pdproxy.__main__ import COMMANDS, INTERRUPTED, UNUSABLE, main
from pdproxy.admin.context import AdminContext
from pdproxy.admin.debug import plan_route
from pdproxy.admin.guarded import open_routes
from pdproxy.admin.nodes import node_routes
from pdproxy.admin.page import page_route, state_route
from pdproxy.background import Background
from pdproxy.clock import SystemClock
from pdproxy.intake.routes import FORWARDED, GENERATING, WITHHELD
from pdproxy.nodes.circuit_breaker import CircuitBreakerConfig
from pdproxy.nodes.drain import Drainer
from pdproxy.nodes.pool import Pool
from pdproxy.orchestration.context import OrchestrationContext

COLUMNS = "110"
_MADE = "*Made by `make generate` from the code.*"
_CLI = f"""\
# Commands

{_MADE} `pip install pdproxy` brings one program. Every setting of [settings](settings.md) is a flag of `serve` and
`check`, too: `limits.queue_seconds` is `--limits-queue-seconds`, and `PDPROXY_LIMITS_QUEUE_SECONDS` in the environment.

| exit status | meaning |
|---|---|
| 0 | it ended in order; of `check`: all nodes go together |
| 1 | of `check`: a node cannot be reached or has no partner, or nothing is handed over |
| {UNUSABLE} | settings that cannot be used, or a port that is taken; standard error says which, and what to write |
| {INTERRUPTED} | Ctrl-C during a start |
"""
_HTTP = f"""\
# Paths

{_MADE} Errors have OpenAI's shape on every path, but for `/v1/messages`, where they have Anthropic's.

## The clients' port

`listen.port`, 8080 by default. With `keys.file` every path but `/health`, `/ready` and `/openapi.json` asks for
`Authorization: Bearer KEY`.
"""
_OWN = {
    "/v1/models": ("GET", "the models of the decode nodes, adapters included; `/v1/models/NAME`: one of them"),
    "/openapi.json": ("GET", "the OpenAPI document of the paths that the proxy understands"),
    "/health": ("GET", "200 while the process is alive"),
    "/ready": (
        "GET",
        "200 while requests can be served (`ready`; `degraded`: nothing is handed over, or not all), else 503",
    ),
    "/metrics": ("GET", "with `listen.metrics: both` alone: the proxy's metrics"),
}
_OPERATORS = """\
## The operators' port

`listen.admin_port`, 8081 by default. With `listen.admin_token_file`, paths marked *token* ask for
`Authorization: Bearer TOKEN`; the other checks of this port: [security](security.md#the-operators-port).
"""
_WITHHELD = """\
## Paths of nodes that are not served

vLLM serves these at its nodes. The proxy answers them with an error that says why.
"""


def cli_page() -> str:
    """`docs/cli.md`."""
    parts = [_CLI, _shown("pdproxy", [])]
    for command in COMMANDS:
        parts += [f"## pdproxy {command}\n", _shown(f"pdproxy {command} --help", [command, "--help"])]
    return "\n".join(parts)


def _shown(line: str, words: Sequence[str]) -> str:
    """A block with a command and the first part of its help: flags of settings stand in the settings' page."""
    text, _, settings = _printed(words).partition("\n\nlisten:\n")
    more = "\n\n… (a flag for each setting)" if settings else ""
    return f"```console\n$ {line}\n{text.strip()}{more}\n```\n"


def _printed(words: Sequence[str]) -> str:
    said, before = io.StringIO(), os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = COLUMNS
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said), contextlib.suppress(SystemExit):
            main(words)
    finally:
        os.environ.pop("COLUMNS")
        if before is not None:
            os.environ["COLUMNS"] = before
    return said.getvalue()


def http_page() -> str:
    """`docs/http.md`."""
    generating = ("POST", "generates, on a prefill and a decode node")
    clients = dict.fromkeys(GENERATING, generating) | _OWN
    forwarded = {
        path: (", ".join(sorted(methods)), "one node answers by itself") for path, methods in sorted(FORWARDED.items())
    }
    reasons = dict.fromkeys(WITHHELD.values())
    withheld = [f"| {', '.join(f'`{path}`' for path in sorted(_because(why)))} | {why} |" for why in reasons]
    return "\n".join(
        (
            *(_HTTP, "| path | method | answer |", "|---|---|---|", *_rows(clients | forwarded), ""),
            *(_OPERATORS, "| path | method | token | answer |", "|---|---|---|---|", *_operators_rows(), ""),
            *(_WITHHELD, "| paths | why |", "|---|---|", *withheld, ""),
        )
    )


def _because(why: str) -> Iterator[str]:
    return (path for path, reason in WITHHELD.items() if reason == why)


def _rows(paths: Mapping[str, tuple[str, str]]) -> Iterator[str]:
    return (f"| `{path}` | {method} | {answer} |" for path, (method, answer) in paths.items())


def _operators_rows() -> Iterator[str]:
    context = _context()
    for path in ("/health", "/ready", "/metrics"):
        yield f"| `{path}` | GET | | {_OWN[path][1].removeprefix('with `listen.metrics: both` alone: ')} |"
    yield from _route_rows((page_route(), open_routes(context)), "")
    planning = plan_route(cast("OrchestrationContext", context.orchestration))  # asked for its path, never for a plan
    yield from _route_rows((node_routes(context), state_route(context), planning), "token")


def _route_rows(routers: Iterable[APIRouter], token: str) -> Iterator[str]:
    routes = (route for router in routers for route in router.routes if isinstance(route, APIRoute))
    for route in routes:
        asked = "&".join(f"{each.name}=" for each in route.dependant.query_params)
        path = f"{route.path}?{asked}" if asked else route.path
        text = " ".join((inspect.getdoc(route.endpoint) or "").partition("\n\n")[0].split()).replace("``", "`")
        text = re.sub(r"\(docs/([\w-]+)\.md\)", r"([\1](\1.md))", text)
        yield f"| `{path}` | {', '.join(sorted(route.methods))} | {token} | {text} |".replace("|  |", "| |")


def _context() -> AdminContext:
    clock = SystemClock()
    pool = Pool(clock, CircuitBreakerConfig())
    return AdminContext(pool, Drainer(pool, clock, Background(clock)), CollectorRegistry(), asyncio.Event())
