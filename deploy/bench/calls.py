"""Python code of the proxy that one request runs through: ``python -m deploy.bench.calls``.

For each shape of a request, warm, with the default settings: how many files and functions of `pdproxy` it enters, how
many calls (a coroutine that goes on is one), how often they lead from one file to another, and how many bytecodes run.
The proxy, two fake nodes and the client share the process; only the proxy's code counts.
"""

import asyncio
import contextlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pdproxy
from pdproxy.request import Endpoint
from pdproxy.settings.model import Settings
from tests.app.running_proxy import RunningProxy, running_proxy
from tests.orchestration.prompts import body_for

TOKENS = 32
WARM_UP = 20
"""Requests before those that are counted."""
COUNTED = 5
OURS = str(Path(pdproxy.__file__).parent)
SHAPES = {
    "chat, streamed": (Endpoint.CHAT, True),
    "completions, streamed": (Endpoint.COMPLETIONS, True),
    "completions, whole": (Endpoint.COMPLETIONS, False),
}


@dataclass(slots=True)
class Counted:
    """The functions that were entered. ``switches``: calls of a function of another file than the last one entered."""

    functions: set[CodeType] = field(default_factory=set)
    calls: int = 0
    switches: int = 0
    bytecodes: int = 0
    last: str = ""

    @property
    def files(self) -> int:
        return len({code.co_filename for code in self.functions})

    def enter(self, code: CodeType) -> None:
        """A function of the proxy is called, or a coroutine goes on."""
        self.functions.add(code)
        self.calls += 1
        self.switches += code.co_filename != self.last
        self.last = code.co_filename


@contextlib.contextmanager
def counting(counted: Counted) -> Any:
    """Count while the context lasts."""

    def within(_frame: FrameType, event: str, _argument: object) -> Callable[..., Any]:
        counted.bytecodes += event == "opcode"
        return within

    def trace(frame: FrameType, event: str, _argument: object) -> Callable[..., Any] | None:
        if not frame.f_code.co_filename.startswith(OURS):
            return None
        if event == "call":
            counted.enter(frame.f_code)
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return within

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(None)


async def count(proxy: RunningProxy, endpoint: Endpoint, *, stream: bool) -> Counted:
    """A warm request: of several, the one beside which the least other work ran, such as health probes."""
    found = []
    for number in range(WARM_UP + COUNTED):
        counted, body = Counted(), {"model": "m", **body_for(endpoint, stream=stream, tokens=TOKENS)}
        with counting(counted) if number >= WARM_UP else contextlib.nullcontext():
            (await proxy.client.post(endpoint, json=body)).raise_for_status()
        found.append(counted)
    return min(found[WARM_UP:], key=lambda each: each.bytecodes)


async def table() -> None:
    """Print a row for each shape."""
    print(f"{'':24} {'files':>6} {'functions':>10} {'calls':>7} {'switches':>9} {'bytecodes':>10}")
    async with running_proxy(Settings()) as proxy:
        for name, (endpoint, stream) in SHAPES.items():
            seen = await count(proxy, endpoint, stream=stream)
            figures = f"{seen.files:6} {len(seen.functions):10} {seen.calls:7} {seen.switches:9} {seen.bytecodes:10}"
            print(f"{name:24} {figures}", flush=True)


if __name__ == "__main__":
    asyncio.run(table())
