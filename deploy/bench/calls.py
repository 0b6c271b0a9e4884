"""Python code of the proxy that one request runs through: ``python -m deploy.bench.calls``; ``--help`` for options.

For each shape of a request, warm, with the default settings: how many files and functions of `pdproxy` it enters, how
many calls (a coroutine that goes on is one), how often they lead from one file to another, and how many bytecodes run.
``--by file`` and ``--by function`` show where they run, ``--routing`` what another policy costs.
The proxy, two fake nodes and the client share the process; only the proxy's code counts. Log lines are not written.
"""

import argparse
import asyncio
import contextlib
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pdproxy
from pdproxy.request import Endpoint
from pdproxy.settings.model import Policy, Settings
from pdproxy.settings.types import Routing
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
    """The functions that were entered: calls and bytecodes of each.

    ``switches``: calls of a function of another file than the last one entered.
    """

    calls: Counter[CodeType] = field(default_factory=Counter)
    bytecodes: Counter[CodeType] = field(default_factory=Counter)
    switches: int = 0
    last: str = ""

    @property
    def files(self) -> int:
        return len({code.co_filename for code in self.calls})

    def enter(self, code: CodeType) -> None:
        """A function of the proxy is called, or a coroutine goes on."""
        self.calls[code] += 1
        self.switches += code.co_filename != self.last
        self.last = code.co_filename


@contextlib.contextmanager
def counting(counted: Counted) -> Any:
    """Count while the context lasts."""

    def within(frame: FrameType, event: str, _argument: object) -> Callable[..., Any]:
        counted.bytecodes[frame.f_code] += event == "opcode"
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
    return min(found[WARM_UP:], key=lambda each: each.bytecodes.total())


def file_of(code: CodeType) -> str:
    """Its path within `pdproxy`."""
    return code.co_filename.removeprefix(f"{OURS}/")


def function_of(code: CodeType) -> str:
    """Its path and name."""
    return f"{file_of(code)}::{code.co_qualname}"


PARTS: dict[str, Callable[[CodeType], str]] = {"file": file_of, "function": function_of}


async def table(routing: Routing, part_of: Callable[[CodeType], str] | None) -> None:
    """Print a row for each shape, and below it the parts that ``part_of`` names, where there is one."""
    print(f"{'':24} {'files':>6} {'functions':>10} {'calls':>7} {'switches':>9} {'bytecodes':>10}")
    async with running_proxy(Settings(policy=Policy(routing=routing))) as proxy:
        for name, (endpoint, stream) in SHAPES.items():
            seen = await count(proxy, endpoint, stream=stream)
            calls, bytecodes = seen.calls.total(), seen.bytecodes.total()
            print(
                f"{name:24} {seen.files:6} {len(seen.calls):10} {calls:7} {seen.switches:9} {bytecodes:10}", flush=True
            )
            if part_of is not None:
                print_parts(seen, part_of)


def print_parts(seen: Counted, part_of: Callable[[CodeType], str]) -> None:
    """Print calls and bytecodes of each part, the one with most bytecodes first."""
    calls, bytecodes = Counter[str](), Counter[str]()
    for code, number in seen.bytecodes.items():
        calls[part_of(code)] += seen.calls[code]
        bytecodes[part_of(code)] += number
    for name, number in bytecodes.most_common():
        print(f"{name:66} {calls[name]:7} {number:10}")


def main() -> None:
    """Print the table that the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--by", choices=PARTS, help="show calls and bytecodes of each file or function")
    parser.add_argument("--routing", type=Routing, choices=[*Routing], default=Routing.CACHE, help="the policy")
    asked = parser.parse_args()
    asyncio.run(table(asked.routing, PARTS.get(asked.by)))


if __name__ == "__main__":
    main()
