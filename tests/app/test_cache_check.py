"""`pdproxy check` tells of prefix caches, and looks for KV events."""

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import AsyncIterator

import pytest

from pdproxy.app import cache_check
from pdproxy.app.cache_check import cache_lines, look_for_events
from pdproxy.errors import Fault
from pdproxy.nodes.cache_advice import EventsSeen
from pdproxy.nodes.node import Node, Role
from tests.nodes.fake_pool import FakeNodeInfo, FakePoolTransport
from tests.nodes.test_cache_advice import HYBRID, WITHOUT_UNIT

AT = "127.0.0.1:1"
NODE = Node("p1", f"http://{AT}", (Role.PREFILL,))
PATH = "/kv_event_sources"


@contextlib.asynccontextmanager
async def listening() -> AsyncIterator[int]:
    """A port at which somebody takes connections."""
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


def publishers(*endpoints: str) -> bytes:
    """A node's answer, a rank for each endpoint."""
    return json.dumps({rank: {"publisher": "zmq", "endpoint": each} for rank, each in enumerate(endpoints)}).encode()


async def seen(answer: tuple[int, bytes] | Fault) -> EventsSeen:
    transport = FakePoolTransport(**{AT: FakeNodeInfo(Role.PREFILL, paths={PATH: answer})})
    return (await look_for_events(transport, (), [NODE]))["p1"]


async def test_every_rank_s_publisher_must_be_there() -> None:
    async with listening() as port, listening() as other:
        assert await seen((200, publishers(f"tcp://*:{port}", f"tcp://10.9.8.7:{other}"))) is EventsSeen.READ
        assert await seen((200, publishers(f"tcp://*:{port}", "tcp://*:1"))) is EventsSeen.UNREACHABLE
        assert await seen((200, publishers(f"tcp://*:{port}", "ipc:///here"))) is EventsSeen.UNREACHABLE
    assert await seen((200, publishers(f"tcp://*:{port}"))) is EventsSeen.UNREACHABLE


async def test_a_port_that_takes_too_long_is_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_check, "CONNECT_SECONDS", 0.0)
    async with listening() as port:
        assert await seen((200, publishers(f"tcp://*:{port}"))) is EventsSeen.UNREACHABLE


@pytest.mark.parametrize(
    ("answer", "events"),
    [
        ((200, b"{}"), EventsSeen.OFF),
        ((404, b""), EventsSeen.OFF),
        ((200, b'{"0": {"publisher": "null", "endpoint": "tcp://*:5557"}}'), EventsSeen.OFF),
        (Fault.RESET, EventsSeen.UNKNOWN),
    ],
)
async def test_a_node_may_publish_nothing(answer: tuple[int, bytes] | Fault, events: EventsSeen) -> None:
    assert await seen(answer) is events


def test_equal_nodes_share_their_lines() -> None:
    second = dataclasses.replace(HYBRID, name="p2")
    worse = dataclasses.replace(WITHOUT_UNIT, name="p3")
    lines = cache_lines([HYBRID, second, worse], {"p1": EventsSeen.READ, "p2": EventsSeen.READ, "p3": EventsSeen.OFF})
    begun = [line.split(": ", 2)[:2] for line in lines]
    assert begun == [["p1, p2", "cache"], ["p3", "cache"], ["p3", "advice"], ["p3", "advice"]]
    assert lines[0].startswith("p1, p2: cache: blocks of 1,056 tokens at --tensor-parallel-size 2, hits end at")
    assert "--prefix-match-unit 16" in lines[2]
    assert "--kv-events-config" in lines[3]


def test_a_node_that_tells_nothing_has_one_line() -> None:
    (line,) = cache_lines([NODE], {})
    assert line.startswith("p1: advice: it does not tell how its prefix cache works")
