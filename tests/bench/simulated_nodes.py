"""Simulated vLLM nodes on loopback, all in one process: ``python -m tests.bench.simulated_nodes SITE``, as JSON.

They answer as vLLM does, take the time that `Fleet` says, and publish KV events and metrics. A prefill node computes
one prompt after the other, in the order of arrival; a decode node reads tickets while it streams. ``GET /simulated``
tells what a node has computed, ``POST /simulated`` begins the count anew.
"""

import asyncio
import contextlib
import dataclasses
import itertools
import json
import sys
from collections.abc import AsyncIterator, Mapping
from typing import Any

import httptools

from pdproxy.nodes.node import Role
from tests.bench.hybrid_cache import CacheShape, HashedPrompt, HybridCache
from tests.bench.kv_events import ROOT, Publisher, hash_ids, on_the_wire
from tests.bench.simulate import MODEL, Fleet
from tests.fakes.vllm_answers import ParsedRequest, answer, error, events

BURST = 10
"""Tokens in an event of a stream: one for each token would cost the two cores more than all else."""
MAX_MODEL_LEN = 262_144


@dataclasses.dataclass(frozen=True, slots=True)
class Site:
    """What is simulated: the nodes, where they listen (prefill nodes first), and how many times faster than life."""

    fleet: Fleet
    ports: tuple[int, ...]
    faster: float = 1.0

    def to_json(self) -> str:
        """For the command line."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Site":
        """Raises ValueError or TypeError where it is none."""
        read = json.loads(text)
        shape = CacheShape(**read["fleet"].pop("shape"))
        return cls(Fleet(shape=shape, **read["fleet"]), tuple(read["ports"]), read["faster"])

    def urls(self) -> Mapping[str, str]:
        """Of the nodes, by name."""
        names = self.fleet.roles()
        return {name: f"http://127.0.0.1:{port}" for name, port in zip(names, self.ports, strict=True)}


def text_of(ids: list[int]) -> str:
    """A prompt that these nodes tokenize to the ids."""
    return " ".join(f"w{each}" for each in ids)


def ids_of(prompt: object) -> list[int]:
    """The ids of a prompt: of text as `text_of` writes it, or what is given as ids."""
    if isinstance(prompt, list) and all(isinstance(each, int) for each in prompt):
        return prompt
    words = str(prompt[0] if isinstance(prompt, list) and len(prompt) == 1 else prompt).split()
    return [int(word[1:]) if word[0] == "w" and word[1:].isdigit() else 1 + len(word) % 97 for word in words] or [1]


@dataclasses.dataclass
class Count:
    """Prompts that a node has computed or pulled since the count began, in tokens."""

    prompts: int = 0
    computed: int = 0
    resumed: int = 0
    moved: int = 0


class SimulatedServer:
    """One node: what it does, without HTTP.

    Args:
        tickets: of all nodes: the prompt that each covers.
    """

    def __init__(self, name: str, role: Role, site: Site, tickets: dict[str, int]) -> None:
        self.name, self.role, self.count = name, role, Count()
        self.cache, self.publisher = HybridCache(site.fleet.shape), Publisher()
        self.running = self.waiting = 0
        self.queried = self.hit = 0
        self._fleet, self._faster, self._tickets = site.fleet, site.faster, tickets
        self._engine = asyncio.Lock()
        self._numbers = itertools.count()
        self._stalled = 0.0

    async def answer(self, question: ParsedRequest, params: Mapping[str, Any]) -> AsyncIterator[bytes]:
        """The pieces of an answer in their time; of one that is not streamed there is one."""
        prompt = hash_ids(question.prompt, self._fleet.shape.step)
        if params.get("do_remote_prefill") and self._tickets.pop(str(params["remote_request_id"]), 0) == prompt.tokens:
            cached = await self._pull(prompt, question.prompt)
        else:
            cached = await self._compute(prompt, question.prompt)
        if params.get("do_remote_decode"):
            yield answer(question, cached, self._ticket(prompt, cached))
            return
        pieces = events(question, cached) if question.stream else (answer(question, cached, None),)
        self.running += 1
        try:
            async for piece in self._paced(pieces, question):
                yield piece
        finally:
            self.running -= 1

    async def _compute(self, prompt: HashedPrompt, ids: list[int]) -> int:
        """In turn with other prompts; the tokens that were cached."""
        self.waiting += 1
        try:
            await self._engine.acquire()
        finally:
            self.waiting -= 1
        self.running += 1
        try:
            computed = self.cache.compute(prompt)
            seconds = self._fleet.overhead + computed / self._fleet.prefill_rate
            self._stalled += seconds
            await self._sleep(seconds)
            await self._publish(ids)
        finally:
            self.running -= 1
            self._engine.release()
        self.queried, self.hit = self.queried + prompt.tokens, self.hit + prompt.tokens - computed
        self.count.prompts += 1
        self.count.computed += computed
        self.count.resumed += prompt.tokens - computed
        return prompt.tokens - computed

    async def _pull(self, prompt: HashedPrompt, ids: list[int]) -> int:
        pulled = self.cache.pull(prompt)
        self.count.moved += pulled.moved
        self.count.computed += pulled.computed
        rest = pulled.computed / self._fleet.prefill_rate
        await self._sleep(self._fleet.hand_over + pulled.moved / self._fleet.transfer_rate + rest)
        await self._publish(ids)
        return prompt.tokens - 1

    async def _publish(self, ids: list[int]) -> None:
        await self.publisher.publish(on_the_wire(self.cache.take_events(), ids, self._fleet.shape))

    def _ticket(self, prompt: HashedPrompt, cached: int) -> dict[str, Any]:
        name = f"cmpl-{self.name}-{next(self._numbers)}"
        self._tickets[name] = prompt.tokens
        groups = self._fleet.shape.state_groups
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [[11 + group] for group in range(groups)] + [[20]],
            "remote_engine_id": self.name,
            "remote_request_id": name,
            "remote_host": "127.0.0.1",
            "remote_port": 5600,
            "tp_size": 1,
            "remote_num_tokens": prompt.tokens,
            "transfer_mode": "pull",
            "remote_prefill_cached_tokens": cached,
        }

    async def _paced(self, pieces: Any, question: ParsedRequest) -> AsyncIterator[bytes]:
        """A first piece after a step, the others so that all tokens are there in their time."""
        stalled = self._stalled
        step = self._fleet.step * (question.count if not question.stream else 1)
        for number, piece in enumerate(pieces):
            await self._sleep(step + self._stalled - stalled)
            stalled = self._stalled
            step = self._fleet.step * BURST if number + 1 < question.count / BURST else 0.0
            yield piece

    async def _sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds / self._faster)

    def metrics(self) -> str:
        """What proxies read of vLLM's metrics, and of this project's connector's."""
        label = f'{{model_name="{MODEL}",engine="0"}}'
        shape = self._fleet.shape
        unit = f'hash_algorithm="sha256_cbor",hash_unit="{shape.step}",hash_root="{ROOT.hex()}"'
        values = {
            "vllm:num_requests_running": self.running,
            "vllm:num_requests_waiting": self.waiting,
            "vllm:kv_cache_usage_perc": self.cache.used / shape.blocks,
            "vllm:prefix_cache_queries_total": self.queried,
            "vllm:prefix_cache_hits_total": self.hit,
            "vllm:prompt_tokens_total": self.queried,
            "vllm:generation_tokens_total": self.queried,
            "vllm:iteration_tokens_total_count": self.queried,
        }
        lines = [f"{name}{label} {float(value)}" for name, value in values.items()]
        info = f'pdproxy_connector_info{{rendezvous="false",block_size="{shape.block_size}",{unit}}} 1.0'
        return "\n".join((*lines, info, ""))


class Http:
    """HTTP/1.1 of one node."""

    def __init__(self, node: SimulatedServer) -> None:
        self._node = node

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, until its client leaves."""
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
                method, target, _ = head[0].split(" ")
                headers = dict(line.lower().split(": ", 1) for line in head[1:-2])
                body = await reader.readexactly(int(headers.get("content-length", "0")))
                await self._exchange(method, httptools.parse_url(target.encode()).path.decode(), body, writer)
                await writer.drain()
        writer.close()

    async def _exchange(self, method: str, path: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        if path in ("/v1/completions", "/v1/chat/completions"):
            await self._generate(path, json.loads(body), writer)
            return
        if path == "/simulated":
            found = dataclasses.asdict(self._node.count)
            self._node.count = self._node.count if method == "GET" else Count()
            writer.write(_whole(200, json.dumps(found).encode()))
            return
        writer.write(await self._about(path, body))

    async def _about(self, path: str, body: bytes) -> bytes:
        """Answers that take no time."""
        match path:
            case "/metrics":
                return _whole(200, self._node.metrics().encode(), "text/plain; version=0.0.4")
            case "/v1/models":
                card = {"id": MODEL, "object": "model", "root": MODEL, "max_model_len": MAX_MODEL_LEN}
                return _whole(200, json.dumps({"object": "list", "data": [card]}).encode())
            case "/version":
                return _whole(200, b'{"version":"0.32.0"}')
            case "/kv_event_sources":
                return _whole(200, json.dumps({"0": self._node.publisher.source()}).encode())
            case "/tokenize":
                asked = json.loads(body)
                ids = ids_of(asked.get("prompt") or _chat(asked))
                tokenized = {"count": len(ids), "max_model_len": MAX_MODEL_LEN, "tokens": ids}
                return _whole(200, json.dumps(tokenized).encode())
            case "/health" | "/ping" | "/v1/health":
                return _whole(200, b"{}")
            case "/server_info" | "/get_server_info" | "/get_model_info" | "/model_info":
                size = self._node.cache.shape.block_size
                told = {"model_path": MODEL, "served_model_name": MODEL, "instance_id": self._node.name}
                sizes = {"kv_block_size": size, "effective_attention_block_size": size, "block_size": size}
                return _whole(200, json.dumps(told | sizes).encode())
            case _:
                return _whole(404, error(404, "Not Found"))

    async def _generate(self, path: str, asked: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        params = asked.get("kv_transfer_params") or {}
        if params.get("pdproxy_release"):
            writer.write(_whole(200, b"{}"))
            return
        ids = ids_of(asked["prompt"] if "prompt" in asked else params.get("prompt_token_ids") or _chat(asked))
        question = dataclasses.replace(ParsedRequest.of(path, asked, BURST), prompt=ids)
        pieces = self._node.answer(question, params)
        if not question.stream:
            writer.write(_whole(200, b"".join([piece async for piece in pieces])))
            return
        head = "content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked"
        writer.write(f"HTTP/1.1 200 OK\r\n{head}\r\n\r\n".encode())
        async for piece in pieces:
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        writer.write(b"0\r\n\r\n")


def _chat(asked: Mapping[str, Any]) -> str:
    return " ".join(str(message.get("content")) for message in asked.get("messages", ()))


def _whole(status: int, content: bytes, kind: str = "application/json") -> bytes:
    return f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ncontent-length: {len(content)}\r\n\r\n".encode() + content


@contextlib.asynccontextmanager
async def serving(site: Site) -> AsyncIterator[Mapping[str, SimulatedServer]]:
    """All nodes of a site, by name."""
    tickets: dict[str, int] = {}
    nodes = {name: SimulatedServer(name, role, site, tickets) for name, role in site.fleet.roles().items()}
    async with contextlib.AsyncExitStack() as stack:
        for node, port in zip(nodes.values(), site.ports, strict=True):
            stack.push_async_callback(node.publisher.close)
            server = await asyncio.start_server(Http(node).serve, "127.0.0.1", port, backlog=1024, limit=1 << 24)
            await stack.enter_async_context(server)
        yield nodes


async def main(site: Site) -> None:
    """Until the process ends."""
    async with serving(site):
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(Site.from_json(sys.argv[1])))
