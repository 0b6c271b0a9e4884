"""Two workers and their supervisor, as whole processes, in front of fake nodes in a thread. One start serves all tests.

Their order matters: one ends a worker, the last one the proxy.
"""

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from pdproxy.server.server import bind
from tests.admin.attack import got_through, on_operators, send
from tests.app.running_proxy import SOON, plain_client
from tests.fakes.kv_transfer import FakeKvTransfer
from tests.fakes.loopback import LoopbackNode
from tests.fakes.node import FakeNode

ROOT = Path(__file__).parents[2]
COMPLETION = {"model": "m", "prompt": "one two", "max_tokens": 6}
PACE = 0.05
"""Seconds between two tokens: a stream lasts long enough for its worker to be killed."""


class NodesInThread:
    """A prefill and a decode node on an event loop of their own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        fabric = FakeKvTransfer()
        self.prefill = LoopbackNode(FakeNode("prefill", fabric))
        self.decode = LoopbackNode(FakeNode("decode", fabric), PACE)

    def __enter__(self) -> "NodesInThread":
        self._thread.start()
        for node in (self.prefill, self.decode):
            asyncio.run_coroutine_threadsafe(node.start(), self._loop).result(SOON)
        return self

    def __exit__(self, *exc: object) -> None:
        for node in (self.prefill, self.decode):
            asyncio.run_coroutine_threadsafe(node.kill(), self._loop).result(SOON)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(SOON)
        self._loop.close()


@dataclass
class Supervised:
    """The running proxy; ``clients``, ``operators``: addresses of its ports."""

    process: subprocess.Popen[str]
    clients: str
    operators: str
    log: list[str] = field(default_factory=list)

    def workers(self) -> list[int]:
        """The workers' process ids, by their numbers."""
        found: dict[int, int] = {}
        for pid in Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split():
            words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            if "pdproxy.app.worker" in words:
                found[int(words[words.index("pdproxy.app.worker") + 2])] = int(pid)
        return [found[number] for number in sorted(found)]

    async def get(self, path: str) -> httpx.Response:
        async with plain_client(self.operators) as client:
            return await client.get(path)

    async def value(self, series: str) -> float:
        """Of the merged metrics; 0 where there is no such series."""
        found = re.search(rf"^{re.escape(series)} (\S+)$", (await self.get("/metrics")).text, re.MULTILINE)
        return float(found[1]) if found else 0.0

    async def until_up(self, workers: int) -> None:
        """All nodes serve, in the eyes of so many workers that get connections."""
        async with asyncio.timeout(SOON):
            while True:
                nodes = (await self.get("/nodes")).json().get("nodes", [])
                alike = all(node["state"] == "up" and "differs" not in node for node in nodes[:2])
                if nodes and alike and await self.value("pdproxy_workers") == workers:
                    return
                await asyncio.sleep(0.05)


@pytest.fixture(scope="module")
def nodes() -> Iterator[NodesInThread]:
    with NodesInThread() as running:
        yield running


@pytest.fixture(scope="module")
def supervised(nodes: NodesInThread) -> Iterator[Supervised]:
    words = ["--workers", "2", "--port", "0", "--admin-port", "0", "--health-interval", "0.2"]
    addresses = ["--prefill", nodes.prefill.url, "--decode", nodes.decode.url, "--health-first-hand-over", "warm_up"]
    with started(*words, *addresses) as process:
        assert process.stderr is not None
        log: list[str] = []
        for line in process.stderr:
            log.append(line)
            if told := re.search(r"clients: (\S+), operators: (\S+), workers: 2", line):
                break
        else:
            raise AssertionError("".join(log))
        reader = threading.Thread(target=log.extend, args=(process.stderr,))
        reader.start()
        yield Supervised(process, f"http://{told[1]}", f"http://{told[2]}", log)
    reader.join(SOON)


@contextlib.contextmanager
def started(*words: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "pdproxy", "serve", *words]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(SOON)
                except subprocess.TimeoutExpired:
                    process.kill()


@pytest.fixture
async def proxy(supervised: Supervised) -> Supervised:
    await supervised.until_up(2)
    return supervised


async def complete(proxy: Supervised) -> int:
    """One request on a connection of its own; its status."""
    async with plain_client(proxy.clients) as client:
        return (await client.post("/v1/completions", json=COMPLETION)).status_code


class Stream:
    """A streamed request on a connection of its own."""

    def __init__(self, proxy: Supervised) -> None:
        self.began = asyncio.Event()
        self.task = asyncio.create_task(self._read(proxy))

    async def _read(self, proxy: Supervised) -> bool:
        """Whether it came as a whole."""
        body, received = {**COMPLETION, "max_tokens": 40, "stream": True}, ""
        try:
            async with (
                plain_client(proxy.clients) as client,
                client.stream("POST", "/v1/completions", json=body) as response,
            ):
                async for piece in response.aiter_text():
                    received += piece
                    self.began.set()
        except httpx.TransportError:
            return False
        finally:
            self.began.set()
        return received.endswith("data: [DONE]\n\n") and '"error"' not in received


async def streams(proxy: Supervised, number: int) -> list[Stream]:
    """So many streams, all of which have begun."""
    made = [Stream(proxy) for _ in range(number)]
    async with asyncio.timeout(SOON):
        await asyncio.gather(*(stream.began.wait() for stream in made))
    return made


async def test_connections_are_split_evenly_and_metrics_are_those_of_all(proxy: Supervised) -> None:
    given = [f'pdproxy_worker_connections_total{{worker="{number}"}}' for number in (0, 1)]
    before = [await proxy.value(each) for each in given]
    assert await asyncio.gather(*(complete(proxy) for _ in range(20))) == [200] * 20
    assert [await proxy.value(each) - old for each, old in zip(given, before, strict=True)] == [10, 10]
    assert await proxy.value('pdproxy_requests_total{endpoint="/v1/completions",model="other",outcome="ok"}') == 20
    assert await proxy.value('pdproxy_phase_seconds_count{phase="decode"}') == 20


async def test_metrics_of_one_worker_are_not_shown(proxy: Supervised) -> None:
    async with plain_client(proxy.clients) as client:
        assert (await client.get("/metrics")).json()["error"]["code"] == "metrics_elsewhere"
        assert (await client.get("/ready")).json() == {"status": "ready"}


async def test_no_attack_of_a_web_page_gets_through(proxy: Supervised) -> None:
    """Each is refused by the supervisor, which counts it once; the workers hear of none."""
    attacks = list(on_operators(int(proxy.operators.rpartition(":")[2])))
    before = await proxy.value('pdproxy_operator_refusals_total{reason="unknown_host"}')
    assert [attack for attack in attacks if got_through(send(proxy.operators, attack))] == []
    after = await proxy.value('pdproxy_operator_refusals_total{reason="unknown_host"}')
    assert 0 < after - before <= len(attacks)
    assert [node["state"] for node in (await proxy.get("/nodes")).json()["nodes"]] == ["up", "up"]


async def test_the_page_and_its_state_are_at_one_address(proxy: Supervised) -> None:
    assert "</html>" in (await proxy.get("/ui")).text
    running = await streams(proxy, 4)
    shown: dict[str, Any] = (await proxy.get("/ui/state")).json()
    assert (shown["ready"], shown["on_the_way"], len(shown["requests"])) == ("ready", 4, 4)
    (decode,) = [node for node in (await proxy.get("/nodes")).json()["nodes"] if node["role"] == "decode"]
    assert decode["active"] == 4
    assert all([await stream.task for stream in running])


async def test_a_drain_reaches_all_workers(proxy: Supervised) -> None:
    async with plain_client(proxy.operators) as client:
        drained = await client.post("/nodes/decode-0/drain?seconds=5")
        assert (drained.status_code, drained.json()["state"], "differs" in drained.json()) == (202, "draining", False)
        assert set(await asyncio.gather(*(complete(proxy) for _ in range(4)))) == {503}
        assert (await client.post("/nodes/decode-0/rejoin")).status_code == 202
    await proxy.until_up(2)
    assert set(await asyncio.gather(*(complete(proxy) for _ in range(4)))) == {200}


async def test_a_worker_that_dies_takes_its_own_streams_only_and_comes_back(proxy: Supervised) -> None:
    async with plain_client(proxy.operators) as client:
        added = {"url": "http://127.0.0.1:9", "role": "decode", "name": "extra"}
        assert (await client.post("/nodes", json=added)).status_code == 201
    counted = await proxy.value('pdproxy_phase_seconds_count{phase="decode"}')
    running = await streams(proxy, 8)
    os.kill(proxy.workers()[0], signal.SIGKILL)
    assert sorted([await stream.task for stream in running]) == [False] * 4 + [True] * 4
    assert set(await asyncio.gather(*(complete(proxy) for _ in range(4)))) == {200}
    await proxy.until_up(2)
    assert await proxy.value('pdproxy_worker_exits_total{worker="0"}') == 1
    assert await proxy.value('pdproxy_phase_seconds_count{phase="decode"}') >= counted + 8
    (extra,) = [node for node in (await proxy.get("/nodes")).json()["nodes"] if node["name"] == "extra"]
    assert "unknown_to" not in extra, "".join(proxy.log)
    assert set(await asyncio.gather(*(complete(proxy) for _ in range(4)))) == {200}
    assert any("worker 0 was killed by SIGKILL" in line for line in proxy.log)


async def test_a_shutdown_lets_the_streams_of_all_workers_end(proxy: Supervised) -> None:
    running = await streams(proxy, 4)
    proxy.process.terminate()
    assert all([await stream.task for stream in running])
    assert await asyncio.to_thread(proxy.process.wait, SOON) == 0
    assert [line for line in proxy.log if "Traceback" in line] == []


def test_what_no_worker_can_do_ends_the_start_with_one_message(tmp_path: Path) -> None:
    bad = tmp_path / "bad.pem"
    bad.write_text("no certificate")
    pair = ["--listen-tls-certificate", str(bad), "--listen-tls-key", str(bad)]
    with started("--workers", "2", "--port", "0", "--admin-port", "0", *pair) as process:
        _, said = process.communicate(timeout=SOON)
    assert process.returncode == 2
    assert said.startswith("pdproxy: listen.tls_certificate, listen.tls_key:")
    assert said.count("\n") == 1


def test_a_port_that_is_taken_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    from pdproxy.__main__ import main

    with bind("127.0.0.1", 0, "x") as taken:
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["serve", "--workers", "2", "--port", str(port)]) == 2
    assert f"listen.port: 127.0.0.1:{port} cannot be listened on" in capfd.readouterr().err


def test_workers_are_at_least_one(capsys: pytest.CaptureFixture[str]) -> None:
    from pdproxy.__main__ import main

    assert main(["serve", "--workers", "0"]) == 2
    assert "--listen-workers: listen.workers must be" in capsys.readouterr().err
