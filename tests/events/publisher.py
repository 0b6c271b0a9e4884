"""A publisher of KV events on loopback, made of ZMQ sockets as vLLM's is, with faults on order."""

import asyncio
import collections
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import msgspec
import zmq

from deploy.local.ports import free_ports
from pdproxy.events.sources import EventSource

HOST = "127.0.0.1"
LOOK_S = 0.002
"""Between two looks for questions; no result depends on the number."""
END = (-1).to_bytes(8, signed=True)
Event = dict[str, Any]


def stored(*hashes: int, group: int = 0, kind: str = "full_attention", size: int = 16) -> Event:
    """Blocks that a group of the cache now holds."""
    return {
        "type": "BlockStored",
        "block_hashes": list(hashes),
        "parent_block_hash": None,
        "token_ids": list(range(size * len(hashes))),
        "block_size": size,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "group_idx": group,
        "kv_cache_spec_kind": kind,
    }


def removed(*hashes: int, group: int = 0) -> Event:
    """Blocks that it holds no more."""
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": "GPU", "group_idx": group}


class Publisher:
    """One engine's.

    Attributes:
        source: where it is, as a node would tell.
        questions: first sequence numbers of the replays that were asked for.
        mute: questions stay without an answer.

    Args:
        most_kept: batches for replays; None for all.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        ports: tuple[int, int] = (0, 0),
        rank: int = 0,
        most_kept: int | None = None,
    ) -> None:
        self._publish, self._replay = context.socket(zmq.XPUB), context.socket(zmq.ROUTER)
        self._publish.setsockopt(zmq.XPUB_VERBOSE, 1)
        found = []
        for socket, port in zip((self._publish, self._replay), ports, strict=True):
            socket.setsockopt(zmq.LINGER, 0)
            socket.bind(f"tcp://{HOST}:{port or '*'}")
            found.append(int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]))
        self.ports = (found[0], found[1])
        self.source = EventSource(rank, rank, HOST, found[0], found[1], b"")
        self.questions: list[int] = []
        self.subscribers = 0
        self.mute = False
        self._rank = rank
        self._kept = collections.deque[tuple[bytes, bytes]](maxlen=most_kept)
        self._time = 1000.0
        self._next = 0

    def batch(self, *events: Event, time: float | None = None) -> bytes:
        """The bytes of a batch."""
        self._time += 1
        return msgspec.msgpack.encode([self._time if time is None else time, list(events), self._rank])

    def publish(
        self, *events: Event, payload: bytes | None = None, lost: bool = False, kept: bool = True
    ) -> tuple[bytes, ...]:
        """Send the next batch, and return its frames. `lost`: on the way; `kept`: for replays."""
        message = self._next.to_bytes(8), payload if payload is not None else self.batch(*events)
        self._next += 1
        if kept:
            self._kept.append(message)
        if not lost:
            self.send(b"", *message)
        return b"", *message

    def begin_again(self) -> None:
        """As another engine at the same sockets: the next batch is its first."""
        self._next = 0
        self._kept.clear()

    def send(self, *frames: bytes) -> None:
        """Send anything."""
        self._publish.send_multipart(frames)

    def send_again(self, sequence: int) -> None:
        """Send a batch once more."""
        self._publish.send_multipart((b"", *self._kept[sequence]))

    def later(self, seconds: float) -> None:
        """Time passes on the node's clock."""
        self._time += seconds

    async def serve(self) -> None:
        """Answer questions until cancelled."""
        while True:
            self.answer()
            await asyncio.sleep(LOOK_S)

    def answer(self) -> None:
        """Answer the questions that are there."""
        while self._publish.poll(0):
            self.subscribers += 1 if self._publish.recv()[:1] == b"\x01" else -1
        while not self.mute and self._replay.poll(0):
            who, _, first = self._replay.recv_multipart()
            self.questions.append(int.from_bytes(first))
            for sequence, payload in self._kept:
                if sequence >= first:
                    self._replay.send_multipart((who, b"", b"", sequence, payload))
            self._replay.send_multipart((who, b"", b"", END, b""))

    def close(self) -> None:
        """End both sockets."""
        self._publish.close()
        self._replay.close()


def kept_ports() -> tuple[int, int]:
    """For a publisher that comes back at its ports: meanwhile the system gives them to no other test's socket."""
    publish, replay = free_ports(2)
    return publish, replay


@contextlib.contextmanager
def zmq_context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    """A context of its own, which ends with the test."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        yield context
    finally:
        context.destroy(linger=0)


@contextlib.asynccontextmanager
async def publishing(ports: tuple[int, int] = (0, 0), rank: int = 0) -> AsyncIterator[Publisher]:
    """A publisher that answers questions meanwhile."""
    with zmq_context() as context:
        publisher = Publisher(context, ports, rank)
        serving = asyncio.create_task(publisher.serve())
        try:
            yield publisher
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            publisher.close()


async def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Wait until the condition holds; the limit only ends a hang."""
    async with asyncio.timeout(seconds):
        while True:
            if condition():
                return
            await asyncio.sleep(LOOK_S)
