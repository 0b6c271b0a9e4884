"""Our client against httpx: the same bytes of a server mean the same to both, but for the differences listed here.

A server plays answers, one a request, to each client in turn; what they made of each (status, headers, body, or an
error) must agree, up to the first answer where they differ for a reason that is in `DIFFERENCES`.
"""

import asyncio
import contextlib
import dataclasses
import itertools
import ssl
from collections.abc import Awaitable, Callable, Sequence

import httpx
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pdproxy.clock import SystemClock
from pdproxy.errors import NodeFault
from pdproxy.request import Headers
from pdproxy.transport.h1_client import H1Transport
from pdproxy.transport.port import HttpRequest, Timeouts, read_to_end
from tests.transport.answers import METHODS, Answer, answers
from tests.transport.peer import GENEROUS

STUCK = 0.03
"""Seconds until the server closes the connection of a client that waits for more; no result depends on the number."""


class AnswerServer:
    """Plays the answers in their order."""

    def __init__(self, plays: Sequence[Answer]) -> None:
        self._plays = plays
        self._tasks: set[asyncio.Task[None]] = set()
        self.asked = 0
        self.connections: list[int] = []
        """On which connection each request came."""
        self.read = [asyncio.Event() for _ in plays]
        """To be set when the client is done with an answer."""
        self.ready = [asyncio.Event() for _ in plays]
        """The connection is closed, or waits for the next request."""

    async def __aenter__(self) -> "AnswerServer":
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/"
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._tasks.add(asyncio.get_running_loop().create_task(self._serve(reader, writer, len(self._tasks))))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        goes_on = True
        try:
            while goes_on:
                await reader.readuntil(b"\r\n\r\n")
                self.connections.append(number)
                at, self.asked = self.asked, self.asked + 1
                with contextlib.suppress(ConnectionError):
                    goes_on = await self._play(at, writer)
                if not goes_on:
                    writer.transport.close()
                await asyncio.sleep(0)
                self.ready[at].set()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.transport.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def _play(self, at: int, writer: asyncio.StreamWriter) -> bool:
        """Whether the connection stays."""
        for piece in self._plays[at].pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        if not self._plays[at].closes:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STUCK):
                    await self.read[at].wait()
        return self.read[at].is_set() and not self._plays[at].closes


STEPS = 2
"""Requests in a row, at most."""


@dataclasses.dataclass(frozen=True, slots=True)
class Read:
    """A client's reading of an answer: ``error`` is "" where it was one."""

    status: int = 0
    headers: Headers = ()
    body: bytes = b""
    error: str = ""
    reused: bool = False
    """The request went out on the connection of the one before."""

    def same(self, other: "Read") -> bool:
        if self.error or other.error:
            return bool(self.error) and bool(other.error)
        return (self.status, self.headers, self.body) == (other.status, other.headers, other.body)


@dataclasses.dataclass(frozen=True, slots=True)
class Difference:
    """Where we differ on purpose.

    Attributes:
        why: we do.
        covers: whether a pair of ours and httpx's reading is such a difference.
        shown_by: an answer that shows it, to be followed by another.
    """

    why: str
    covers: Callable[[Read, Read], bool]
    shown_by: bytes


def refused(words: str) -> Callable[[Read, Read], bool]:
    """Ours is an error with these words, httpx takes the answer."""
    return lambda ours, theirs: words in ours.error and not theirs.error


def said_more(ours: Read, theirs: Read) -> bool:
    """The connection was kept by httpx alone."""
    return theirs.reused and not ours.reused


def odd_reason(ours: Read, theirs: Read) -> bool:
    """httpx refuses the first line of an answer that ours takes."""
    return not ours.error and "illegal status" in theirs.error and ours.reused == theirs.reused


EVIL = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil"
EMPTY = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"
FIELD = b"HTTP/1.1 200 OK\r\n%b\r\nContent-Length: 1\r\n\r\nx"
CHUNK = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1%b\r\nx\r\n0\r\n%b\r\n"
DIFFERENCES = tuple(
    itertools.starmap(
        Difference,
        (
            (
                "Lines end with CRLF: a lone LF is read in two ways by two readers.",
                refused("Missing expected CR"),
                b"HTTP/1.1 200 OK\nContent-Length: 1\n\nx",
            ),
            (
                "The same, right after the status.",
                refused("Invalid response status"),
                b"HTTP/1.1 200\nContent-Length: 1\n\nx",
            ),
            (
                "Chunks and a length contradict each other.",
                refused("be present with Transfer-Encoding"),
                CHUNK % (b"", b"Content-Length: 1\r\n"),
            ),
            (
                "A length and chunks contradict each other.",
                refused("be present with Content-Length"),
                FIELD.replace(b"%b\r\n", b"").replace(
                    b"\r\n\r\nx", b"\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n\r\n"
                ),
            ),
            ("A length is said once.", refused("Duplicate Content-Length"), FIELD % b"Content-Length: 1"),
            (
                "A length is digits, no list of equal ones.",
                refused("Invalid character in Content-Length"),
                b"HTTP/1.1 200 OK\r\nContent-Length: 1, 1\r\n\r\nx",
            ),
            ("The version is 1.0 or 1.1.", refused("Invalid HTTP version"), EMPTY.replace(b"1.1", b"1.2")),
            ("Nothing follows a chunk's size.", refused("Invalid character in chunk size"), CHUNK % (b" ", b"")),
            ("A chunk's extension has a name.", refused("Invalid character in chunk ext"), CHUNK % (b";", b"")),
            ("A value has no control characters.", refused("Invalid header value char"), FIELD % b"X: a\x01b"),
            ("The same, at the end of a head.", refused("Invalid header field char"), EMPTY[:-2] + b"\n"),
            ("A value is on one line.", refused("Unexpected whitespace after header"), FIELD % b"X: a\r\n b"),
            ("The reason is not looked at: it goes nowhere.", odd_reason, EMPTY.replace(b"OK", b"\0")),
            (
                "Who said more than was asked is not asked again: httpx takes that for the next answer.",
                said_more,
                EMPTY + EVIL,
            ),
        ),
    )
)


Ask = Callable[[str, str], Awaitable[Read]]


async def in_turn(plays: Sequence[Answer], methods: Sequence[str], ask: Ask) -> list[Read]:
    """A client's reading of each answer."""
    found = []
    async with asyncio.timeout(GENEROUS), AnswerServer(plays) as server:
        for at, method in enumerate(methods):
            read = await ask(method, server.url)
            server.read[at].set()
            await server.ready[at].wait()
            reused = at > 0 and server.connections[at] == server.connections[at - 1]
            found.append(dataclasses.replace(read, reused=reused))
    return found


async def ours(plays: Sequence[Answer], methods: Sequence[str]) -> list[Read]:
    """As the proxy's own client reads them."""
    async with contextlib.aclosing(H1Transport(SystemClock())) as transport:

        async def ask(method: str, url: str) -> Read:
            try:
                response = await transport.send(HttpRequest(method, url), Timeouts(GENEROUS, GENEROUS, GENEROUS))
            except NodeFault as fault:
                return Read(error=fault.detail)
            try:
                return Read(response.status, plain(response.headers), await read_to_end(response, 2**20))
            except NodeFault as fault:
                return Read(error=fault.detail)
            finally:
                await response.aclose()

        return await in_turn(plays, methods, ask)


async def theirs(plays: Sequence[Answer], methods: Sequence[str]) -> list[Read]:
    """As httpx reads them."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # bare: loading authorities takes longer than all the rest
    async with contextlib.aclosing(httpx.AsyncHTTPTransport(verify=context, trust_env=False)) as transport:

        async def ask(method: str, url: str) -> Read:
            headers = [("host", "x"), *([("content-length", "0")] if method == "POST" else [])]
            timeout = {"timeout": {"connect": GENEROUS, "read": GENEROUS}}
            try:
                response = await transport.handle_async_request(
                    httpx.Request(method, url, headers=headers, extensions=timeout)
                )
            except httpx.HTTPError as error:
                return Read(error=repr(error))
            raw = tuple(
                (name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in response.headers.raw
            )
            try:
                body = b"".join([piece async for piece in response.aiter_raw()])
            except httpx.HTTPError as error:
                return Read(error=repr(error))
            finally:
                await response.aclose()
            return Read(response.status_code, plain(raw), body)

        return await in_turn(plays, methods, ask)


def plain(headers: Headers) -> Headers:
    """h11 writes the transfer coding in lower case; nobody keeps it, for it ends with the connection."""
    return tuple((name, value.lower() if name == "transfer-encoding" else value) for name, value in headers)


def compare(steps: Sequence[tuple[str, Answer]]) -> tuple[list[Read], list[Read]]:
    """Both, on loops of their own."""
    methods, plays = [method for method, _ in steps], [play for _, play in steps]
    return asyncio.run(ours(plays, methods)), asyncio.run(theirs(plays, methods))


def whole(raw: bytes, closes: bool = False) -> Answer:
    return Answer((raw,), closes)


GZIP = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n"


@given(st.lists(st.tuples(METHODS, answers()), min_size=1, max_size=STEPS))
@example([("GET", whole(GZIP))])
@example([("GET", whole(EMPTY + EVIL)), ("GET", whole(EMPTY))])
@example([("HEAD", whole(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n")), ("GET", whole(EVIL))])
def test_both_clients_read_the_same(steps: list[tuple[str, Answer]]) -> None:
    for own, reference in zip(*compare(steps), strict=True):
        if not own.same(reference):
            assert [each.why for each in DIFFERENCES if each.covers(own, reference)], (own, reference)
            return


@pytest.mark.parametrize("difference", DIFFERENCES, ids=lambda difference: difference.why)
def test_each_listed_difference_exists(difference: Difference) -> None:
    """One that is not is to be struck off the list."""
    pairs = zip(*compare([("GET", whole(difference.shown_by)), ("GET", whole(EMPTY))]), strict=True)
    own, reference = next((pair for pair in pairs if not pair[0].same(pair[1])), (Read(), Read()))
    assert difference.covers(own, reference), (own, reference)


def test_most_answers_are_read_by_both() -> None:
    """Or the comparison would say little."""
    plain_answers = [EMPTY, EVIL, CHUNK % (b";a=b", b"T: 1\r\n"), b"HTTP/1.1 100 Continue\r\n\r\n" + EVIL]
    own, reference = compare([("GET", whole(raw)) for raw in plain_answers])
    assert [read.error for read in (*own, *reference)] == [""] * 8
    assert [read.reused for read in (*own, *reference)] == [False, True, True, True] * 2
    assert own == reference
