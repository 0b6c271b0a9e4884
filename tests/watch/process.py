"""The proxy as a process of its own, on free ports."""

import asyncio
import contextlib
import dataclasses
import os
import re
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
SOON = 60.0
"""Seconds that nothing here should need; a bound on a hang, not a measure."""


@dataclasses.dataclass(slots=True)
class Process:
    """A running proxy: where clients and operators find it, and what it has logged."""

    clients: str
    operators: str
    log: list[str]
    pid: int


@contextlib.asynccontextmanager
async def serving(folder: Path, settings: Mapping[str, Any]) -> AsyncIterator[Process]:
    """``pdproxy serve`` until the block ends, which it must survive; then SIGTERM, and it must end well."""
    file = folder / "pdproxy.yaml"
    file.write_text(yaml.safe_dump({"listen": {"port": 0, "admin_port": 0}, **settings}))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PDPROXY_")}
    line = (sys.executable, "-m", "pdproxy", "serve", "--config", str(file))
    process = await asyncio.create_subprocess_exec(*line, cwd=ROOT, env=environment, stderr=asyncio.subprocess.PIPE)
    assert process.stderr is not None
    log: list[str] = []
    reading = asyncio.create_task(_read(process.stderr, log))
    try:
        yield Process(*await _addresses(log, reading), log, process.pid)
        assert process.returncode is None, "\n".join(log)
        process.terminate()
        async with asyncio.timeout(SOON):
            assert await process.wait() == 0, "\n".join(log)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        await reading


async def _read(stream: asyncio.StreamReader, log: list[str]) -> None:
    while line := await stream.readline():
        log.append(line.decode().rstrip())


async def _addresses(log: Sequence[str], reading: asyncio.Task[None]) -> tuple[str, str]:
    async with asyncio.timeout(SOON):
        while not reading.done():
            found = re.search(r"clients: ([^\s,]+), operators: ([^\s\",]+)", "\n".join(log))
            if found:
                return f"http://{found[1]}", f"http://{found[2]}"
            await asyncio.sleep(0.02)
    raise AssertionError("\n".join(log))
