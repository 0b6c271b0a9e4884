"""How long a body counts against `limits.held_bytes`: while it may have to be sent again, and no longer."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from pdproxy.settings.model import Limits, Policy, Settings
from tests.app.running_proxy import SOON, RunningProxy, running_proxy
from tests.fakes.faults import FaultKind, InjectedFault
from tests.fakes.node import EVENTS, FakeNode, Script

MB = 1024 * 1024
IMAGE = 24 * MB
MANY = 14
"""Their images are 336 MB; 256 MB are held by default."""
CHAT = "/v1/chat/completions"
AUDIO = "/v1/audio/transcriptions"
HELD_OPEN = InjectedFault(FaultKind.STALL, at=3)
"""A node that says no more after two tokens."""
SMALL = Limits(body_bytes=4096, held_bytes=8192)
SIZE = 3000


def chat_body(image: int, **more: Any) -> dict[str, Any]:
    """A chat with an image of so many bytes."""
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * image}}
    question = {"type": "text", "text": "what is it"}
    messages = [{"role": "user", "content": [picture, question]}]
    return {"model": "m", "messages": messages, "max_tokens": 8, "stream": True, **more}


@contextlib.asynccontextmanager
async def begun(server: RunningProxy, asked: Any, path: str = CHAT, events: int = 3) -> AsyncIterator[httpx.Response]:
    """A stream of which so many events are here. ``asked``: the arguments of httpx."""
    async with asyncio.timeout(SOON), server.client.stream("POST", path, **asked) as answer:
        read, pieces = b"", answer.aiter_raw()  # kept: a connection whose reader goes is closed
        while read.count(b"\n\n") < events and answer.status_code == 200:
            read += await anext(pieces)
        for node in (server.prefill, server.decode):
            node.seen.clear()
        yield answer


async def held(server: RunningProxy) -> int:
    """Bytes that count now."""
    page = (await server.operator.get("/metrics")).text
    return int(float(page.partition("\npdproxy_body_bytes ")[2].split()[0]))


@pytest.fixture
def no_journal(monkeypatch: pytest.MonkeyPatch) -> None:
    """No node writes journals."""
    monkeypatch.setattr(FakeNode, "can_resume", False)


@pytest.mark.usefixtures("no_journal")
async def test_streams_of_large_images_leave_room_for_others_once_they_have_begun() -> None:
    async with running_proxy(Settings()) as server, contextlib.AsyncExitStack() as streams:
        server.decode.fault = HELD_OPEN
        body = {"content": json.dumps(chat_body(IMAGE)), "headers": {"content-type": "application/json"}}
        for _ in range(MANY):
            answer = await streams.enter_async_context(begun(server, body))
            assert answer.status_code == 200
        assert server.decode.running >= MANY
        await server.until("pdproxy_body_bytes 0.0")
        assert 'pdproxy_rejected_total{reason="bodies_full"} 0.0' in (await server.operator.get("/metrics")).text


TEXT = chat_body(0) | {"messages": [{"role": "user", "content": "x" * SIZE}]}
STREAMS: dict[str, tuple[Policy, dict[str, Any], bool, bool]] = {
    "image": (Policy(), chat_body(SIZE), False, True),
    "several choices": (Policy(), chat_body(0, n=2, user="x" * SIZE), False, True),
    "text": (Policy(), TEXT, False, True),
    "text that may move": (Policy(), TEXT, True, False),
    "image that may move": (Policy(), chat_body(SIZE), True, False),
    "text, and no migration": (Policy(migrations=0), TEXT, True, True),
}
"""For each: the policy, the body, whether nodes write journals, and whether nothing of it counts once it has begun."""


@pytest.mark.parametrize("name", STREAMS)
async def test_a_stream_counts_while_it_may_move(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, body, resumes, gone = STREAMS[name]
    monkeypatch.setattr(FakeNode, "can_resume", resumes)
    async with running_proxy(Settings(limits=SMALL, policy=policy)) as server:
        server.decode.fault = InjectedFault(FaultKind.STALL, at=4)
        async with begun(server, {"json": body}, events=4):
            if gone:
                await server.until("pdproxy_body_bytes 0.0")
            else:
                assert await held(server) > SIZE
        await server.until("pdproxy_body_bytes 0.0")


async def test_a_stream_counts_until_something_was_generated() -> None:
    """Until then any node can be asked anew."""
    async with running_proxy(Settings(limits=SMALL)) as server:
        server.decode.fault = InjectedFault(FaultKind.STALL, at=1)
        async with begun(server, {"json": chat_body(SIZE)}, events=1):
            await asyncio.sleep(0.2)
            assert await held(server) > SIZE


async def test_a_stream_with_a_journal_counts_until_it_ends() -> None:
    async with running_proxy(Settings(limits=SMALL)) as server:
        server.decode.fault = HELD_OPEN
        async with begun(server, {"json": chat_body(SIZE)}):
            once = await held(server)
            assert SIZE < once < SIZE + 500
        await server.until("pdproxy_body_bytes 0.0")


@pytest.mark.usefixtures("no_journal")
async def test_several_prompts_count_until_the_last_of_them_needs_none() -> None:
    body = {"model": "m", "prompt": ["x" * SIZE, "y"], "max_tokens": 8, "stream": True}
    async with running_proxy(Settings(limits=SMALL)) as server:
        server.decode.fault = InjectedFault(FaultKind.STALL, at=3, times=2)
        async with begun(server, {"json": body}, "/v1/completions", events=4):
            await server.until("pdproxy_body_bytes 0.0")
    async with running_proxy(Settings(limits=SMALL)) as server:
        server.decode.fault = InjectedFault(FaultKind.HANG, times=1)  # one prompt has no answer yet
        async with begun(server, {"json": body}, "/v1/completions", events=2):
            assert await held(server) > SIZE


async def test_a_forwarded_body_counts_until_its_answer_begins() -> None:
    async with running_proxy(Settings(limits=SMALL)) as server:
        pieces = tuple(f'data: {{"text":"{number}"}}\n\n'.encode() for number in range(3))
        server.decode.forwarded[AUDIO] = Script(200, EVENTS, pieces, FaultKind.STALL)
        form = {"data": {"model": "m"}, "files": {"file": b"x" * SIZE}}
        async with begun(server, form, AUDIO):
            await server.until("pdproxy_body_bytes 0.0")
