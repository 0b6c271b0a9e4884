"""Nodes behind a DNS name, and the answers of name servers, byte for byte."""

import asyncio
import struct
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import NamedTuple, cast

import pytest
import uvloop

from pdproxy.nodes.discovery.dns import DnsSource, SystemResolver
from pdproxy.nodes.discovery.source import DiscoveryError, Template
from pdproxy.nodes.node import Role


class Service(NamedTuple):
    """An SRV record."""

    priority: int
    host: str
    port: int


NAME = "_http._tcp.decode.ai.svc.cluster.local"
RECORDS = (Service(0, "d-0.decode.ai.svc.cluster.local", 8000), Service(0, "d-1.decode.ai.svc.cluster.local", 8001))
SERVICES = tuple((record.host, record.port) for record in RECORDS)
CUT = 0x8380
"""The flags of an answer that did not fit."""
Answers = Callable[[bytes], bytes]


def wire_name(name: str) -> bytes:
    return b"".join(bytes([len(label)]) + label.encode() for label in name.split(".") if label) + b"\0"


def an_answer(asked: bytes, *records: Service, flags: int = 0x8180) -> bytes:
    """As name servers write it: the owner's name is a pointer to the question's."""
    question = asked[12 : asked.index(b"\0", 12) + 5]  # what follows it (EDNS) is not repeated
    body = b""
    for record in records:
        data = struct.pack("!HHH", record.priority, 10, record.port) + wire_name(record.host)
        body += b"\xc0\x0c" + struct.pack("!HHIH", 33, 1, 30, len(data)) + data
    return asked[:2] + struct.pack("!HHHHH", flags, 1, len(records), 0, 0) + question + body


class NameServer(asyncio.DatagramProtocol):
    """Answers over UDP with what a test gives it, over TCP with the records."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self.asked: list[str] = []

    async def __aenter__(self) -> "NameServer":
        self._tcp = await asyncio.start_server(self._over_tcp, "127.0.0.1", 0)
        self.port: int = self._tcp.sockets[0].getsockname()[1]
        await asyncio.get_running_loop().create_datagram_endpoint(lambda: self, ("127.0.0.1", self.port))
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._udp.close()
        self._tcp.close()
        await self._tcp.wait_closed()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._udp = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        labels, at = [], 12
        while data[at]:
            labels.append(data[at + 1 : at + 1 + data[at]].decode())
            at += 1 + data[at]
        self.asked.append(".".join(labels))
        self._udp.sendto(self._answers(data), addr)

    async def _over_tcp(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = await reader.readexactly(int.from_bytes(await reader.readexactly(2)))
        answer = an_answer(asked, *RECORDS)
        writer.write(len(answer).to_bytes(2) + answer)
        await writer.drain()
        writer.close()


@pytest.fixture
def configuration(tmp_path: Path) -> Path:
    path = tmp_path / "resolv.conf"
    path.write_text("nameserver 127.0.0.1\nsearch ai.svc.cluster.local svc.cluster.local\noptions ndots:5\n")
    return path


async def services(
    configuration: Path, answers: Answers, name: str = NAME, timeout: float = 60
) -> tuple[tuple[str, int], ...]:
    """The resolver's result of these answers."""
    async with NameServer(answers) as server:
        return await SystemResolver(str(configuration), server.port, timeout).services(name)


@pytest.mark.parametrize("flags", [0x8180, CUT])
@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_services_are_asked_for_and_over_tcp_where_the_answer_does_not_fit(
    configuration: Path, flags: int, loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    def answers(asked: bytes) -> bytes:
        return an_answer(asked, *(() if flags == CUT else RECORDS), flags=flags)

    with asyncio.Runner(loop_factory=loop) as runner:
        assert runner.run(services(configuration, answers)) == SERVICES


async def test_only_the_best_priority_counts_and_a_dot_is_absent(configuration: Path) -> None:
    worse, absent = Service(5, "backup", 80), Service(0, "", 0)
    assert await services(configuration, lambda asked: an_answer(asked, worse, absent)) == (("backup", 80),)
    assert await services(configuration, lambda asked: an_answer(asked, worse, *reversed(RECORDS))) == SERVICES


async def test_names_in_answers_may_point_back(configuration: Path) -> None:
    def answers(asked: bytes) -> bytes:
        data = struct.pack("!HHH", 0, 0, 80) + b"\x01d\xc0\x0e"  # "d", and the question from its second label on
        answer = an_answer(asked)
        record = b"\xc0\x0c" + struct.pack("!HHIH", 33, 1, 30, len(data)) + data
        return answer[:6] + struct.pack("!HHH", 1, 0, 0) + answer[12:] + record

    assert await services(configuration, answers, "a.bc.") == (("d.bc", 80),)


async def test_a_name_that_does_not_exist_or_has_no_services_has_none(configuration: Path) -> None:
    assert await services(configuration, lambda asked: an_answer(asked, flags=0x8183)) == ()
    assert await services(configuration, an_answer) == ()


async def test_names_are_looked_for_in_the_search_domains(configuration: Path) -> None:
    async with NameServer(lambda asked: an_answer(asked, flags=0x8183)) as server:
        resolver = SystemResolver(str(configuration), server.port, 60)
        await resolver.services("_http._tcp.decode")
        short, server.asked = server.asked, []
        await resolver.services("a.b.c.d.e.f")
    decode = "_http._tcp.decode"
    assert short == [f"{decode}.ai.svc.cluster.local", f"{decode}.svc.cluster.local", decode]
    assert server.asked[0] == "a.b.c.d.e.f"


@pytest.mark.parametrize("name", ["a..b", "x" * 64, ".".join(["abcdefgh"] * 40)])
async def test_what_is_no_name_is_said(configuration: Path, name: str) -> None:
    with pytest.raises(DiscoveryError, match=r"DNS"):
        await SystemResolver(str(configuration)).services(name)
    with pytest.raises(DiscoveryError):
        await SystemResolver().addresses("x" * 64)


async def test_a_server_that_fails_is_named(configuration: Path) -> None:
    with pytest.raises(DiscoveryError, match=r"failed to answer.*127\.0\.0\.1.*SERVFAIL"):
        await services(configuration, lambda asked: an_answer(asked, flags=0x8182))
    with pytest.raises(DiscoveryError, match="absent"):
        await SystemResolver(str(configuration.parent / "absent")).services(NAME)


@pytest.mark.parametrize(
    "answers",
    [
        lambda asked: an_answer(b"??" + asked[2:]),
        lambda asked: asked,
        lambda asked: an_answer(asked)[:20],
        lambda asked: an_answer(asked)[:6] + b"\0\1\0\0\0\0" + b"\xc0\x0c\0\0\0\0",
        lambda asked: b"",
    ],
)
async def test_what_answers_nothing_is_waited_out_and_said_in_the_same_words_each_time(
    configuration: Path, answers: Answers
) -> None:
    """The answer may be forged. The message is always the same, or it would be logged at every look-up."""
    with pytest.raises(DiscoveryError, match=r"^no name server answered within 0\.2 s$"):
        await services(configuration, answers, timeout=0.2)


async def test_addresses_are_what_the_system_knows() -> None:
    assert await SystemResolver().addresses("127.0.0.1") == ("127.0.0.1",)
    assert "127.0.0.1" in await SystemResolver().addresses("localhost")  # of /etc/hosts, here and in any container


class ScriptedResolver:
    """A resolver that gives one answer after the other, or raises it."""

    def __init__(self, *answers: object) -> None:
        self._answers = list(answers)

    def _next(self) -> object:
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def addresses(self, name: str) -> tuple[str, ...]:
        answer = self._next()
        assert isinstance(answer, tuple)
        return answer

    async def services(self, name: str) -> tuple[tuple[str, int], ...]:
        answer = self._next()
        assert isinstance(answer, tuple)
        return answer


class NoWait:
    """A clock that never waits."""

    def now(self) -> float:
        return 0.0

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0)


async def urls(found: AsyncIterator[tuple[object, ...]]) -> list[str]:
    return [getattr(node, "url", "") for node in await anext(found)]


async def test_addresses_are_followed_and_trouble_changes_nothing() -> None:
    resolver = ScriptedResolver(("10.0.0.1",), DiscoveryError("no network"), (), ("10.0.0.1",), ("10.0.0.1", "fd00::1"))
    source = DnsSource(resolver, "decode", 8000, Template((Role.DECODE,)), NoWait())
    found = source.watch()
    assert await urls(found) == ["http://10.0.0.1:8000"]
    assert await urls(found) == ["http://10.0.0.1:8000", "http://[fd00::1]:8000"]
    await found.aclose()


async def test_services_bring_their_own_ports() -> None:
    resolver = ScriptedResolver(DiscoveryError("what?"), SERVICES)
    found = DnsSource(resolver, NAME, None, Template((Role.PREFILL,), "https"), NoWait()).watch()
    (first, second) = await anext(found)
    assert first.name == "prefill-d-0.decode.ai.svc.cluster.local:8000"
    assert (first.url, second.url) == tuple(f"https://{record.host}:{record.port}" for record in RECORDS)
    assert first.roles == (Role.PREFILL,)
    await found.aclose()
