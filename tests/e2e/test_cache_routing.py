"""Six-turn conversations on real nodes: the policies `cache` and `least-loaded`, by turns, before the same nodes.

A turn is *remote* if a prefill node computes it. The short test runs on the shared nodes and checks remote turns and
answers. The long ones print tables: with one decode node, with two, and with two of which one is killed.
"""

import asyncio
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pytest

from deploy.local.model.quiz import quiz
from deploy.local.node import Node, NodeSpec, Role
from deploy.local.stack import Proxy, logs_of, start_nodes
from deploy.local.supervise import Supervisor
from pdproxy.settings.types import Routing
from tests.e2e.asking import Way
from tests.e2e.conftest import Pair
from tests.e2e.conversation_policies import TURNS, Asked, Load, compare, proxies_of, ratios, tell
from tests.e2e.conversations import Turn, hold_all, wrong
from tests.e2e.metrics_reader import read
from tests.e2e.process_faults import ProcessFault, strike
from tests.e2e.proxy_log import log_when

pytestmark = pytest.mark.e2e

REMOTE_AT_MOST, FIRST_TOKEN_AT_MOST = 0.3, 0.8
"""Upper bounds, as multiples of the figures of `least-loaded`."""
LOADS = (
    Load(650, 1, 24),
    Load(1500, 1, 24),
    Load(2140, 1, 16),
    Load(650, 4, 8),
    Load(1500, 4, 8),
    Load(1500, 1, 16, Way.COMPLETION_STREAM),
)
KINDS = ("planned", "real")
HITS_WITHIN = 0.02
STAYS_AT_LEAST = 0.8
"""The least share of turns after the first that go to the decode node of the turn before."""
own_nodes = [pytest.mark.own_engines, pytest.mark.long, pytest.mark.timeout(1800)]


@dataclass(frozen=True)
class Trio:
    """A prefill node and two decode nodes."""

    prefill: Node
    decodes: tuple[Node, Node]


@pytest.fixture(scope="module")
def trio() -> Iterator[Trio]:
    """Logs: `.run/e2e-hybrid-nodes`."""
    roles = {"prefill": Role.PREFILL, "decode-0": Role.DECODE, "decode-1": Role.DECODE}
    with Supervisor(logs_of("e2e-hybrid-nodes")) as supervisor:
        prefill, *decodes = start_nodes(supervisor, [NodeSpec(name, role, 0, 0) for name, role in roles.items()], print)
        yield Trio(prefill, (decodes[0], decodes[1]))


@pytest.fixture(scope="module")
def one_decode(trio: Trio) -> Iterator[dict[Routing, Proxy]]:
    with proxies_of("e2e-hybrid-1", [trio.prefill, trio.decodes[0]]) as proxies:
        yield proxies


@pytest.fixture(scope="module")
def two_decodes(trio: Trio) -> Iterator[dict[Routing, Proxy]]:
    with proxies_of("e2e-hybrid-2", [trio.prefill, *trio.decodes]) as proxies:
        yield proxies


def require_planned_hits(proxy: Proxy) -> None:
    """The tokens that plans expected to be cached were cached, for nothing is evicted here."""
    for role in ("prefill", "decode"):
        planned, real = (read(proxy.admin_url, f"pdproxy_{kind}_hit_tokens_total", role=role) for kind in KINDS)
        print(f"hits on {role} nodes so far: {planned:g} tokens planned, {real:g} real")
        assert planned == pytest.approx(real, rel=HITS_WITHIN)


def require_right(asked: Asked, engine: Node) -> None:
    found = wrong([turn for turns in asked.values() for turn in turns], engine)
    assert not found, "\n".join(found)


@pytest.fixture(scope="module")
def shared(pair: Pair) -> Iterator[dict[Routing, Proxy]]:
    with proxies_of("e2e-hybrid", [pair.prefill, pair.decode]) as proxies:
        yield proxies


@pytest.mark.parametrize("way", [Way.CHAT_STREAM, Way.COMPLETION_STREAM])
async def test_later_turns_are_not_handed_over(pair: Pair, shared: dict[Routing, Proxy], way: Way) -> None:
    load, seed = Load(1500, 1, 8, way), 90_000 + 1000 * list(Way).index(way)
    await compare(shared, seed + 500, replace(load, rounds=1))  # warms up
    asked = await compare(shared, seed, load)
    tell(str(load), asked)
    require_right(asked, pair.prefill)
    require_planned_hits(shared[Routing.CACHE])
    assert ratios(asked)[0] <= REMOTE_AT_MOST


class TestManyConversations:
    """The order of these tests matters: the last one leaves a decode node dead."""

    pytestmark = own_nodes

    @pytest.mark.parametrize("load", LOADS, ids=str)
    async def test_one_decode_node(self, trio: Trio, one_decode: dict[Routing, Proxy], load: Load) -> None:
        seed = 1_000_000 * (1 + LOADS.index(load))
        await compare(one_decode, seed + 500_000, replace(load, rounds=2))  # warms up
        asked = await compare(one_decode, seed, load)
        tell(f"1 decode node, {load}", asked)
        require_right(asked, trio.prefill)
        require_planned_hits(one_decode[Routing.CACHE])
        remote, first_token = ratios(asked)
        assert remote <= REMOTE_AT_MOST
        assert first_token <= FIRST_TOKEN_AT_MOST

    @pytest.mark.parametrize("at_once", [1, 4])
    async def test_two_decode_nodes(self, trio: Trio, two_decodes: dict[Routing, Proxy], at_once: int) -> None:
        load = Load(1500, at_once, 24 // at_once)
        asked = await compare(two_decodes, 700_000 + 1000 * at_once, load)
        tell(f"2 decode nodes, {load}", asked)
        nodes = decode_nodes(two_decodes[Routing.CACHE], asked[Routing.CACHE])
        stayed, moved = stays(nodes)
        print(
            f"2 decode nodes, {at_once} at once: turns {dict(Counter(nodes.values()))}, stayed {stayed}, moved {moved}"
        )
        require_right(asked, trio.prefill)
        remote, first_token = ratios(asked)
        assert remote <= REMOTE_AT_MOST
        assert first_token <= FIRST_TOKEN_AT_MOST
        assert stayed >= STAYS_AT_LEAST * (stayed + moved)
        assert len(set(nodes.values())) == 2

    async def test_conversations_outlive_their_decode_node(self, trio: Trio, two_decodes: dict[Routing, Proxy]) -> None:
        proxy = two_decodes[Routing.CACHE]
        talks = {f"outlive-{seed}": quiz(seed, 1500) for seed in range(800_000, 800_012)}
        turns = await hold_all(proxy, talks, TURNS[:3], 4, Way.CHAT_STREAM)
        going_on = asyncio.create_task(hold_all(proxy, talks, TURNS[3:], 4, Way.CHAT_STREAM))
        await asyncio.sleep(0.1)
        await asyncio.to_thread(strike, trio.decodes[1].part, ProcessFault.KILLED)
        assert not going_on.done()
        turns += await going_on
        nodes = decode_nodes(proxy, turns)
        had = {name for name in talks if nodes[f"{name}-3"] == "decode-1"}
        print(f"\nof {len(talks)} conversations {len(had)} had their state on the killed node; ", end="")
        print(f"{sum(turn.remote for turn in turns[len(talks) * 3 :])} of {len(talks) * 3} later turns remote")
        assert 0 < len(had) < len(talks)
        assert len(turns) == len(talks) * len(TURNS)
        assert not wrong(turns, trio.prefill)


def decode_nodes(proxy: Proxy, turns: Sequence[Turn]) -> dict[str, str]:
    """The decode node of each turn, by the turn's name, from the proxy's log."""
    names = [turn.name for turn in turns]
    found = logged_nodes(log_when(proxy.part.log, lambda text: logged_nodes(text).keys() >= set(names)))
    return {name: found[name] for name in names}


def logged_nodes(log: str) -> dict[str, str]:
    """The decode node of each request, by the request's id."""
    found = {}
    for line in log.splitlines():
        facts = dict(fact.split("=", 1) for fact in line.split() if "=" in fact)
        if "decode_node" in facts:
            found[facts["request_id"]] = facts["decode_node"]
    return found


def stays(nodes: dict[str, str]) -> tuple[int, int]:
    """How many turns after the first went to the decode node of the turn before, and how many elsewhere."""
    moves = Counter[bool]()
    for _, turns in itertools.groupby(sorted(nodes), key=lambda name: name.rpartition("-")[0]):
        moves.update(nodes[before] == nodes[after] for before, after in itertools.pairwise(turns))
    return moves[True], moves[False]
