"""A whole process whose standard error is not read, broken or closed, and what Python itself writes there."""

import asyncio
import contextlib
import fcntl
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from deploy.local.ports import free_ports
from tests.app.running_proxy import SOON, plain_client

ROOT = Path(__file__).parents[2]
REQUESTS = 60
"""Their lines fill a small pipe several times."""


UNREAD, CLOSED = "exec {command}", "exec {command} 2>&-"


@contextlib.contextmanager
def served(shell: str, *, broken: bool) -> Iterator[str]:
    """A proxy without nodes, whose standard error is a small pipe that nobody reads; its address."""
    read, write = os.pipe()
    fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, select.PIPE_BUF)
    if broken:
        os.close(read)
    port, admin = free_ports(2)
    command = f"{sys.executable} -m pdproxy serve --port {port} --admin-port {admin}"
    with subprocess.Popen(["/bin/sh", "-c", shell.format(command=command)], cwd=ROOT, stderr=write) as process:
        os.close(write)
        try:
            yield f"http://127.0.0.1:{port}"
            process.send_signal(signal.SIGTERM)
            assert process.wait(SOON) == 0
        finally:
            process.kill()
            if not broken:
                os.close(read)


async def until_answering(url: str) -> None:
    async with plain_client(url) as client:
        await until_listening(client)


async def until_listening(client: httpx.AsyncClient) -> None:
    async with asyncio.timeout(SOON):
        while True:
            with contextlib.suppress(httpx.ConnectError):
                await client.get("/health")
                return
            await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    ("shell", "broken"),
    [
        (UNREAD, False),
        pytest.param(UNREAD, True, marks=pytest.mark.long),
        pytest.param(CLOSED, False, marks=pytest.mark.long),
    ],
    ids=["unread", "broken", "closed"],
)
async def test_it_serves_and_ends_whatever_becomes_of_its_log(shell: str, *, broken: bool) -> None:
    with served(shell, broken=broken) as url:
        async with plain_client(url) as client:
            await until_listening(client)
            for _ in range(REQUESTS):
                answer = await client.post("/v1/completions", json={"model": "m" * 190, "prompt": "one"})
                assert answer.status_code == 503


CRASH = """
import sys, threading, warnings
from pdproxy.observe.logs import configure_process
from pdproxy.settings.model import Log
configure_process(Log())
class Finalized:
    def __del__(self):
        raise ValueError("in a finalizer")
warnings.warn("an old\\nway")
Finalized()
thread = threading.Thread(target=lambda: 1 / 0)
thread.start()
thread.join()
raise KeyError("the last\\nlevel=info words")
"""


def test_what_python_writes_to_standard_error_is_lines_too_and_the_last_ones_come_out() -> None:
    done = subprocess.run([sys.executable, "-c", CRASH], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    wanted = ["UserWarning: an old", "ValueError: in a finalizer", "ZeroDivisionError", "KeyError: 'the last"]
    assert [each in line for each, line in zip(wanted, lines, strict=True)] == [True] * len(wanted), done.stderr
    assert all(line.startswith("time=") for line in lines)


@pytest.mark.parametrize(("words", "said"), [([], True), (["--decode", "http://127.0.0.1:9"], False)])
def test_serving_without_nodes_says_so_and_what_to_do(words: list[str], *, said: bool) -> None:
    port, admin = free_ports(2)
    command = [sys.executable, "-m", "pdproxy", "serve", "--port", str(port), "--admin-port", str(admin), *words]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        try:
            asyncio.run(until_answering(f"http://127.0.0.1:{port}"))
            process.send_signal(signal.SIGTERM)
            _, log = process.communicate(timeout=SOON)
        finally:
            process.kill()
    assert process.returncode == 0
    found = [line for line in log.splitlines() if "there are no nodes" in line]
    assert bool(found) is said
    assert all("--decode URL" in line and f"POST /nodes at 127.0.0.1:{admin}" in line for line in found)
