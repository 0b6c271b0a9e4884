"""Real engines, shared by all end-to-end tests of a run: a prefill node, a decode node, the proxy, a single engine.

`reference` is one plain engine without a connector: the expected answers. All nodes that the selected tests need start
together, on first use: a running engine slows the start of others down.
"""

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

import pytest
from openai import AsyncOpenAI, DefaultAsyncHttpxClient, DefaultHttpxClient, OpenAI

from deploy.local.node import Node, NodeSpec, Role
from deploy.local.paths import MODEL
from deploy.local.stack import Proxy, ProxySpec, logs_of, pair_specs, start_nodes, start_proxy
from deploy.local.supervise import Supervisor
from tests.e2e.fleet import Fleet
from tests.e2e.forked_parts import forked_nodes
from tests.e2e.metrics_reader import watch

REQUEST_TIMEOUT_S = 120.0
PAIR = frozenset({"pair", "proxy", "client", "sync_client"})
REFERENCE = frozenset({"reference", "reference_client"})


@dataclass(frozen=True)
class Pair:
    """One prefill node and one decode node."""

    prefill: Node
    decode: Node


def specs_for(fixtures: set[str]) -> list[NodeSpec]:
    """The nodes that tests with these fixtures need."""
    pair = pair_specs() if fixtures & PAIR else []
    return pair + ([NodeSpec("reference", Role.PLAIN, 0, 0)] if fixtures & REFERENCE else [])


@pytest.fixture(scope="session", autouse=True)
def one_import() -> Iterator[None]:
    """Import vLLM once for most nodes of a run."""
    with forked_nodes():
        yield


@pytest.fixture(scope="session")
def engine_room() -> Iterator[Supervisor]:
    """Holds every process that tests share. Logs: `.run/e2e`."""
    with Supervisor(logs_of("e2e")) as supervisor:
        yield supervisor


@pytest.fixture(scope="session")
def engines(request: pytest.FixtureRequest, engine_room: Supervisor) -> dict[str, Node]:
    """All nodes that this run's tests need, by name; started together."""
    assert (MODEL / "config.json").exists(), f"there is no model in {MODEL}"
    asked = {name for item in request.session.items if isinstance(item, pytest.Function) for name in item.fixturenames}
    return {node.spec.name: node for node in start_nodes(engine_room, specs_for(asked), print)}


@pytest.fixture(scope="session")
def pair(engines: dict[str, Node]) -> Pair:
    """The shared prefill and decode nodes."""
    return Pair(engines["prefill"], engines["decode"])


@pytest.fixture
def whole(fleet: Fleet) -> Fleet:
    """The file's own fleet, with every node serving."""
    fleet.heal()
    return fleet


@pytest.fixture(scope="session")
def reference(engines: dict[str, Node]) -> Node:
    """A single plain engine."""
    return engines["reference"]


@pytest.fixture(scope="session")
def proxy(engine_room: Supervisor, pair: Pair) -> Proxy:
    """The proxy in front of the pair. It hands every prompt over, also those that the decode node could resume by
    itself (`test_cache_routing` covers these)."""
    spec = ProxySpec(more_environment={"PDPROXY_POLICY_ITL_BUDGET": "0"})
    return start_proxy(engine_room, spec, [pair.prefill, pair.decode], print)


@pytest.fixture(autouse=True)
def all_still_alive(engine_room: Supervisor) -> Iterator[None]:
    """Check after each test that no shared process has ended. The failing test shows the last lines of its log."""
    yield
    engine_room.require_all_alive()


@pytest.fixture(autouse=True)
def no_prompt_gets_anothers_ticket(request: pytest.FixtureRequest) -> Iterator[None]:
    """Check after each test, for requests through our own proxy, that no ticket had another prompt's digest."""
    if "proxy" not in request.fixturenames:
        yield
        return
    pair: Pair = request.getfixturevalue("pair")
    mismatches = watch(pair.decode.url, "refused", reason="digest")
    yield
    assert mismatches.grown() == 0


def async_client(url: str) -> AsyncOpenAI:
    http = DefaultAsyncHttpxClient(trust_env=False, timeout=REQUEST_TIMEOUT_S)
    return AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=REQUEST_TIMEOUT_S, max_retries=0, http_client=http)


@pytest.fixture
async def client(proxy: Proxy) -> AsyncIterator[AsyncOpenAI]:
    """The official client, pointed at the proxy."""
    async with async_client(proxy.url) as pointed:
        yield pointed


@pytest.fixture
async def reference_client(reference: Node) -> AsyncIterator[AsyncOpenAI]:
    """The official client, pointed at the single engine."""
    async with async_client(reference.url) as pointed:
        yield pointed


@pytest.fixture
def sync_client(proxy: Proxy) -> Iterator[OpenAI]:
    """The official blocking client, pointed at the proxy."""
    http = DefaultHttpxClient(trust_env=False, timeout=REQUEST_TIMEOUT_S)
    with OpenAI(
        base_url=f"{proxy.url}/v1", api_key="none", timeout=REQUEST_TIMEOUT_S, max_retries=0, http_client=http
    ) as pointed:
        yield pointed
