"""Simulated nodes on loopback, all in one process: ``python -m deploy.bench.simulated_http SITE``, as JSON.

``GET /simulated`` tells what a node has computed, ``POST /simulated`` begins the count anew.
"""

import asyncio
import contextlib
import dataclasses
import json
import sys
from collections.abc import AsyncIterator, Mapping
from typing import Any

import httptools

from deploy.bench.simulate import MODEL
from deploy.bench.simulated_nodes import BURST, Count, SimulatedServer, Site, ids_of
from tests.fakes.vllm_answers import ParsedRequest, error

MAX_MODEL_LEN = 262_144


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
        question = dataclasses.replace(
            ParsedRequest.of("/v1/completions", {**asked, "prompt": [1]}, BURST), path=path, prompt=ids
        )
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
    nodes = {name: SimulatedServer(name, site, tickets) for name in site.fleet.roles()}
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
