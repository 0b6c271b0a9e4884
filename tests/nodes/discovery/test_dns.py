"""Nodes behind a DNS name, and the wire that SRV records come over."""

import asyncio
import struct
from collections.abc import AsyncIterator
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdproxy.nodes.discovery.dns import DnsSource, Name
from pdproxy.nodes.discovery.dns_wire import BadAnswer, Service, Truncated, question, services
from pdproxy.nodes.discovery.resolver import SystemResolver
from pdproxy.nodes.discovery.source import Template
from pdproxy.nodes.node import Role

NAME = "_http._tcp.decode.ai.svc.cluster.local"
RECORDS = (Service(0, "d-0.decode.ai.svc.cluster.local", 8000), Service(0, "d-1.decode.ai.svc.cluster.local", 8001))


def wire_name(name: str) -> bytes:
    return b"".join(bytes([len(label)]) + label.encode() for label in name.split(".") if label) + b"\0"


def an_answer(asked: bytes, *records: Service, flags: int = 0x8180) -> bytes:
    """As name servers write it: the owner's name is a pointer to the question's."""
    number = asked[:2]
    body = b""
    for record in records:
        data = struct.pack("!HHH", record.priority, 10, record.port) + wire_name(record.host)
        body += b"\xc0\x0c" + struct.pack("!HHIH", 33, 1, 30, len(data)) + data
    return number + struct.pack("!HHHHH", flags, 1, len(records), 0, 0) + asked[12:] + body


def test_a_question_is_what_the_rfc_says() -> None:
    asked = question("a.bc", 0x1234)
    assert asked == b"\x12\x34\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\x01a\x02bc\x00\x00\x21\x00\x01"


@pytest.mark.parametrize("name", ["", "a..b", "x" * 64, ".".join(["abcdefgh"] * 40), "ü.de"])
def test_what_is_no_name_is_not_asked(name: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        question(name, 1)


def test_services_are_read() -> None:
    assert services(an_answer(question(NAME, 7), *RECORDS), 7) == RECORDS


def test_names_in_answers_may_point_back() -> None:
    asked = question("a.bc", 7)
    data = struct.pack("!HHH", 0, 0, 80) + b"\x01d\xc0\x0e"
    answer = an_answer(asked)[:6] + struct.pack("!HHH", 1, 0, 0) + asked[12:]
    answer += b"\xc0\x0c" + struct.pack("!HHIH", 33, 1, 30, len(data)) + data
    assert services(answer, 7) == (Service(0, "d.bc", 80),)


def test_only_the_best_priority_counts_and_a_dot_is_nobody() -> None:
    worse, nobody = Service(5, "backup", 80), Service(0, "", 0)
    assert services(an_answer(question(NAME, 7), worse, nobody), 7) == (worse,)
    assert services(an_answer(question(NAME, 7), worse, *RECORDS), 7) == RECORDS


def test_a_name_that_does_not_exist_has_nothing() -> None:
    assert services(an_answer(question(NAME, 7), flags=0x8183), 7) == ()


def test_unusable_answers_say_so() -> None:
    asked = question(NAME, 7)
    with pytest.raises(BadAnswer, match="another question"):
        services(an_answer(asked), 8)
    with pytest.raises(BadAnswer, match="another question"):
        services(asked, 7)
    with pytest.raises(BadAnswer, match="code 2"):
        services(an_answer(asked, flags=0x8182), 7)
    with pytest.raises(Truncated):
        services(an_answer(asked, flags=0x8380), 7)
    with pytest.raises(BadAnswer, match="never ends"):
        services(an_answer(asked)[:6] + b"\0\1\0\0\0\0" + b"\xc0\x0c\0\0\0\0", 7)


@given(st.binary(max_size=80), st.integers(0, 200))
def test_any_bytes_are_an_answer_or_a_bad_one(noise: bytes, at: int) -> None:
    whole = an_answer(question(NAME, 7), *RECORDS)
    for answer in (noise, whole[:at] + noise + whole[at + len(noise) :], whole[:at]):
        try:
            services(answer, 7)
        except BadAnswer:
            continue


class NameServer(asyncio.DatagramProtocol):
    """Over UDP it cuts its answer short if told so; over TCP it says all."""

    def __init__(self, flags: int) -> None:
        self.flags = flags

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        cut = bool(self.flags & 0x0200)
        self.transport.sendto(an_answer(data, *(() if cut else RECORDS), flags=self.flags), addr)

    async def over_tcp(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = await reader.readexactly(int.from_bytes(await reader.readexactly(2)))
        answer = an_answer(asked, *RECORDS)
        writer.write(len(answer).to_bytes(2) + answer)
        await writer.drain()
        writer.close()


async def listen(server: NameServer) -> tuple[asyncio.DatagramTransport, asyncio.Server, tuple[str, int]]:
    """On one port, over both."""
    tcp = await asyncio.start_server(server.over_tcp, "127.0.0.1", 0)
    address: tuple[str, int] = tcp.sockets[0].getsockname()
    udp, _ = await asyncio.get_running_loop().create_datagram_endpoint(lambda: server, local_addr=address)
    return udp, tcp, address


@pytest.mark.parametrize("flags", [0x8180, 0x8380])
async def test_a_name_server_is_asked_and_over_tcp_where_the_answer_does_not_fit(flags: int) -> None:
    udp, tcp, address = await listen(NameServer(flags))
    try:
        assert await SystemResolver(address, timeout=60).services(NAME) == RECORDS
    finally:
        udp.close()
        tcp.close()
        await tcp.wait_closed()


async def test_an_address_is_its_own_name() -> None:
    assert await SystemResolver().addresses("127.0.0.1") == ("127.0.0.1",)


class Told:
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

    async def services(self, name: str) -> tuple[Service, ...]:
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
    resolver = Told(("10.0.0.1",), OSError("no network"), (), ("10.0.0.1",), ("10.0.0.1", "fd00::1"))
    source = DnsSource(resolver, Name("decode", 8000), Template(Role.DECODE), NoWait())
    found = source.sightings()
    assert await urls(found) == ["http://10.0.0.1:8000"]
    assert await urls(found) == ["http://10.0.0.1:8000", "http://[fd00::1]:8000"]
    await found.aclose()


async def test_services_bring_their_own_ports() -> None:
    resolver = Told(BadAnswer("what?"), RECORDS)
    found = DnsSource(resolver, Name(NAME), Template(Role.PREFILL, "https", weight=2.0), NoWait()).sightings()
    (first, second) = await anext(found)
    assert first.name == "prefill-d-0.decode.ai.svc.cluster.local:8000"
    assert (first.url, second.url) == tuple(f"https://{record.host}:{record.port}" for record in RECORDS)
    assert first.weight == 2.0
    await found.aclose()
