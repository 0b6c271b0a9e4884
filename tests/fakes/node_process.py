"""A fake node in a process of its own, which can be killed and stopped: `python -m tests.fakes.node_process …`.

Its arguments: port (0 for any), seconds between two tokens, seconds that a prefill leg takes. It prints its port.
Each has a KV transfer of its own, so that a decode node never finds what a ticket names, and computes the prompt: at
once, while a prefill node takes its time.
"""

import asyncio
import sys

from tests.fakes.kv_transfer import FakeKvTransfer
from tests.fakes.loopback import LoopbackNode
from tests.fakes.node import JSON, FakeNode, Script


class SlowPrompts(LoopbackNode):
    """One whose prefill legs take ``prompt`` seconds."""

    def __init__(self, node: FakeNode, pace: float, prompt: float) -> None:
        super().__init__(node, pace)
        self._prompt = prompt

    async def _play(self, script: Script, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        if script.computed and script.headers == JSON:
            await asyncio.sleep(self._prompt)
        return await super()._play(script, reader, writer)


async def serve(port: int, pace: float, prompt: float) -> None:
    """Until the process ends."""
    node = SlowPrompts(FakeNode("node", FakeKvTransfer()), pace, prompt)
    node.port = port
    async with node:
        print(node.port, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])))
