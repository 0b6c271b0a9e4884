"""Fake nodes behind the transport port, and waiting for an event loop without real I/O."""

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from pdproxy.errors import Fault, NodeFault
from pdproxy.nodes.node import Node, Role
from pdproxy.request import Headers
from pdproxy.response import ChunkSink, Sink
from pdproxy.transport.port import HttpRequest, HttpResponse, Timeouts

LABELS = {
    "role": "kv_both",
    "model": "/models/tiny",
    "block_size": "256",
    "mamba_block_size": "256",
    "mamba_cache_mode": "align",
    "prefix_caching": "true",
    "kv_cache_dtype": "auto",
    "dtype": "bfloat16",
    "max_num_batched_tokens": "8192",
    "max_num_seqs": "128",
    "tp_size": "1",
    "ssm_layout": "DS",
    "failure_policy": "recompute",
    "lease_seconds": "30",
    "signed": "true",
    "connector_version": "0.1.0",
    "vllm_version": "0.32.0",
}


class Answer:
    """A whole answer, already here."""

    def __init__(self, status: int, body: bytes) -> None:
        self.status = status
        self.headers: Headers = ()
        self._body = body
        self.closed = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield self._body

    def take_whole(self) -> bytes | None:
        """Nothing: its pieces are read one by one."""
        return None

    async def pipe_to(self, sink: Sink, chunk_sink: ChunkSink | None = None) -> None:
        pass

    async def aclose(self) -> None:
        self.closed = True


@dataclasses.dataclass
class FakeNodeInfo:
    """One node: what it publishes and how it is."""

    role: Role
    names: tuple[str, ...] = ("tiny",)
    labels: Mapping[str, str] | None = dataclasses.field(default_factory=lambda: dict(LABELS))
    version: str = "0.32.0"
    max_model_len: int = 4096
    fingerprint: Mapping[str, str] = dataclasses.field(default_factory=dict)
    fault: Fault | None = None
    """Every exchange ends like this."""
    silent: bool = False
    """Nothing comes back then."""
    paths: dict[str, tuple[int, bytes] | Fault] = dataclasses.field(default_factory=dict)
    """Answers that differ from the usual ones."""
    held: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    """Cleared: answers wait."""
    asked: list[tuple[str, Any]] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.held.set()

    def answer(self, path: str, body: bytes) -> tuple[int, bytes]:
        self.asked.append((path, json.loads(body) if body else None))
        fault = self.fault or self.paths.get(path)
        if isinstance(fault, Fault):
            raise NodeFault(fault, "injected", silent=self.silent)
        return fault or (200, self._usual(path, body))

    def _usual(self, path: str, body: bytes) -> bytes:
        match path:
            case "/v1/models":
                return json.dumps({"data": list(self._cards())}).encode()
            case "/version":
                return json.dumps({"version": self.version}).encode()
            case "/metrics":
                return metrics(self.labels) + levels(self.fingerprint) * (self.labels is not None)
            case _:
                return b""

    def _cards(self) -> list[dict[str, object]]:
        root, answers = (self.labels or LABELS)["model"], len(self.asked)
        return [
            {
                "id": name,
                "root": root,
                "parent": self.names[0] if index else None,
                "max_model_len": self.max_model_len,
                # As vLLM does: other ones in each answer.
                "created": answers,
                "permission": [{"id": f"modelperm-{answers}", "created": answers}],
            }
            for index, name in enumerate(self.names)
        ]


def metrics(labels: Mapping[str, str] | None) -> bytes:
    """An exposition as a node gives it."""
    other = "# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running 0.0\n"
    if labels is None:
        return other.encode()
    pairs = ",".join(f'{key}="{value}"' for key, value in labels.items())
    return f"{other}# TYPE pdproxy_connector_info gauge\npdproxy_connector_info{{{pairs}}} 1.0\n".encode()


def levels(fingerprint: Mapping[str, str]) -> bytes:
    """Metrics that a connector publishes once its engine stepped for the first time."""
    parts = "".join(
        f'pdproxy_connector_fingerprint{{engine="0",part="{part}",value="{value}"}} 1.0\n'
        for part, value in fingerprint.items()
    )
    return f"""pdproxy_connector_capacity_tokens{{engine="0"}} 524032.0
pdproxy_connector_capacity_sequences{{engine="0",limit="max_model_len"}} 107.0
pdproxy_connector_capacity_binding{{engine="0",group="attention"}} 1.0
{parts}""".encode()


class FakePoolTransport:
    """Implements the transport port over fake nodes, by name: ``http://<name>``."""

    def __init__(self, **nodes: FakeNodeInfo) -> None:
        self.nodes = nodes
        self.answers: list[Answer] = []

    def node(self, name: str, model: str = "") -> Node:
        return Node(name, f"http://{name}", (self.nodes[name].role,), model)

    async def send(self, request: HttpRequest, timeouts: Timeouts) -> HttpResponse:
        name, _, path = request.url.removeprefix("http://").partition("/")
        node = self.nodes.get(name)
        if node is None:
            raise NodeFault(Fault.REFUSED, f"no node is at {name}")
        await node.held.wait()
        answer = Answer(*node.answer("/" + path, request.body))
        self.answers.append(answer)
        return answer

    async def aclose(self) -> None:
        """Nothing is open."""


async def until(condition: Callable[[], bool]) -> None:
    """Give the loop turns until the condition holds; the limit only ends a hang."""
    async with asyncio.timeout(60):
        while True:
            if condition():
                return
            await asyncio.sleep(0)


async def settle() -> None:
    """Turns of the loop until all that could happen now has happened; a hundred where something is always ready."""
    ready = asyncio.get_running_loop()._ready  # type: ignore[attr-defined]  # asyncio has no public way to ask
    for _ in range(100):
        await asyncio.sleep(0)
        if not ready:
            return
