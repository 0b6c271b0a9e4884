"""A headless Chromium, and the operator's application on a port."""

import asyncio
import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator

import uvicorn

from pdproxy.admin.app import admin_app
from pdproxy.admin.context import AdminContext
from pdproxy.server.server import Server, bind

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
    """The operators' application on a free port; its address."""
    bound = bind("127.0.0.1", 0, "here")
    config = uvicorn.Config(admin_app(context), log_config=None, lifespan="off", ws="none", timeout_graceful_shutdown=1)
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
        process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe, start_new_session=True)
        try:
            async with asyncio.timeout(SECONDS):
                out, err = await process.communicate()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    return out.decode(), err.decode(errors="replace")
