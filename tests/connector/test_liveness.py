"""Whether a node's processes run: who answers the route, and who does not."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from uuid import uuid4

import httpx
import pytest
import zmq
from fastapi import FastAPI

from connector.alive_route import ROUTE, attach
from connector.config import NODE_ID, name_node
from connector.liveness import SOCKETS, LivenessSocket, answers, listening

ROOT = Path(__file__).parents[2]
STOPPED = 0.5
"""Seconds of silence that a test takes for a stopped process; a running one answers in milliseconds."""
SOON = 20.0


@pytest.fixture
def node_id(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of the node that this process belongs to."""
    monkeypatch.setenv(NODE_ID, uuid4().hex)
    return os.environ[NODE_ID]


@asynccontextmanager
async def engine(node_id: str, busy: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process of the node."""
    line = (sys.executable, "-m", "tests.connector.stopped_process", node_id, busy)
    process = await asyncio.create_subprocess_exec(*line, cwd=ROOT, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert await process.stdout.readline() == b"listening\n"
        yield process
    finally:
        process.kill()
        await process.communicate()


async def ask(patience: float = SOON) -> tuple[int, int]:
    """The route's status, and the number of processes that it names."""
    app = FastAPI()
    attach(app, patience)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://node") as client:
        answer = await client.get(ROUTE)
    return answer.status_code, answer.json()["processes"]


@pytest.mark.parametrize("busy", ["gil", "python", "garbage"])
async def test_a_busy_process_answers_and_a_stopped_one_does_not(node_id: str, busy: str) -> None:
    async with engine(node_id, busy) as process:
        for _ in range(10):
            async with asyncio.timeout(SOON):
                assert await ask() == (200, 1)
            await asyncio.sleep(0.02)
        process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(0.1)
        assert await ask(STOPPED) == (504, 1)
        process.send_signal(signal.SIGCONT)
        assert await ask() == (200, 1)


async def test_one_stopped_process_of_several_counts(node_id: str) -> None:
    async with engine(node_id, "gil"), engine(node_id, "gil") as second:
        assert await ask() == (200, 2)
        second.send_signal(signal.SIGSTOP)
        await asyncio.sleep(0.1)
        assert await ask(STOPPED) == (504, 2)


async def test_a_stopped_process_whose_backlog_is_full_does_not_answer(node_id: str) -> None:
    async with engine(node_id, "gil") as process:
        process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(0.1)
        [name] = listening(node_id, SOCKETS)
        asking = [asyncio.create_task(answers(name)) for _ in range(300)]
        done, _ = await asyncio.wait(asking, timeout=STOPPED)
        assert done == set()
        process.send_signal(signal.SIGCONT)
        async with asyncio.timeout(SOON):
            assert all(await asyncio.gather(*asking))


async def test_nothing_is_asked_where_nobody_listens(node_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    socket = LivenessSocket(node_id)
    socket.open()
    assert await ask() == (200, 1)
    [name] = listening(node_id, SOCKETS)
    socket.close()
    assert await ask() == (200, 0)
    assert not await answers(name)
    monkeypatch.delenv(NODE_ID)
    assert await ask() == (200, 0)


def test_nodes_do_not_see_each_other(tmp_path: Path) -> None:
    sockets = [LivenessSocket(name) for name in ("aa", "ab", "aa", "")]
    for each in sockets:
        each.open()
        each.open()
    try:
        assert listening("aa", SOCKETS) == [f"pdproxy-alive-aa-{os.getpid()}"]
        assert listening("ab", SOCKETS) == [f"pdproxy-alive-ab-{os.getpid()}"]
        assert listening("", SOCKETS) == listening("aa", tmp_path / "missing") == []
    finally:
        for each in sockets:
            each.close()
            each.close()


async def test_nobody_can_leave_a_message(node_id: str) -> None:
    listener = LivenessSocket(node_id)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    listener.open()
    [name] = listening(node_id, SOCKETS)
    sender = context.socket(zmq.DEALER)
    sender.setsockopt(zmq.SNDTIMEO, 1)
    sender.connect(f"ipc://@{name}")
    try:
        assert not all(_sent(sender) for _ in range(10_000))
        assert await answers(name)
    finally:
        context.destroy(linger=0)
        listener.close()


def _sent(sender: "zmq.Socket[bytes]") -> bool:
    try:
        sender.send(b"x" * 60)
    except zmq.Again:
        return False
    return True


def test_a_node_keeps_its_id() -> None:
    first: dict[str, str] = {}
    name_node(first)
    kept = dict(first)
    name_node(first)
    assert first == kept
    second: dict[str, str] = {}
    name_node(second)
    assert first != second
