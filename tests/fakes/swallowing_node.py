"""A node in a process of its own that keeps nothing of what it is sent: `python -m tests.fakes.swallowing_node …`.

Its arguments: port, seconds that an answer takes, and its status. It answers every chat with a ticket beside its text,
whatever the body is, so that one kind serves both roles. A stream gets its first token, with its journal where one is
wanted, and then nothing more.
"""

import asyncio
import json
import sys

import httptools
import uvloop

from deploy.bench.node import INFO, TICKET
from deploy.bench.script import MODEL
from tests.fakes.journal import STREAMS_PATH, comment

_CHOICE = {"index": 0, "message": {"role": "assistant", "content": "a"}, "finish_reason": "stop"}
_ANSWER = {
    "id": "chat-1",
    "object": "chat.completion",
    "created": 1,
    "model": MODEL,
    "choices": [_CHOICE],
    "usage": {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4},
    "kv_transfer_params": TICKET,
}
_CHUNK = {"index": 0, "delta": {"role": "assistant", "content": "a"}, "finish_reason": None}
_EVENT = {"id": "chat-1", "object": "chat.completion.chunk", "created": 1, "model": MODEL, "choices": [_CHUNK]}
_FIRST = b"data: %b\n\n" % json.dumps(_EVENT, separators=(",", ":")).encode()
_STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_MODELS = {"object": "list", "data": [{"id": MODEL, "object": "model"}]}


class Swallower(asyncio.Protocol):
    """One connection of a proxy."""

    def __init__(self, seconds: float, status: int) -> None:
        self._seconds = seconds
        self._status = status
        self._parser = httptools.HttpRequestParser(self)
        self._path = ""
        self._streams = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.WriteTransport = transport  # type: ignore[assignment]  # a server's can write

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        self._path, self._streams = "", False

    def on_url(self, url: bytes) -> None:
        self._path += url.decode()

    def on_body(self, body: bytes) -> None:
        self._streams = self._streams or b'"stream":true' in body

    def on_message_complete(self) -> None:
        path = self._path.partition("?")[0]
        if self._streams:
            first = _FIRST + comment([1, [[[0, [1]]]]]) if path.startswith(STREAMS_PATH) else _FIRST
            self._transport.write(_STREAM_HEAD + b"%x\r\n%b\r\n" % (len(first), first))
        elif path == "/v1/chat/completions":
            answer = json.dumps(_ANSWER).encode()
            asyncio.get_running_loop().call_later(self._seconds, self._answer, answer, self._status)
        else:
            known = {"/metrics": INFO, "/v1/models": json.dumps(_MODELS).encode(), "/version": b'{"version":"0.32.0"}'}
            self._answer(known.get(path, b""))

    def _answer(self, body: bytes, status: int = 200) -> None:
        if not self._transport.is_closing():
            head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: "
            self._transport.write(f"{head}{len(body)}\r\n\r\n".encode() + body)


async def serve(port: int, seconds: float, status: int) -> None:
    """Until the process ends."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Swallower(seconds, status), "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])))
