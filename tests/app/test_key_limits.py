"""Limits of API keys in the running proxy, and refusals before a body is read."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx

from pdproxy.settings.model import Keys, Limits, Settings
from tests.app.running_proxy import SOON, RunningProxy, bearer, running_proxy
from tests.fakes.faults import FaultKind, InjectedFault

ASK: dict[str, Any] = {"model": "m", "prompt": "one two three four", "max_tokens": 4}
KEYS = """
sk-plain plain
sk-rated rated requests_per_minute=100 input_tokens_per_minute=400 output_tokens_per_minute=400
sk-single single concurrency=1
sk-open open open=1
"""
LARGE = 1 << 20


@contextlib.asynccontextmanager
async def limited_proxy(folder: Path, **limits: Any) -> AsyncIterator[RunningProxy]:
    path = folder / "keys"
    path.write_text(KEYS)
    async with running_proxy(Settings(keys=Keys(file=path), limits=Limits(**limits)), "sk-plain") as server:
        yield server


async def asked(server: RunningProxy, key: str, **more: Any) -> httpx.Response:
    return await server.client.post("/v1/completions", json={**ASK, **more}, headers=bearer(key))


@contextlib.asynccontextmanager
async def held(server: RunningProxy, key: str) -> AsyncIterator[None]:
    """A request of a key runs."""
    server.decode.fault = InjectedFault(FaultKind.STALL, at=2, times=1)
    body = {**ASK, "stream": True}
    async with asyncio.timeout(SOON), server.client.stream("POST", "/v1/completions", json=body, headers=bearer(key)):
        yield


HEAD = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


async def refused_from_its_head(server: RunningProxy, key: str, promised: int = LARGE, more: str = "") -> bytes:
    """The answer to a head alone, up to the end of the connection."""
    url = server.client.base_url
    reader, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(f"{HEAD}authorization: Bearer {key}\r\ncontent-length: {promised}\r\n{more}\r\n".encode())
    try:
        async with asyncio.timeout(SOON):
            return await reader.read()
    finally:
        writer.close()
        await writer.wait_closed()


async def test_a_key_with_rates_is_told_what_is_left_and_refused_when_it_is_used_up(tmp_path: Path) -> None:
    async with limited_proxy(tmp_path) as server:
        first = await asked(server, "sk-rated")
        assert first.status_code == 200
        assert first.headers["x-ratelimit-limit-requests"] == "100"
        assert first.headers["x-ratelimit-remaining-requests"] == "99"
        assert first.headers["x-ratelimit-limit-tokens"] == "400"
        used = first.json()["usage"]
        assert (await asked(server, "sk-rated", prompt="xxx " * 350)).status_code == 200
        refused = await asked(server, "sk-rated", prompt="xxx " * 350)
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        assert (await asked(server, "sk-plain")).status_code == 200, "another key has nothing to do with it"
        assert "x-ratelimit-limit-requests" not in (await asked(server, "sk-plain")).headers
        await server.until('pdproxy_key_rejected_total{key="rated",reason="input_rate"} 1.0')
        await server.until('pdproxy_key_requests_total{key="rated",outcome="rejected"} 1.0')
        await server.until('pdproxy_key_requests_total{key="plain",outcome="ok"} 2.0')
        tokens = 2 * used["completion_tokens"]
        await server.until(f'pdproxy_key_tokens_total{{key="plain",kind="completion"}} {float(tokens)}')
        assert "sk-" not in (await server.operator.get("/metrics")).text


async def test_a_key_runs_as_many_as_it_may_and_its_next_one_waits(tmp_path: Path) -> None:
    async with limited_proxy(tmp_path) as server:
        async with held(server, "sk-single"):
            waits = asyncio.create_task(asked(server, "sk-single"))
            await server.until('pdproxy_key_requests_queued{key="single"} 1.0')
            assert (await asked(server, "sk-plain")).status_code == 200
        assert (await asyncio.wait_for(waits, SOON)).status_code == 200


async def test_limits_change_while_the_proxy_runs(tmp_path: Path) -> None:
    async with limited_proxy(tmp_path) as server, held(server, "sk-open"):
        assert (await asked(server, "sk-open")).status_code == 429
        (tmp_path / "keys").write_text("sk-plain plain\nsk-open open open=2\n")
        await server.running.files.look()
        assert (await asked(server, "sk-open")).status_code == 200
        (tmp_path / "keys").write_text("sk-plain plain\nsk-open open open=none\n")
        await server.running.files.look()
        await server.until('pdproxy_file_unusable{setting="keys.file"} 1.0')
        assert (await asked(server, "sk-open")).status_code == 200


async def test_what_the_head_is_enough_to_refuse_is_refused_before_the_body_comes(tmp_path: Path) -> None:
    async with limited_proxy(tmp_path, concurrency=1, queue=1, body_bytes=2 * LARGE, held_bytes=2 * LARGE) as server:
        said = await refused_from_its_head(server, "sk-unknown")
        assert said.startswith(b"HTTP/1.1 401 ")
        assert b"\r\nconnection: close\r\n" in said
        assert b" 413 " in await refused_from_its_head(server, "sk-plain", 3 * LARGE)
        async with held(server, "sk-open"):
            said = await refused_from_its_head(server, "sk-open")
            assert b" 429 " in said
            assert b"key_limit" in said
            waits = asyncio.create_task(asked(server, "sk-plain"))
            await server.until("pdproxy_requests_queued 1.0")
            said = await refused_from_its_head(server, "sk-plain")
            assert b" 429 " in said
            assert b"queue_full" in said
            assert b"\r\nretry-after: " in said
            expects = await refused_from_its_head(server, "sk-plain", 100, "expect: 100-continue\r\n")
            assert expects.startswith(b"HTTP/1.1 429 "), "it is not told to go on"
        assert (await asyncio.wait_for(waits, SOON)).status_code == 200
        await server.until("pdproxy_body_bytes 0.0")


async def test_a_small_body_that_is_refused_leaves_its_connection_open(tmp_path: Path) -> None:
    async with limited_proxy(tmp_path) as server, held(server, "sk-open"):
        url = server.client.base_url
        reader, writer = await asyncio.open_connection(url.host, url.port)
        head = f"{HEAD}authorization: Bearer sk-open\r\ncontent-length: 5\r\n\r\n".encode()
        try:
            async with asyncio.timeout(SOON):
                for _ in range(2):
                    writer.write(head)
                    said = await reader.readuntil(b"\r\n\r\n")
                    assert said.startswith(b"HTTP/1.1 429 ")
                    assert b"connection: close" not in said
                    length = next(line for line in said.lower().split(b"\r\n") if line.startswith(b"content-length:"))
                    await reader.readexactly(int(length.partition(b":")[2]))
                    writer.write(b"12345")
        finally:
            writer.close()
            await writer.wait_closed()
