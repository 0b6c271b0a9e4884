"""The cached part of a request's prompt is looked up where that can pay, and counts as soon as it is routed."""

import asyncio
import dataclasses
import json
from typing import Any

import msgspec
import pytest

from deploy.bench.calls import Counted, counting
from pdproxy.background import Background
from pdproxy.errors import Fault
from pdproxy.events.places import scheme_of
from pdproxy.events.prefix_source import EXPECTED_SECONDS, EventPrefixSource
from pdproxy.events.prompt_hashes import HashFinder
from pdproxy.events.token_ids import TokenIds
from pdproxy.events.wire import NumberedBatch
from pdproxy.nodes.hashing import Hashing
from pdproxy.nodes.load import Work
from pdproxy.nodes.node import Binding, Capacity, Node, Role
from pdproxy.nodes.pool import Pool
from pdproxy.orchestration.text_prefix_source import TextPrefixSource
from pdproxy.planning.block_hashes import PromptExtras, PromptHasher
from pdproxy.planning.cost import covered_tokens
from pdproxy.planning.plan_types import Plan
from pdproxy.planning.prefix import Hit, HitSource, Place
from pdproxy.planning.turnover import REMEMBERED_SECONDS
from pdproxy.request import Endpoint, SubRequest
from tests.events.feeds import Caches
from tests.events.prompts import sub_request
from tests.events.publisher import stored
from tests.nodes.fake_pool import FakeNodeInfo, FakePoolTransport, settle

HASHING = Hashing("sha256_cbor", 4, 16, bytes(32))
IDS = tuple(range(40))
ATTENTION, STATE = 0, 1


def hashes(ids: tuple[int, ...] = IDS, salt: str | None = None) -> tuple[int, ...]:
    """As the nodes have them, one for each four ids."""
    scheme = scheme_of(HASHING)
    assert scheme is not None
    found = PromptHasher(scheme).hashes(ids, PromptExtras(salt=salt))
    assert found is not None
    return found


class World:
    """Two prefill nodes and a decode node, of a hybrid model, whose events are read."""

    def __init__(self, prefills: int = 2, ranks: int = 1) -> None:
        self.caches = Caches()
        self.pool = Pool(self.caches.clock)
        names = [f"p{at}" for at in range(prefills)]
        self.infos = {name: FakeNodeInfo(Role.PREFILL) for name in names} | {"d0": FakeNodeInfo(Role.DECODE)}
        for info in self.infos.values():
            info.paths["/tokenize"] = 200, json.dumps({"tokens": IDS}).encode()
        transport = FakePoolTransport(**self.infos)
        for name, info in self.infos.items():
            node = Node(name, f"http://{name}", (info.role,), "tiny", ("lora",), ranks=ranks, hashing=HASHING)
            self.pool.add(node)
            self.pool.bring_up(node)
        ids = TokenIds(transport, self.caches.clock, self.caches.metrics, 0.05)
        self.texts = TextPrefixSource(self.pool, self.caches.clock)
        finder = HashFinder(self.texts, ids, self.pool.load)
        self.background = Background(self.caches.clock)
        self.source = EventPrefixSource(
            self.pool, self.caches, finder, self.caches.clock, self.caches.metrics, self.background
        )
        self._sequence = dict.fromkeys(self.infos, 0)

    def tell(self, name: str, *events: dict[str, Any], rank: int = 0) -> None:
        """The node publishes a batch."""
        scheme = scheme_of(HASHING)
        assert scheme is not None
        payload = msgspec.msgpack.encode([1.0 + self._sequence[name], events, rank])
        self.caches.feed_of(Place(name, rank), rank, scheme).apply_next(NumberedBatch(self._sequence[name], payload))
        self._sequence[name] += 1

    def caches_prompt(self, name: str, salt: str | None = None) -> None:
        """The node has the two whole blocks of the prompt, and a state after the first."""
        first, second = hashes(salt=salt)[3], hashes(salt=salt)[7]
        self.tell(name, stored(first, second, group=ATTENTION), stored(first, group=STATE, kind="mamba"))

    def node(self, name: str) -> Node:
        return self.pool.view(name).node


def request(
    prompt: object = IDS, *, name: str = "r", model: str = "tiny", arrived: float = 0.0, **more: object
) -> SubRequest:
    body = {"model": model, "prompt": list(prompt) if isinstance(prompt, tuple) else prompt, **more}
    return sub_request(Endpoint.COMPLETIONS, body, name, arrived)


async def test_each_place_has_what_its_events_say() -> None:
    world = World()
    world.caches_prompt("p0")
    world.tell("d0", stored(hashes()[3], group=ATTENTION))
    found = await world.source.look_up(request())
    assert found is not None
    assert (found.tokens, found.source) == (40, HitSource.EVENTS)
    # One place that publishes of states shows that the model has them: the decode node has none.
    assert found.by_place() == {Place("p0"): Hit(32, 16), Place("d0"): Hit(16, 0)}


async def test_a_text_is_rendered_on_the_least_busy_prefill_node() -> None:
    world = World()
    world.caches_prompt("p0")
    with world.pool.acquire("p0"):
        found = await world.source.look_up(request("word " * 10))
    assert found is not None
    assert Place("p0") in found.by_place()
    assert {name: len(info.asked) for name, info in world.infos.items()} == {"p0": 0, "p1": 1, "d0": 0}


@pytest.mark.parametrize(
    ("prompt", "more"), [("short", {}), ((1, 2, 3), {}), (IDS, {"model": "lora"})], ids=["text", "ids", "an adapter"]
)
async def test_what_cannot_pay_is_not_looked_up(prompt: object, more: dict[str, Any]) -> None:
    world = World()
    world.caches_prompt("p0")
    assert await world.source.look_up(request(prompt, **more)) is None
    assert all(info.asked == [] for info in world.infos.values())


async def test_a_node_that_takes_longer_to_render_than_to_compute_is_not_asked() -> None:
    world = World()
    world.caches_prompt("p0")
    info = world.infos["p0"]
    info.held.clear()
    waiting = asyncio.create_task(world.source.look_up(request("slow " * 10)))
    await settle()
    world.caches.clock.advance(0.04)
    info.held.set()
    assert await waiting is not None
    assert await world.source.look_up(request("word " * 10)) is None, "12 tokens take 12 ms"
    for _ in range(50):
        world.pool.load.learn(Work.PREFILL, world.pool.view("p0").lightest, 100, 1.0)
    assert await world.source.look_up(request("word " * 10)) is not None


async def test_where_there_is_one_place_of_each_role_there_is_nothing_to_look_up() -> None:
    world = World(prefills=1)
    world.caches_prompt("p0")
    assert await world.source.look_up(request()) is None
    ranks = World(prefills=1, ranks=2)
    ranks.tell("p0", stored(hashes()[3]), rank=0)
    found = await ranks.source.look_up(request())
    assert found is not None
    assert found.by_place() == {Place("p0", 0): Hit(16, 16)}


async def test_without_events_nothing_is_known() -> None:
    world = World()
    assert await world.source.look_up(request("word " * 10)) is None
    assert all(info.asked == [] for info in world.infos.values())


async def test_without_ids_nothing_is_known() -> None:
    world = World()
    world.caches_prompt("p0")
    for info in world.infos.values():
        info.paths["/tokenize"] = Fault.HEADERS_TIMEOUT
    assert await world.source.look_up(request("word " * 10)) is None


async def test_a_salt_makes_another_prompt_of_it() -> None:
    world = World()
    world.caches_prompt("p0", salt="mine")
    plain, salted = await world.source.look_up(request()), await world.source.look_up(request(cache_salt="mine"))
    assert plain is not None
    assert salted is not None
    assert (plain.by_place(), salted.by_place()) == ({}, {Place("p0"): Hit(32, 16)})


async def test_what_was_routed_counts_at_once_and_not_for_ever() -> None:
    world = World()
    for name in world.infos:
        world.tell(name, stored(1, group=ATTENTION), stored(1, group=STATE, kind="mamba"))
    first = request()
    assert await world.source.look_up(first) is not None
    world.source.routed(first, Plan(world.node("p1"), world.node("d0")))
    found = await world.source.look_up(request(name="next"))
    assert found is not None
    assert found.by_place() == {Place("p1"): Hit(36, 36)}
    world.caches.clock.advance(EXPECTED_SECONDS)
    later = await world.source.look_up(request(name="later"))
    assert later is not None
    assert later.by_place() == {}


async def test_a_decode_node_that_computes_alone_keeps_a_state() -> None:
    world = World()
    for name in world.infos:
        world.tell(name, stored(1, group=ATTENTION), stored(1, group=STATE, kind="mamba"))
    asked = request()
    assert await world.source.look_up(asked) is not None
    world.source.routed(asked, Plan(None, world.node("d0")))
    found = await world.source.look_up(asked)
    assert found is not None
    assert found.by_place()[Place("d0")] == Hit(36, 36)


@pytest.mark.parametrize("unit", [0, 4])
async def test_a_decode_node_has_nothing_of_a_ticket_that_it_has_not_read(unit: int) -> None:
    """The place could be planned to compute another prompt from there at once, and would compute that one whole."""
    world = World()
    for name in world.infos:
        world.tell(name, stored(1, group=ATTENTION), stored(1, group=STATE, kind="mamba"))
    decode, asked = dataclasses.replace(world.node("d0"), prefix_match_unit=unit), request()
    assert await world.source.look_up(asked) is not None
    world.source.routed(asked, Plan(world.node("p1"), decode))
    found = await world.source.look_up(asked)
    assert found is not None
    assert Place("d0") not in found.by_place()


async def test_a_rank_that_vllm_chooses_is_not_guessed() -> None:
    world = World(ranks=2)
    for name in world.infos:
        world.tell(name, stored(1), rank=0)
    asked = request()
    assert await world.source.look_up(asked) is not None
    for plan in (Plan(world.node("p1"), world.node("d0")), Plan(None, world.node("d0"), decode_rank=0)):
        world.source.routed(asked, plan)
    found = await world.source.look_up(asked)
    assert found is not None
    assert set(found.by_place()) == {Place("d0", 0)}


async def test_a_prompt_that_was_not_looked_up_is_routed_without_a_trace() -> None:
    world = World()
    world.caches_prompt("p0")
    world.source.routed(request(), Plan(world.node("p1"), world.node("d0")))
    found = await world.source.look_up(request())
    assert found is not None
    assert set(found.by_place()) == {Place("p0")}


async def test_a_prefill_leg_computes_no_more_than_its_hand_over_covers_and_never_hits_its_last_token() -> None:
    """Seen with vLLM 0.32: of a prompt of 700 tokens, with a unit of 16, 688 are handed over, and 672 hit later."""
    world = World()
    for name in ("p0", "d0"):
        node = dataclasses.replace(world.node(name), prefix_match_unit=4)
        world.pool.bring_up(node)
        blocks = stored(hashes()[3], hashes()[7], hashes()[8], group=ATTENTION)
        world.tell(name, blocks, stored(hashes()[7], hashes()[8], group=STATE, kind="mamba"))
    found = await world.source.look_up(request())
    assert found is not None
    assert found.by_place() == {Place("p0"): Hit(32, 32), Place("d0"): Hit(36, 36)}


@pytest.mark.parametrize(
    ("tokens", "unit", "drops", "covered"),
    [
        (700, 16, False, 688),
        (689, 16, False, 688),
        (688, 16, False, 672),
        (700, 16, True, 672),
        (10, 16, False, 9),
        (700, 0, True, 699),
    ],
)
def test_a_hand_over_ends_at_a_boundary(tokens: int, unit: int, drops: bool, covered: int) -> None:
    hashing = dataclasses.replace(HASHING, drops_unit=drops)
    node = Node("p", "http://p", (Role.PREFILL,), prefix_match_unit=unit, hashing=hashing)
    assert covered_tokens(node, tokens) == covered


def test_a_prefill_leg_of_attention_alone_computes_the_whole_prompt() -> None:
    node = Node("p", "http://p", (Role.PREFILL,), capacity=Capacity(100, None, 1, Binding.ATTENTION))
    assert covered_tokens(node, 49) == 49


async def test_a_long_prompt_is_looked_up_like_a_short_one() -> None:
    world = World()
    ids = tuple(at % 1000 for at in range(5000))
    world.tell("p0", *(stored(each, group=ATTENTION) for each in hashes(ids)[3:403:4]))
    found = await world.source.look_up(request(ids))
    assert found is not None
    assert found.by_place() == {Place("p0"): Hit(1600, 1600)}


async def test_how_long_blocks_stay_is_told_by_what_a_place_stores() -> None:
    """A cache of 100 blocks that stores ten in a second, once: it remembers that for a minute."""
    world = World()
    capacity = Capacity(100 * HASHING.block_size, None, 1, Binding.ATTENTION)
    for name in world.infos:
        known = world.node(name)
        world.pool.bring_up(dataclasses.replace(known, capacity=capacity, block_size=HASHING.block_size))
    world.caches_prompt("p0")
    found = await world.source.look_up(request())
    assert found is not None
    assert found.stays == {}
    world.tell("p0", *(stored(number, group=ATTENTION) for number in range(1, 11)))
    world.caches.clock.advance(1.0)
    found = await world.source.look_up(request())
    assert found is not None
    assert found.stays == {Place("p0"): pytest.approx(100 * REMEMBERED_SECONDS / 10)}


async def test_a_look_up_takes_no_step_for_each_node_that_has_nothing() -> None:
    bytecodes = []
    for prefills in (2, 40):
        world = World(prefills)
        world.caches_prompt("p0")
        await world.source.look_up(request(IDS))  # works out which nodes there are
        with counting(counted := Counted()):
            await world.source.look_up(request(IDS))
        bytecodes.append(counted.bytecodes.total())
    assert bytecodes[0] == bytecodes[1]
