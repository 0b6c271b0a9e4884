"""Record a node's streams of every shape, with our plugin: ``python -m tests.e2e.recorded_streams``.

Tests without an engine read real streams from the file (tests/orchestration/test_leg_reader.py). Record again when
vLLM's streams change.
"""

import asyncio
import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httptools

from deploy.local.node import NodeSpec, Role
from deploy.local.paths import ROOT, RUNS
from deploy.local.stack import logs_of, start_nodes
from deploy.local.supervise import Supervisor
from tests.e2e.stream_shapes import NODE_FLAGS, shapes
from tests.fakes.journal import STREAMS_PATH

RECORDED = ROOT / "tests" / "orchestration" / "recorded_streams.json.gz"
MOST_TOKENS = 90
"""The limit of an answer: its reasoning ends and its tool call begins before it."""


class Chunks:
    """The body of an answer, chunk by chunk."""

    def __init__(self) -> None:
        self.chunks: list[bytes] = []
        self.ended = False

    def on_chunk_header(self) -> None:
        self.chunks.append(b"")

    def on_body(self, body: bytes) -> None:
        self.chunks[-1] += body

    def on_message_complete(self) -> None:
        self.ended = True


async def ask(node: NodeSpec, path: str, body: dict[str, Any]) -> list[str]:
    """The chunks of one answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", node.port)
    sent = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: node\r\ncontent-type: application/json\r\ncontent-length: {len(sent)}\r\n\r\n"
    )
    writer.write(head.encode() + sent)
    chunks = Chunks()
    parser = httptools.HttpResponseParser(chunks)
    while not chunks.ended and (data := await reader.read(1 << 16)):
        parser.feed_data(data)
    writer.close()
    if not chunks.ended or parser.get_status_code() != 200:
        raise SystemExit(f"{path}: {parser.get_status_code()} {chunks.chunks}")
    return [chunk.decode() for chunk in chunks.chunks if chunk]


def bodies() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Name, path and body of each shape, with and without the client asking for usage."""
    for shape in shapes():
        most = "max_output_tokens" if "max_output_tokens" in shape.body else "max_tokens"
        body = {**shape.body, most: min(shape.body[most], MOST_TOKENS)}
        body.pop("min_tokens", None)
        yield shape.name, shape.path, body
        if shape.name in ("completion", "chat"):
            yield f"{shape.name} without usage", shape.path, {**body, "stream_options": None}


def main() -> None:
    RUNS.mkdir(exist_ok=True)
    with Supervisor(Path(logs_of("recorded-streams"))) as supervisor:
        (node,) = start_nodes(supervisor, [NodeSpec("decode", Role.DECODE, 0, 0, more_arguments=NODE_FLAGS)], print)
        found = [
            {"name": name, "path": path, "chunks": asyncio.run(ask(node.spec, STREAMS_PATH + path, body))}
            for name, path, body in bodies()
        ]
    RECORDED.write_bytes(gzip.compress(json.dumps(found, ensure_ascii=False).encode(), mtime=0))
    print(f"{len(found)} streams, {RECORDED.stat().st_size} bytes")


if __name__ == "__main__":
    main()
