"""Fake nodes for the hostile soak: healthy ones that some requests fail on, whose connections close when they are idle,
which are killed and frozen, and between which the data path may be cut."""

import asyncio
import dataclasses
import random
import re
from collections.abc import Mapping
from typing import Any

from tests.fakes.faults import FaultKind, InjectedFault
from tests.fakes.kv_transfer import FakeKvTransfer
from tests.fakes.loopback import LoopbackNode
from tests.fakes.node import JSON, FakeNode, Script
from tests.fakes.vllm_answers import ParsedRequest, error

POISONS = (
    FaultKind.ABORT,
    FaultKind.RESET,
    FaultKind.STATUS,
    FaultKind.SHORT,
    FaultKind.GARBAGE,
    FaultKind.ERROR_EVENT,
    FaultKind.STALL,
    FaultKind.HANG,
    FaultKind.NO_TICKET,
)
"""How a request that a healthy node cannot serve ends there, and at every other node as well."""
_MARK = re.compile(rb"poison:(\w+):(-?\d+)")
UNREADABLE = (TypeError, ValueError, AttributeError, KeyError, OverflowError, RecursionError)
"""Errors that the fake raises for values that vLLM's validation refuses."""
CLOSES, LONGEST_IDLE, NEVER = 0.2, 0.005, 3600.0
"""The part of answers after which the connection closes, and the seconds within which it then does."""


def marked(kind: FaultKind, at: int) -> str:
    """A text that makes a node fail the request that holds it, as `InjectedFault` says."""
    return f"poison:{kind}:{at}"


class CutKvTransfer(FakeKvTransfer):
    """A KV transfer whose data path may be cut between nodes.

    Attributes:
        cut: pairs (prefill node, decode node) between which no read succeeds.
    """

    def __init__(self) -> None:
        super().__init__()
        self.cut: set[tuple[str, str]] = set()
        self.copies_allowed = True  # of a leg whose kept-alive connection closed under it


class PoisonableNode(FakeNode):
    """A node that fails requests which hold a mark, each time, and is well otherwise."""

    can_resume = True

    def __init__(self, name: str, fabric: CutKvTransfer) -> None:
        super().__init__(name, fabric)
        self._transfer = fabric

    def respond(self, path: str, raw: bytes, headers: tuple[tuple[str, str], ...] = ()) -> Script:
        """As a healthy node, but for a request with a mark."""
        mark = _MARK.search(raw)
        self.fault = None if mark is None else InjectedFault(FaultKind(mark[1].decode()), int(mark[2]), times=1)
        try:
            return super().respond(path, raw, headers)
        except UNREADABLE:
            return Script(400, JSON, (error(400, "a value of the wrong type"),))
        finally:
            self.fault = None
            self.seen.clear()

    def _attend(self, question: ParsedRequest, params: Mapping[str, Any]) -> tuple[int, int]:
        self._transfer.deaf = (str(params.get("remote_engine_id")), self.name) in self._transfer.cut
        try:
            return super()._attend(question, params)
        finally:
            self._transfer.deaf = False


class HostileWorldNode(LoopbackNode):
    """Closes some connections shortly after an answer, whatever comes on them meanwhile; and each after a 500, as
    uvicorn does after an error that nobody handled. Neither is announced."""

    def __init__(self, node: FakeNode, pace: float, dice: random.Random) -> None:
        super().__init__(node, pace, lambda: dice.uniform(0.0, LONGEST_IDLE) if dice.random() < CLOSES else NEVER)

    def freeze(self) -> None:
        """As SIGSTOP does."""
        self.scheduled.clear()

    def thaw(self) -> None:
        """As SIGCONT does."""
        self.scheduled.set()

    async def _play(self, script: Script, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        goes_on = await super()._play(script, reader, writer)
        return goes_on and script.status < 500


@dataclasses.dataclass(slots=True)
class Trouble:
    """Which nodes are, or were, in a state that a health check may find wrong.

    Attributes:
        since: by name, when the trouble that is under way began.
        ended: by name, when the last one did.
    """

    since: dict[str, float] = dataclasses.field(default_factory=dict)
    ended: dict[str, float] = dataclasses.field(default_factory=dict)

    def strike(self, name: str, now: float) -> None:
        """The node is killed or frozen."""
        self.since[name] = now

    def end(self, name: str, now: float) -> None:
        """The node serves again."""
        del self.since[name]
        self.ended[name] = now

    def excuses(self, name: str, now: float, grace: float) -> bool:
        """Whether a node may be out now: it is in trouble, or was until ``grace`` seconds ago."""
        return name in self.since or now - self.ended.get(name, -grace) < grace
