"""The load generator counts only right answers, and the mock node gives them only where the proxy did its work."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable

import pytest

from deploy.bench.load import load
from deploy.bench.node import TICKET, Book, Connection, Pacer, Played
from deploy.bench.script import TOKENS, Line, body, expected, flaw

PREFILL = {"kv_transfer_params": {"do_remote_decode": True, "pdproxy_hand_over": "x"}, "max_tokens": 1, "stream": False}


class Indulgent(Book):
    """Answers as if the request had come with a ticket."""

    def answer_to(self, path: str, raw: bytes) -> Played:
        return super().answer_to(path, json.dumps({**json.loads(raw), "kv_transfer_params": TICKET}).encode())


@contextlib.asynccontextmanager
async def serving(book: Book) -> AsyncIterator[int]:
    pacer = Pacer(0.0)
    server = await asyncio.get_running_loop().create_server(lambda: Connection(book, pacer), "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


@pytest.mark.parametrize("line", list(Line))
async def test_every_right_answer_counts(line: Line) -> None:
    async with serving(Indulgent()) as port:
        loaded = await load(port, line, requests=7, streams=3)
    assert (loaded.complete, loaded.failed, loaded.flaws) == (7, 0, [])


async def test_without_a_ticket_nothing_counts() -> None:
    async with serving(Book()) as port:
        loaded = await load(port, Line.COMPLETIONS, requests=5, streams=2)
    assert (loaded.complete, loaded.failed) == (0, 5)
    assert "prefilled elsewhere" in loaded.flaws[0]


@pytest.mark.parametrize("line", list(Line))
def test_a_prefill_gets_a_ticket_that_a_decode_is_served_for(line: Line) -> None:
    book = Book()
    prefilled = book.answer_to(line.path, json.dumps({**body(line), **PREFILL}).encode())
    answer = json.loads(prefilled.steps[0][0].partition(b"\r\n\r\n")[2])
    ticketed = {**body(line), "kv_transfer_params": answer["kv_transfer_params"]}
    assert len(book.answer_to(line.path, json.dumps(ticketed).encode()).steps) == TOKENS


def test_a_prompt_that_changed_on_its_way_is_refused() -> None:
    asked = {**body(Line.COMPLETIONS), "prompt": "another", "kv_transfer_params": TICKET}
    assert b" 400 " in Book().answer_to(Line.COMPLETIONS.path, json.dumps(asked).encode()).now


@pytest.mark.parametrize(
    "spoil",
    [
        lambda events: events[:-1],
        lambda events: events[1:],
        lambda events: [*events[:3], *events[2:]],
        lambda events: [events[1], events[0], *events[2:]],
        lambda events: [b'data: {"error":{}}\n\n', *events],
        lambda events: [],
    ],
)
def test_a_stream_with_a_flaw_is_seen(spoil: Callable[[list[bytes]], list[bytes]]) -> None:
    line = Line.COMPLETIONS
    asked = json.dumps({**body(line), "kv_transfer_params": TICKET}).encode()
    steps = [piece for step in Book().answer_to(line.path, asked).steps for piece in step]
    events = [piece.partition(b"\r\n")[2][:-2] for piece in steps[:-1]]
    assert flaw(line, expected(line), 200, b"".join(events)) is None
    assert flaw(line, expected(line), 200, b"".join(spoil(events))) is not None
