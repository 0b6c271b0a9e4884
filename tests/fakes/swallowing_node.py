"""A node in a process of its own that keeps nothing of what it is sent: `python -m tests.fakes.swallowing_node …`.

Its arguments: port, and seconds that an answer takes. It answers every chat with a ticket beside its text, whatever the
body is, so that one kind serves both roles. It says how many bytes of bodies came, at ``GET /v1/swallowed``.
"""

import asyncio
import json
import sys

import httptools
import uvloop

from tests.bench.node import INFO, TICKET
from tests.bench.script import MODEL

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
_MODELS = {"object": "list", "data": [{"id": MODEL, "object": "model"}]}


class Swallower(asyncio.Protocol):
    """One connection of a proxy."""

    swallowed = 0

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._parser = httptools.HttpRequestParser(self)
        self._path, self._size = "", 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.WriteTransport = transport  # type: ignore[assignment]  # a server's can write

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        self._path, self._size = "", 0

    def on_url(self, url: bytes) -> None:
        self._path += url.decode()

    def on_body(self, body: bytes) -> None:
        self._size += len(body)

    def on_message_complete(self) -> None:
        path = self._path.partition("?")[0]
        if path == "/v1/chat/completions":
            Swallower.swallowed += self._size
            asyncio.get_running_loop().call_later(self._seconds, self._answer, json.dumps(_ANSWER).encode())
        elif path == "/v1/swallowed":
            self._answer(b"%d" % Swallower.swallowed)
        else:
            known = {"/metrics": INFO, "/v1/models": json.dumps(_MODELS).encode(), "/version": b'{"version":"0.32.0"}'}
            self._answer(known.get(path, b""))

    def _answer(self, body: bytes) -> None:
        if not self._transport.is_closing():
            head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: "
            self._transport.write(f"{head}{len(body)}\r\n\r\n".encode() + body)


async def serve(port: int, seconds: float) -> None:
    """Until the process ends."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Swallower(seconds), "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]), float(sys.argv[2])))
