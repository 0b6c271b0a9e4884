"""An API server, and a source that watches it."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.nodes.discovery.apiserver import ApiServer
from tests.nodes.discovery.watching import Lists, NoWaitClock, watching


@pytest.fixture
async def server() -> AsyncIterator[ApiServer]:
    async with ApiServer() as made:
        yield made


@pytest.fixture
def clock() -> NoWaitClock:
    return NoWaitClock()


@pytest.fixture
def token(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text("token\n")
    return path


@pytest.fixture
async def lists(server: ApiServer, clock: NoWaitClock, token: Path) -> AsyncIterator[Lists]:
    async with watching(server, clock, token) as made:
        yield made
