"""A headless Chromium, and the operator's application on a port."""

import asyncio
import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from websockets.asyncio.client import ClientConnection, connect

from pdproxy.admin.app import admin_app
from pdproxy.admin.context import AdminContext
from pdproxy.admin.guard import GuardedPort, RefusalLog
from pdproxy.server.server import Server, bind
from pdproxy.settings.model import Listen

CHROMIUM = shutil.which("chromium")
SECONDS = 300
"""Far more than a page needs on any machine."""
_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-dev-shm-usage"),
    *("--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-extensions", "--mute-audio", "--hide-scrollbars", "--enable-logging=stderr", "--lang=en"),
)


@contextlib.asynccontextmanager
async def served(context: AdminContext) -> AsyncIterator[str]:
    """The operators' port, on a free one; its address."""
    bound = bind("127.0.0.1", 0, "here")
    app = GuardedPort(admin_app(context), Listen(), RefusalLog(lambda _: None))
    config = uvicorn.Config(app, log_config=None, lifespan="off", ws="none", timeout_graceful_shutdown=1)
    port = Server(config, bound)
    serving = asyncio.create_task(port.serve(sockets=[bound]))
    try:
        yield f"http://{port.address}"
    finally:
        port.should_exit = True
        await serving


async def chromium(url: str, *flags: str) -> tuple[str, str]:
    """Look at a page for some seconds of its own time: what Chromium printed, and what it complained of.

    Raises:
        TimeoutError: it did not end; it is killed.
    """
    assert CHROMIUM is not None
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
        command = (CHROMIUM, *_FLAGS, f"--user-data-dir={profile}", "--virtual-time-budget=6000", *flags, url)
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *command, stdout=pipe, stderr=pipe, env=_files_in(profile), start_new_session=True
        )
        try:
            async with asyncio.timeout(SECONDS):
                out, err = await process.communicate()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    return out.decode(), err.decode(errors="replace")


def _files_in(profile: str) -> dict[str, str]:
    """Its environment: killed as it is, it would leave its temporary folders behind."""
    return {**os.environ, "TMPDIR": profile}


class Page:
    """A page in a running Chromium, asked over its DevTools protocol.

    Attributes:
        complaints: errors of its scripts, and what its Content-Security-Policy forbade.
    """

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self.complaints: list[str] = []

    async def call(self, method: str, **params: Any) -> Any:
        """A command of the protocol, and its result."""
        number = next(self._numbers)
        await self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            message = json.loads(await self._socket.recv())
            if message.get("id") == number:
                assert "error" not in message, message
                return message["result"]
            event, said = message.get("method"), json.dumps(message.get("params"))
            if event == "Runtime.exceptionThrown" or (event == "Log.entryAdded" and "Content Security Policy" in said):
                self.complaints.append(said)

    async def value(self, expression: str) -> Any:
        """The value of a JavaScript expression; of a promise, the value that it is kept with."""
        found = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    async def until(self, expression: str) -> None:
        """Wait until it is true."""
        while not await self.value(expression):  # noqa: ASYNC110 - the caller bounds it
            await asyncio.sleep(0.05)

    async def show(self, url: str) -> None:
        """Open an address."""
        for domain in ("Runtime", "Log"):
            await self.call(f"{domain}.enable")
        await self.call("Page.navigate", url=url)

    async def become_phone(self, width: int, height: int) -> None:
        """Show what a phone of this size shows, in CSS pixels."""
        size = {"width": width, "height": height, "deviceScaleFactor": 2, "mobile": True}
        await self.call("Emulation.setDeviceMetricsOverride", **size)


@contextlib.contextmanager
def running_chromium(*flags: str) -> Iterator[str]:
    """A Chromium that runs while inside; the address at which it is asked for pages."""
    assert CHROMIUM is not None
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
        command = (CHROMIUM, *_FLAGS, f"--user-data-dir={profile}", "--remote-debugging-port=0", *flags, "about:blank")
        quiet = subprocess.DEVNULL
        with subprocess.Popen(
            command, stdout=quiet, stderr=quiet, env=_files_in(profile), start_new_session=True
        ) as process:
            try:
                yield f"http://127.0.0.1:{_port(Path(profile) / 'DevToolsActivePort', process)}"
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)


def _port(said: Path, process: "subprocess.Popen[bytes]") -> str:
    """The port that Chromium writes into its profile once it listens."""
    late = time.monotonic() + SECONDS
    while not said.exists() or "\n" not in said.read_text():
        assert process.poll() is None, "Chromium ended"
        assert time.monotonic() < late, "Chromium does not listen"
        time.sleep(0.05)
    return said.read_text().splitlines()[0]


@contextlib.asynccontextmanager
async def new_page(chromium_url: str) -> AsyncIterator[Page]:
    """An empty page, within `SECONDS`; closed at the end."""
    async with asyncio.timeout(SECONDS), httpx.AsyncClient(base_url=chromium_url, trust_env=False) as client:
        made = (await client.put("/json/new?about:blank")).raise_for_status().json()
        async with connect(made["webSocketDebuggerUrl"], max_size=None, proxy=None) as socket:
            page = Page(socket)
            yield page
        await client.get(f"/json/close/{made['id']}")
