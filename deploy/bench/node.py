"""A mock vLLM node in a process of its own: `python -m deploy.bench.node PORT STEP_MS [ADDRESSES]`.

It answers a handful of different requests from memory, and paces its answers as an engine does: all streams that run
get their next token in the same step. A decode request without a good ticket, or with another prompt, is refused.
Streams may come with a journal.
"""

import asyncio
import json
import sys
from collections.abc import Iterable
from typing import Any, NamedTuple

import httptools
import uvloop

from deploy.bench.script import MODEL, PROMPT, TOKENS, prompt_of
from tests.fakes.journal import STREAMS_PATH, journaled
from tests.fakes.kv_transfer import FakeKvTransfer
from tests.fakes.vllm_answers import ParsedRequest, answer, error, events

TICKET = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[11], [12], [13], [6, 10, 14]],
    "remote_engine_id": "1c1ca07e-5c9a-4b6e-9f3e-bench",
    "remote_request_id": "cmpl-bench-0",
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "tp_size": 1,
    "remote_num_tokens": 250,
    "transfer_mode": "pull",
    "remote_prefill_cached_tokens": 0,
}
TRACES_PATH = "/v1/traces"
"""Where spans go: as a collector it throws them away."""
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
ROOM_FOR_ALL = b"""\
pdproxy_connector_capacity_tokens 1000000000.0
pdproxy_connector_capacity_sequences{limit="max_model_len"} 1000000.0
pdproxy_connector_capacity_binding{group="attention"} 1.0
"""
"""The capacity of a node that admits whatever comes. Without one a proxy waits some seconds before it takes a node."""
INFO = b'pdproxy_connector_info{resume="true"} 1.0\n' + ROOM_FOR_ALL
BACKLOG = 1024
"""Connections that may wait to be accepted: all of a round's, on a machine that is busy elsewhere."""
HELD_TOKENS = 1000
"""Tokens of a stream that says no more after its first one."""
Writes = tuple[bytes, ...]


class Played(NamedTuple):
    """An answer in time: what goes out at once, and what in each step."""

    now: bytes
    steps: tuple[Writes, ...] = ()


class Pacer:
    """Steps of an engine; none while it has nothing to do."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._playing: list[tuple[asyncio.WriteTransport, list[Writes]]] = []

    def play(self, transport: asyncio.WriteTransport, steps: tuple[Writes, ...]) -> None:
        """Begin with the next step."""
        if not self._playing:
            asyncio.get_running_loop().call_later(self._seconds, self._step)
        self._playing.append((transport, list(reversed(steps))))

    def _step(self) -> None:
        here = [play for play in self._playing if not play[0].is_closing()]  # to write to one that is closed raises
        for transport, steps in here:
            for piece in steps.pop():
                transport.write(piece)
        self._playing = [play for play in here if play[1]]
        if self._playing:
            asyncio.get_running_loop().call_later(self._seconds, self._step)


class Book:
    """The node's answers; each is made once."""

    def __init__(self) -> None:
        self._made: dict[tuple[object, ...], Played] = {}

    def answer_to(self, path: str, raw: bytes) -> Played:
        """The answer to a request."""
        if path == "/metrics":
            return at_once(200, INFO)
        if path == "/v1/models":
            return at_once(200, json.dumps({"object": "list", "data": [{"id": MODEL, "object": "model"}]}).encode())
        if path == TRACES_PATH:
            return at_once(200, b"")
        if path == "/version":
            return at_once(200, b'{"version":"0.32.0"}')
        return self._generate(path, json.loads(raw)) if raw else at_once(200, b"")

    def _generate(self, path: str, asked: dict[str, Any]) -> Played:
        params = asked.get("kv_transfer_params") or {}
        prefill = params.get("do_remote_decode") is True
        if not prefill and params.get("remote_engine_id") != TICKET["remote_engine_id"]:
            return at_once(400, error(400, "the bench wants every prompt to be prefilled elsewhere"))
        if asked.get("max_tokens") == TOKENS and prompt_of(path.removeprefix(STREAMS_PATH), asked) != [PROMPT]:
            return at_once(400, error(400, "the prompt has changed on its way"))
        endpoint = path.removeprefix(STREAMS_PATH)
        question = ParsedRequest.of(endpoint, asked, 1)
        key = (path, prefill, question.count, question.stream, question.usage, question.ids)
        if key not in self._made:
            self._made[key] = _journaled(question) if endpoint != path else _played(question, prefill)
        return self._made[key]


def _played(question: ParsedRequest, prefill: bool) -> Played:
    if prefill:
        return Played(b"", ((_whole(200, answer(question, 0, dict(TICKET))),),))
    cached = len(question.prompt) - 1
    if not question.stream:
        waiting: tuple[Writes, ...] = ((),) * (question.count - 1)
        return Played(b"", (*waiting, (_whole(200, answer(question, cached, None)),)))
    pieces = _chunked(events(question, cached))
    first = len(pieces) - question.count - 1 - 1 - question.usage
    last = first + question.count
    if question.count == HELD_TOKENS:
        return Played(HEAD, (tuple(pieces[: first + 1]),))
    middle = [(piece,) for piece in pieces[first + 1 : last - 1]]
    return Played(HEAD, (tuple(pieces[: first + 1]), *middle, tuple(pieces[last - 1 :])))


def _journaled(question: ParsedRequest) -> Played:
    """With each token its record; what follows the last token comes with it."""
    pieces = _chunked(journaled(question, len(question.prompt) - 1, [], FakeKvTransfer()))
    if question.count == HELD_TOKENS:
        return Played(HEAD, ((pieces[0],),))
    last = question.count - 1
    return Played(HEAD, (*((piece,) for piece in pieces[:last]), tuple(pieces[last:])))


def _chunked(pieces: Iterable[bytes]) -> list[bytes]:
    """As HTTP/1.1 chunks, and the last one."""
    return [*(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces), b"0\r\n\r\n"]


def at_once(status: int, content: bytes) -> Played:
    """An answer without a generation."""
    return Played(_whole(status, content))


def _whole(status: int, content: bytes) -> bytes:
    head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    return head.encode() + content


class Connection(asyncio.Protocol):
    """One connection of a proxy."""

    def __init__(self, book: Book, pacer: Pacer) -> None:
        self._book = book
        self._pacer = pacer
        self._parser = httptools.HttpRequestParser(self)
        self._path = ""
        self._body: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.WriteTransport = transport  # type: ignore[assignment]  # a server's can write

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        self._path, self._body = "", []

    def on_url(self, url: bytes) -> None:
        self._path += url.decode()

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        played = self._book.answer_to(self._path.partition("?")[0], b"".join(self._body))
        if played.now:
            self._transport.write(played.now)
        if played.steps:
            self._pacer.play(self._transport, played.steps)


def addresses(count: int) -> list[str]:
    """So many of this machine's own, 127.0.0.1 first."""
    return [f"127.0.{number // 250}.{number % 250 + 1}" for number in range(count)]


async def serve(port: int, step: float, count: int) -> None:
    """Until the process ends; the same at each of so many addresses."""
    book, pacer = Book(), Pacer(step)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(book, pacer), addresses(count), port, backlog=BACKLOG)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]), float(sys.argv[2]) / 1000, int(next(iter(sys.argv[3:]), "1"))))
