"""Fake nodes on loopback that take time as engines do: prompts in turn, tokens of all answers side by side."""

import asyncio
import dataclasses
from collections.abc import Mapping
from typing import Any

from tests.fakes.kv_transfer import FakeKvTransfer
from tests.fakes.loopback import LoopbackNode
from tests.fakes.node import FakeNode, Script


@dataclasses.dataclass(frozen=True, slots=True)
class TimedScript(Script):
    """An answer that the engine computes for so many seconds first."""

    seconds: float = 0.0


class TimedNode(FakeNode):
    """A prefill leg takes its node's engine ``token_seconds`` for each 4 bytes of its prompt."""

    def __init__(self, name: str, fabric: FakeKvTransfer, token_seconds: float) -> None:
        super().__init__(name, fabric)
        self._token_seconds = token_seconds

    def respond(self, path: str, raw: bytes, headers: tuple[tuple[str, str], ...] = ()) -> Script:
        """The script for one request."""
        script = super().respond(path, raw, headers)
        seconds = self._token_seconds * len(str(self.seen[-1].body.get("prompt", ""))) / 4
        if not _prefills(self.seen[-1].body):
            return script
        return TimedScript(script.status, script.headers, script.pieces, script.kind, script.waiting, seconds=seconds)


def _prefills(body: Mapping[str, Any]) -> bool:
    return bool((body.get("kv_transfer_params") or {}).get("do_remote_decode"))


class TimedLoopbackNode(LoopbackNode):
    """Serves a `TimedNode`: prompts in order of arrival, one at a time.

    Args:
        node: what it serves.
        pace: seconds for each token of an answer.
    """

    def __init__(self, node: FakeNode, pace: float = 0.0) -> None:
        super().__init__(node, pace)
        self._engine = asyncio.Lock()

    async def _play(self, script: Script, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        if not isinstance(script, TimedScript):
            return await super()._play(script, reader, writer)
        async with self._engine:
            await asyncio.sleep(script.seconds)
        writer.write(b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in (*script.pieces, b"")))
        await writer.drain()
        return True
