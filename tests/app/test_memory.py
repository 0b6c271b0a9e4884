"""Memory that a proxy in a process of its own holds of bodies: no more for what their JSON is than for its bytes."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from deploy.bench.peers import PDPROXY, Ports
from deploy.bench.script import KEY, MODEL
from deploy.local.paths import ROOT
from deploy.local.ports import free_ports
from tests.app.running_proxy import SOON

MB = 1024 * 1024
BODY = 64 * MB
"""Bytes of the longest body that is taken (`limits.body_bytes`)."""
HELD = 256 * MB
"""Bytes of all bodies (`limits.held_bytes`)."""
TIMES = 2.1
"""A body, and the one leg that carries it."""
SLACK = 24 * MB
MOST_AT_ONCE = 2000
"""Requests; more are not needed to see what one costs."""
OF_A_REQUEST = 100_000
"""Bytes, beside its body: connections, buffers, marks of its prompt. The allocator keeps them for the next ones."""
CHART = 2048 * MB
"""The chart's limit for the proxy's memory."""


def filled(begin: bytes, unit: bytes, end: bytes, size: int) -> bytes:
    """A field's value of so many bytes."""
    return begin + unit * ((size - len(begin) - len(end)) // len(unit)) + end


def names(size: int) -> bytes:
    """An object of as many different names as there is room for."""
    return b"{%b}" % b",".join(b'"%x":1' % number for number in range(2**20, 2**20 + size // 11))


MESSAGE = b'[{"role":"user","content":'
IMAGE = MESSAGE + b'[{"type":"image_url","image_url":{"url":"'
SHAPES: dict[str, tuple[Callable[[int], bytes], int]] = {
    "long string": (lambda size: filled(MESSAGE + b'"', b"words ", b'"}]', size), 200),
    "nested empty lists": (lambda size: filled(b"[", b"[],", b"[]]", size), 200),
    "nested empty dicts": (lambda size: filled(b"[", b"{},", b"{}]", size), 200),
    "lists in a message": (lambda size: filled(MESSAGE + b"[", b"[],", b"[]]}]", size), 200),
    "lists of lists": (lambda size: filled(b"[", b"[%b[]]," % (b"[]," * 5000), b"[]]", size), 200),
    "short strings": (lambda size: filled(b"[", b'"a",', b'"a"]', size), 200),
    "short messages": (lambda size: filled(b"[", b'{"role":"user","content":"a"},', b"{}]", size), 200),
    "ints": (lambda size: filled(b"[", b"7,", b"7]", size), 200),
    "names": (names, 200),
    "names of a message": (lambda size: MESSAGE + b'"a","more":%b}]' % names(size), 200),
    "names of the body": (lambda size: b"[],%b" % names(size)[1:-1], 400),
    "escapes": (lambda size: filled(MESSAGE + b'"', b"\\u0434", b'"}]', size), 200),
    "other than ascii": (lambda size: filled(MESSAGE + b'"', "я".encode(), b'"}]', size), 200),
    "image": (lambda size: filled(IMAGE, b"QUJD", b'"}}]}]', size), 200),
    "deep": (lambda size: b"[" * (size // 2) + b"]" * (size // 2), 400),
    "unfinished": (lambda size: filled(b"[", b"[],", b"[]", size), 400),
}
"""The value of ``messages``, and the status of its answer."""
QUICK = ("nested empty lists", "names", "image")


_HEAD = ("host: test", f"authorization: Bearer {KEY}", "connection: close")


class Proxy:
    """A running one, as a process."""

    def __init__(self, pid: int, port: int) -> None:
        self._status = Path(f"/proc/{pid}/status")
        self._clear = Path(f"/proc/{pid}/clear_refs")
        self._port = port

    def resident(self, name: str = "VmRSS") -> int:
        """Bytes of memory; ``VmHWM``: the most since `forget`."""
        lines = self._status.read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024

    def forget(self) -> int:
        """Begin to measure the most anew; what is resident now."""
        self._clear.write_text("5", encoding="ascii")
        return self.resident()

    async def ask(self, body: bytes, *fields: str, path: str = "/v1/chat/completions") -> int:
        """The status of the answer; ``fields``: of the head, besides."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        head = "\r\n".join([f"POST {path} HTTP/1.1", *_HEAD, *fields, ""])
        writer.write(f"{head}content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode())
        with contextlib.suppress(ConnectionError):  # a refused body's connection is closed
            writer.write(body)
            await writer.drain()
        try:
            return int((await reader.read()).split()[1])
        finally:
            writer.close()

    @contextlib.asynccontextmanager
    async def streaming(self, body: bytes) -> AsyncIterator[None]:
        """A stream of which the first event is here."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            head = "\r\n".join(["POST /v1/chat/completions HTTP/1.1", *_HEAD, "content-type: application/json", ""])
            writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            async with asyncio.timeout(SOON):
                await reader.readuntil(b"}\n\n")
            yield
        finally:
            writer.close()


@contextlib.asynccontextmanager
async def process(*words: str) -> AsyncIterator[asyncio.subprocess.Process]:
    nowhere = asyncio.subprocess.DEVNULL
    started = await asyncio.create_subprocess_exec(
        sys.executable, "-m", *words, cwd=ROOT, stdout=nowhere, stderr=nowhere
    )
    try:
        yield started
    finally:
        with contextlib.suppress(ProcessLookupError):
            started.kill()
        await started.wait()


@contextlib.asynccontextmanager
async def running(*settings: str, seconds: float = 0.0, status: int = 200, nodes: bool = True) -> AsyncIterator[Proxy]:
    """A ready proxy as the chart starts it, before two nodes that answer with this status after so long."""
    prefill, decode, clients, operators = free_ports(4)
    words = PDPROXY.command(Ports(clients, operators, prefill, decode))[3:]
    async with contextlib.AsyncExitStack() as stack:
        for port in (prefill, decode) if nodes else ():
            await stack.enter_async_context(
                process("tests.fakes.swallowing_node", f"{port}", f"{seconds}", f"{status}")
            )
        started = await stack.enter_async_context(process("pdproxy", *words, *settings))
        proxy = Proxy(started.pid, clients)
        small = chat(b'[{"role":"user","content":"hello"}]')
        async with asyncio.timeout(SOON):
            while not await is_ready(proxy, small, status):  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        yield proxy


async def is_ready(proxy: Proxy, small: bytes, status: int) -> bool:
    try:
        return await proxy.ask(small) == status
    except OSError:
        return False


def chat(messages: bytes) -> bytes:
    return b'{"model":"%b","max_tokens":5,"messages":%b}' % (MODEL.encode(), messages)


def shapes(names: tuple[str, ...]) -> Iterator[tuple[str, bytes, int]]:
    for name in names:
        make, status = SHAPES[name]
        yield name, chat(make(BODY - 200)), status


async def held_by(proxy: Proxy, names: tuple[str, ...]) -> dict[str, tuple[int, float]]:
    """The status for each shape, and how many times the body's size was held at most."""
    found = {}
    for name, body, _ in shapes(names):
        before = proxy.forget()
        status = await proxy.ask(body)
        found[name] = (status, (proxy.resident("VmHWM") - before - SLACK) / len(body))
    return found


@pytest.mark.parametrize("names", [QUICK, pytest.param(tuple(SHAPES), marks=pytest.mark.long)])
async def test_a_body_of_any_json_is_held_about_twice(names: tuple[str, ...]) -> None:
    async with running() as proxy:
        at_first = proxy.resident()
        found = await held_by(proxy, names)
        assert {name: status for name, (status, _) in found.items()} == {name: SHAPES[name][1] for name in names}
        assert {name: times for name, (_, times) in found.items() if times > TIMES} == {}
        assert proxy.resident() - at_first < BODY


WORD = 60_000
"""Bytes of a field of the head."""
TRACE = f"traceparent: 00-{'a' * 32}-{'b' * 16}-01"
WORDS = {
    "model": (chat(b"[]").replace(MODEL.encode(), b"m" * (20 * MB)), (), "/v1/chat/completions", 404),
    "user": (chat(b'"hi","user":"%b"' % (b"u" * (20 * MB))), (), "/v1/chat/completions", 200),
    "names": (b"{%b}" % b",".join(b'"%b%d":1' % (b"n" * MB, at) for at in range(20)), (), "/v1/chat/completions", 200),
    "session": (chat(b'"hi"'), ("x-session-id: " + "s" * WORD,), "/v1/chat/completions", 200),
    "request id": (chat(b'"hi"'), ("x-request-id: " + "r" * WORD,), "/v1/chat/completions", 200),
    "key": (chat(b'"hi"'), ("x-api-key: " + "k" * WORD,), "/v1/chat/completions", 200),
    "trace": (chat(b'"hi"'), (TRACE, "tracestate: a=" + "t" * WORD), "/v1/chat/completions", 200),
    "path": (b"{}", (), "/v1/" + "p" * (WORD // 2), 404),
    "forwarded": (b'{"model":"%b"}' % (b"m" * (20 * MB)), (), "/v1/embeddings", 404),
    "nobody's model": (chat(b'"hi"').replace(MODEL.encode(), b"m" * 500), (), "/v1/chat/completions", 404),
}  # fmt: skip


@pytest.mark.parametrize("nodes", ["up", "down"])
async def test_nothing_that_a_client_calls_itself_or_others_is_kept(nodes: str) -> None:
    async with running() if nodes == "up" else running(status=503, nodes=False) as proxy:
        found = list[int]()
        for body, fields, path, _ in WORDS.values():  # what the first of a kind costs is no client's
            found.append(await proxy.ask(body, *fields, path=path))
        assert nodes == "down" or found == [status for _, _, _, status in WORDS.values()]
        at_first = proxy.resident()
        for body, fields, path, _ in WORDS.values():
            for _ in range(4 if len(body) > MB else 100):
                await proxy.ask(body, *fields, path=path)
        await until(lambda: proxy.resident() - at_first < 10 * MB)


@pytest.mark.parametrize(
    "status", [429, pytest.param(400, marks=pytest.mark.long), pytest.param(500, marks=pytest.mark.long)]
)
async def test_no_body_is_kept_whose_legs_failed(status: int) -> None:
    async with running(status=status) as proxy:
        at_first = proxy.resident()
        body = chat(SHAPES["image"][0](8 * MB))
        looks = list[int]()
        for _ in range(30):
            assert await proxy.ask(body) in (status, 502, 503)
            looks.append(proxy.resident())
        # What is kept stays, so the least of some looks counts. A single one may meet free blocks, two to four of the
        # largest body, which glibc gives back or not by what lies above them.
        assert min(looks[20:]) - at_first < 3 * len(body)


AT_ONCE = [
    pytest.param("nested empty lists", 5 * MB, 8),
    *(
        pytest.param(name, size, min(HELD // (size + 200), MOST_AT_ONCE), marks=pytest.mark.long)
        for name in ("nested empty lists", "lists in a message", "short messages", "image", "names of a message")
        for size in (16 * MB, MB, 100_000, 30_000)
    ),
]


@pytest.mark.parametrize(("name", "size", "count"), AT_ONCE)
async def test_bodies_that_are_there_at_once_fit_into_the_charts_memory(name: str, size: int, count: int) -> None:
    """And are gone after their answers."""
    body = chat(SHAPES[name][0](size))
    async with running(seconds=4.0 if count > 8 else 0.5) as proxy:
        at_first = proxy.forget()
        found = await asyncio.gather(*(proxy.ask(body) for _ in range(count)))
        assert set(found) == {200}
        held = proxy.resident("VmHWM") - at_first
        assert held < TIMES * count * len(body) + count * OF_A_REQUEST + SLACK
        assert held < CHART * 3 // 4
        async with asyncio.timeout(SOON):
            while proxy.resident() - at_first > count * OF_A_REQUEST + SLACK:  # noqa: ASYNC110
                await asyncio.sleep(0.1)


OPEN = 10
IMAGE_SIZE = 24 * MB
STREAMS = {
    "may move": ((), 1),
    "stay": (("--policy-migrations", "0"), 0),
}
"""Settings, and how many times the body of a stream that has begun is held."""


@pytest.mark.parametrize("name", STREAMS)
async def test_the_body_of_a_stream_is_held_once_while_it_may_move_and_else_not_at_all(name: str) -> None:
    """But for one that the allocator keeps for the next."""
    settings, times = STREAMS[name]
    body = b'{"stream":true,' + chat(SHAPES["image"][0](IMAGE_SIZE))[1:]
    async with running(*settings) as proxy:
        at_first = proxy.resident()
        async with contextlib.AsyncExitStack() as streams:
            for _ in range(OPEN):
                await streams.enter_async_context(proxy.streaming(body))
            await until(lambda: proxy.resident() - at_first < (times * OPEN + 1) * len(body) + SLACK)
            assert proxy.resident() - at_first > times * OPEN * len(body) - SLACK
        await until(lambda: proxy.resident() - at_first < len(body) + SLACK)


async def until(true: Callable[[], bool]) -> None:
    """Return once it is; the proxy gives memory back a second after it was needed."""
    async with asyncio.timeout(SOON):
        while not true():  # noqa: ASYNC110
            await asyncio.sleep(0.1)
