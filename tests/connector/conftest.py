"""Fixtures: a worker rank without an engine, and the prefill node that it asks. Nothing is imported without vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from connector.worker import ConnectorWorker
    from tests.connector.api_server import ApiServer
    from tests.connector.worker import MakeRank, Prefill


@pytest.fixture(scope="module", params=["in step", "one behind", "one behind, V2"])
def every_pace(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that uses this runs as a CPU node steps, and with vLLM's async scheduler, as GPU nodes do."""
    from tests.connector.harness import PACES, at_pace

    with at_pace(PACES[request.param]):
        yield


@pytest.fixture(scope="session")
def plain_server() -> Iterator[ApiServer]:
    """vLLM's API server without parsers."""
    from tests.connector.api_server import api_server

    with api_server() as server:
        yield server


@pytest.fixture(scope="session")
def parsing_server() -> Iterator[ApiServer]:
    """With parsers for reasoning and tools."""
    from tests.connector.api_server import api_server, register_parsers

    register_parsers()
    tools = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    with api_server("--reasoning-parser", "pad", *tools) as server:
        yield server


@pytest.fixture
def prefill() -> Iterator[Prefill]:
    from tests.connector.worker import Prefill

    prefill = Prefill()
    yield prefill
    prefill.listener.stop()


@pytest.fixture
def new_node() -> Iterator[Prefill]:
    """A prefill node that the rank has made no handshake with."""
    from tests.connector.worker import NEW, Prefill

    node = Prefill(NEW)
    yield node
    node.listener.stop()


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeRank]:
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker import NixlBaseConnectorWorker, current_platform

    from connector.worker import ConnectorWorker
    from tests.connector.rank import cache_config, settings, vllm_config, vllm_state

    monkeypatch.setattr(current_platform, "set_device", lambda _: None, raising=False)
    monkeypatch.setattr(NixlBaseConnectorWorker, "__init__", lambda worker, *_: vllm_state(worker))
    made: list[ConnectorWorker] = []

    def build(**changes: Any) -> ConnectorWorker:
        made.append(ConnectorWorker(vllm_config(), "D", cache_config(), settings(**changes)))
        return made[-1]

    yield build
    for worker in made:
        worker._stalled.clear()
        worker._recving_transfers.clear()
        worker.shutdown()
