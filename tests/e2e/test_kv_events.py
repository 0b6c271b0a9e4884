"""The proxy's index of real nodes' caches, made from their KV events, agrees with the hits that the nodes count.

Conversations of random turns take turns on caches that overflow. One of two decode nodes is restarted halfway.
"""

import asyncio
import contextlib
import dataclasses
import functools
import random
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from deploy.local.model.quiz import Quiz, quiz, recite
from deploy.local.node import SERVED_NAME, Node, NodeSpec, Role, start_node
from deploy.local.stack import ProxySpec, await_nodes, logs_of, start_nodes, start_proxy
from deploy.local.supervise import Supervisor
from pdproxy.clock import SystemClock
from pdproxy.events.places import PlaceCaches, SchemeIndex
from pdproxy.events.subscriber import EventSubscriber
from pdproxy.events.token_ids import TokenIds, tokenize_body
from pdproxy.nodes.node import Node as ProxyNode
from pdproxy.nodes.node import Role as ProxyRole
from pdproxy.nodes.pool import Pool
from pdproxy.nodes.preflight import Preflight
from pdproxy.observe.labels import Known
from pdproxy.observe.metrics import Metrics
from pdproxy.planning.cost import covered_tokens
from pdproxy.planning.prefix import Hit, Place
from pdproxy.planning.renderings import HashesByScheme, Rendering
from pdproxy.planning.text_chain import chain_of_completion
from pdproxy.planning.text_index import TextIndex
from pdproxy.request import Endpoint
from pdproxy.transport.h1_client import H1Transport
from tests.e2e.conftest import REQUEST_TIMEOUT_S
from tests.e2e.legs import TO_HAND_OVER, Params, complete
from tests.e2e.metrics_reader import PATIENCE_S, read, watch
from tests.events.prompts import sub_request
from tests.planning.hits import by_place

pytestmark = [pytest.mark.e2e, pytest.mark.own_engines, pytest.mark.timeout(900)]

CONVERSATIONS = [24, pytest.param(48, marks=pytest.mark.long)]
AT_ONCE = 6
"""Conversations that take turns with each other."""
SHARED = 3
"""Lists that conversations begin with."""
DECODE_BLOCKS = 56
PREFILL_BLOCKS = 72
"""Blocks of 256 tokens: a long conversation takes up to eight, and as many states."""
QUIET_S = 0.06
"""Seconds without a batch after which a request's events are taken to be complete: a node sends them with its steps."""
ROLES = {"prefill": ProxyRole.PREFILL, "decode-0": ProxyRole.DECODE, "decode-1": ProxyRole.DECODE}


@dataclasses.dataclass(frozen=True)
class Fleet:
    """A prefill node and two decode nodes with small caches."""

    room: Supervisor
    nodes: dict[str, Node]


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    """Logs: `.run/e2e-events`."""
    specs = [NodeSpec("prefill", Role.PREFILL, 0, 0, gpu_blocks=PREFILL_BLOCKS)]
    specs += [NodeSpec(f"decode-{at}", Role.DECODE, 0, 0, gpu_blocks=DECODE_BLOCKS) for at in range(2)]
    with Supervisor(logs_of("e2e-events")) as supervisor:
        nodes = start_nodes(supervisor, specs, print)
        yield Fleet(supervisor, {node.spec.name: node for node in nodes})


class Observer:
    """Stands for the proxy: reads events, and knows how much of a prompt each place has cached."""

    def __init__(self) -> None:
        self.clock = SystemClock()
        self.registry = CollectorRegistry()
        self.metrics = Metrics(self.registry)
        self.transport = H1Transport(self.clock)
        self.pool = Pool(self.clock, metrics=self.metrics)
        self.caches = PlaceCaches(self.clock, self.metrics.events)
        self.ids = TokenIds(self.transport, self.clock, self.metrics.events, REQUEST_TIMEOUT_S)
        self.texts = TextIndex()
        self.subscriber = EventSubscriber(self.pool, self.transport, self.caches, self.clock, self.metrics.events)

    async def join(self, name: str, url: str) -> None:
        """Subscribe to a node, as after a health check."""
        configured = ProxyNode(name, url, (ROLES[name],))
        if name not in self.pool:
            self.pool.add(configured)
        self.pool.bring_up((await Preflight(self.transport).inspect(configured)).joined())

    def node(self, name: str) -> ProxyNode:
        return self.pool.view(name).node

    def known(self, name: str) -> Known:
        return next((feed.known for feed in self.caches.of_node(name)), Known.NOTHING)

    async def until_known(self, *names: str) -> None:
        """Wait until all of their cached blocks are known."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                if all(self.known(name) is Known.ALL for name in names):
                    return
                await asyncio.sleep(0.05)

    def count(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"pdproxy_{name}", labels) or 0.0

    async def quiet(self) -> None:
        """Wait until no more events come."""
        before: list[int] = []
        while True:
            now = [feed.last for name in ROLES for feed in self.caches.of_node(name)]
            if now == before:
                return
            before = now
            await asyncio.sleep(QUIET_S)

    async def tokens(self, prompt: str) -> list[int]:
        ids = await self.ids.fetch({"model": SERVED_NAME, "prompt": prompt}, self.node("prefill"))
        assert ids is not None
        return list(ids)

    def hashes(self, ids: list[int]) -> HashesByScheme:
        """The hashes of a prompt, by the scheme of all nodes."""
        scheme = self.scheme()
        hashes = scheme.hasher.hashes(ids)
        assert hashes is not None
        return {scheme.index.scheme: hashes}

    def hit(self, name: str, hashes: HashesByScheme, tokens: int) -> Hit:
        """How much a node has cached of a prompt's first tokens."""
        index = self.scheme().index
        found = index.hits(hashes[index.scheme], tokens, self.clock.now())
        return by_place(found, index.numbers).get(Place(name), Hit(0, 0))

    def scheme(self) -> SchemeIndex:
        """The scheme of all nodes."""
        scheme = self.caches.scheme(self.node("prefill").hashing)
        assert scheme is not None
        return scheme


@contextlib.asynccontextmanager
async def observing(nodes: dict[str, Node]) -> AsyncIterator[Observer]:
    """An observer that is up to date with all nodes."""
    observer = Observer()
    running = asyncio.create_task(observer.subscriber.run())
    try:
        for name, node in nodes.items():
            await observer.join(name, node.url)
        await observer.until_known(*nodes)
        yield observer
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await observer.transport.aclose()


def beside_ticket(hit: Hit, covered: int, block: int) -> int:
    """How many tokens a decode node takes from its own cache beside a ticket for `covered` tokens.

    vLLM leaves a partly cached block to the read (0.32, `Scheduler.schedule`, "partial_tail"). Our connector leaves the
    last block to it where everything but the state is cached (`resume_boundary.LocalHits`).
    """
    return covered if hit.resume >= covered else min(hit.attention, covered - 1) // block * block


@dataclasses.dataclass(frozen=True)
class Talk:
    """The prompts of one conversation, which turns have a ticket, and the decode node of each."""

    prompts: tuple[str, ...]
    handed: tuple[bool, ...]
    decode: str


def talk(seed: int) -> Talk:
    """Two to five turns over a list of its own; two of three conversations begin with a shared list."""
    source = random.Random(seed)
    own: Quiz = quiz(seed, source.randrange(300, 1200))
    shared = quiz(seed % SHARED, 500).listing if seed % 3 else ""
    turns = [own.at_turn(turn).prompt() for turn in range(1, source.randrange(3, 7))]
    if seed % 4 == 0:
        turns.append(recite(seed, 300, lines=12).prompt())
    handed = tuple(at == 0 or source.random() < 0.5 for at in range(len(turns)))
    return Talk(tuple(shared + turn for turn in turns), handed, f"decode-{source.randrange(2)}")


@dataclasses.dataclass
class Agreement:
    """How often the planned hits were those that a node counted, by what was compared."""

    equal: dict[str, int] = dataclasses.field(default_factory=dict)
    asked: dict[str, int] = dataclasses.field(default_factory=dict)
    differences: list[str] = dataclasses.field(default_factory=list)

    def compare(self, what: str, planned: int, counted: float, about: str) -> None:
        self.asked[what] = self.asked.get(what, 0) + 1
        self.equal[what] = self.equal.get(what, 0) + (planned == counted)
        if planned != counted:
            self.differences.append(f"{what}: planned {planned}, counted {counted:g}, {about}")

    @property
    def share(self) -> float:
        return sum(self.equal.values()) / sum(self.asked.values())


async def in_thread(*call: Any) -> Any:
    return await asyncio.to_thread(*call)


async def turn(fleet: Fleet, observer: Observer, agreement: Agreement, prompt: str, handed: bool, decode: str) -> None:
    """Send one turn; compare each leg with its plan, made from the prompt's ids and from its text."""
    ids = await observer.tokens(prompt)
    hashes, about = observer.hashes(ids), f"{len(ids)} tokens on {decode}"
    chain = observer.texts.refined(chain_of_completion(SERVED_NAME, "", prompt.encode()))
    known = observer.texts.known_prefix(chain)
    first = known.rendering.hashes if known.rendering else dict.fromkeys(hashes, ())
    by_text = {scheme: each[: known.tokens // scheme.unit] for scheme, each in first.items()}
    ticket: Params | None = None
    if handed:
        await observer.quiet()
        covered = covered_tokens(observer.node("prefill"), len(ids))
        planned, planned_by_text = (observer.hit("prefill", each, covered) for each in (hashes, by_text))
        leg = await in_thread(complete, fleet.nodes["prefill"].url, prompt, 1, TO_HAND_OVER)
        agreement.compare("R of prefill nodes", planned.resume, leg.cached, about)
        if known.tokens:
            agreement.compare("R of prefill nodes by text", planned_by_text.resume, leg.cached, about)
        ticket = leg.ticket
        assert ticket is not None
        ticket.pop("remote_prefill_cached_tokens", None)
    await observer.quiet()
    planned, planned_by_text = (observer.hit(decode, each, len(ids)) for each in (hashes, by_text))
    url = fleet.nodes[decode].url
    hit, all_tokens = watch(url, "prompt_tokens", source="hit"), watch(url, "prompt_tokens")
    answer = await in_thread(complete, url, prompt, 8, ticket)
    if ticket is None:
        agreement.compare("R of decode nodes", planned.resume, answer.cached, about)
        if known.tokens:
            agreement.compare("R of decode nodes by text", planned_by_text.resume, answer.cached, about)
    observer.texts.tokenized(chain, Rendering(len(ids), len(prompt.encode()), hashes))
    await in_thread(all_tokens.reaches, len(ids))
    if ticket is not None:
        node = observer.node(decode)
        local = beside_ticket(planned, covered_tokens(node, len(ids)), node.block_size)
        agreement.compare("A of decode nodes", local, await in_thread(hit.grown), f"{about}, {planned}")


async def mixed(fleet: Fleet, observer: Observer, agreement: Agreement, seeds: range) -> int:
    """Run conversations by turns, in random order. Returns the number of turns."""
    source, turns = random.Random(seeds.start), 0
    waiting = [talk(seed) for seed in seeds]
    running: list[tuple[Talk, Iterator[tuple[str, bool]]]] = []
    while waiting or running:
        while waiting and len(running) < AT_ONCE:
            each = waiting.pop(0)
            running.append((each, iter(zip(each.prompts, each.handed, strict=True))))
        chosen = source.choice(running)
        following = next(chosen[1], None)
        if following is None:
            running.remove(chosen)
            continue
        await turn(fleet, observer, agreement, *following, chosen[0].decode)
        turns += 1
    return turns


@pytest.mark.parametrize("conversations", CONVERSATIONS)
async def test_planned_hits_are_what_the_nodes_count(fleet: Fleet, conversations: int) -> None:
    agreement = Agreement()
    async with observing(fleet.nodes) as observer:
        turns = await mixed(fleet, observer, agreement, range(9000, 9000 + conversations // 2))
        before = fleet.nodes["decode-1"]
        fleet.room.stop(before.part)
        fleet.nodes["decode-1"] = again = start_node(fleet.room, before.spec)
        await in_thread(await_nodes, fleet.room, [again], print)
        await observer.join("decode-1", again.url)
        await observer.until_known(*fleet.nodes)
        turns += await mixed(fleet, observer, agreement, range(9500, 9500 + conversations // 2))
        removed, gaps = observer.count("kv_events_total", kind="removed"), observer.count("kv_event_gaps_total")
    print(f"\n{turns} turns, {removed:g} evictions, {gaps:g} gaps; planned and counted are equal in", end=" ")
    print(", ".join(f"{agreement.equal[what]} of {asked} {what}" for what, asked in agreement.asked.items()), end="")
    print(f": {agreement.share:.1%}")
    print("\n".join(agreement.differences))
    assert removed > 100
    assert agreement.share >= 0.98


def first_token_ids(url: str, path: str, body: dict[str, Any]) -> list[int]:
    """The prompt's token ids, as the engine gets them."""
    asked = {"model": SERVED_NAME, "max_tokens": 1, "temperature": 0, "return_token_ids": True, **body}
    answer = httpx.post(url + path, json=asked, timeout=REQUEST_TIMEOUT_S, trust_env=False).raise_for_status().json()
    ids = answer.get("prompt_token_ids") or answer["choices"][0]["prompt_token_ids"]
    return [int(each) for each in ids]


async def test_a_proxy_that_plans_by_what_is_cached_sends_a_conversation_where_it_is(fleet: Fleet) -> None:
    """Without a session: the second turn goes to the one of two decode nodes that has the first turn."""
    proxy = await in_thread(start_proxy, fleet.room, ProxySpec(), list(fleet.nodes.values()), print)

    def counted(name: str, **labels: str) -> float:
        return read(proxy.admin_url, name, **labels)

    def listed() -> list[dict[str, Any]]:
        answer = httpx.get(f"{proxy.admin_url}/nodes", timeout=REQUEST_TIMEOUT_S, trust_env=False).raise_for_status()
        return list(answer.json()["nodes"])

    async with asyncio.timeout(PATIENCE_S):
        while True:
            nodes = await in_thread(listed)
            if all(each["known"] == "all" for node in nodes for each in node["caches"] or [{"known": ""}]):
                break
            await asyncio.sleep(0.1)
    assert all(len(node["caches"]) == 1 for node in nodes)
    hits = [watch(fleet.nodes[name].url, "prompt_tokens", source="hit") for name in ("decode-0", "decode-1")]
    for seed in range(30_000, 30_006):
        story = quiz(seed, 900)
        for number in (1, 2, 3):
            said = await in_thread(complete, proxy.url, story.at_turn(number).prompt())
            assert said.text == story.at_turn(number).answer
            await asyncio.sleep(2 * QUIET_S)
    reused = sum([await in_thread(each.grown) for each in hits])
    print(f"\n{reused:g} tokens were hit on decode nodes, of about 10,800 that later turns share with the first")
    assert reused >= 0.9 * 12 * 768
    known, asked = [
        await in_thread(functools.partial(counted, "pdproxy_prompt_lookups_total", by=by)) for by in ("known", "asked")
    ]
    print(f"{known:g} prompts were looked up by their text, for {asked:g} a node was asked before the plan")
    assert known + asked == 18
    assert known >= 12
    assert await in_thread(lambda: counted("pdproxy_kv_event_batches_total", outcome="applied")) > 0
    fleet.room.stop(proxy.part)


TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
USER = {"role": "user", "content": quiz(1, 300).prompt()}
SAID = {"role": "assistant", "content": "one"}
BODIES: dict[str, tuple[Endpoint, dict[str, Any]]] = {
    "completion": (Endpoint.COMPLETIONS, {"prompt": quiz(1, 300).prompt()}),
    "completion without special tokens": (Endpoint.COMPLETIONS, {"prompt": "a b", "add_special_tokens": False}),
    "chat": (Endpoint.CHAT, {"messages": [USER]}),
    "chat of several turns": (Endpoint.CHAT, {"messages": [{"role": "system", "content": "s"}, USER, SAID, USER]}),
    "chat in parts": (Endpoint.CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a b"}]}]}),
    "chat that goes on": (
        Endpoint.CHAT,
        {"messages": [USER, SAID], "add_generation_prompt": False, "continue_final_message": True},
    ),
    "chat with tools": (Endpoint.CHAT, {"messages": [USER], "tools": TOOLS, "tool_choice": "none"}),
    "chat with arguments": (
        Endpoint.CHAT,
        {"messages": [USER], "chat_template_kwargs": {"x": 1}, "documents": [{"text": "d"}], "reasoning_effort": "low"},
    ),
}


async def test_token_ids_are_those_that_the_node_makes_of_the_request(fleet: Fleet) -> None:
    url = fleet.nodes["decode-0"].url
    async with observing(fleet.nodes) as observer:
        for name, (endpoint, body) in BODIES.items():
            asked = {"model": SERVED_NAME, **body}
            question = tokenize_body(sub_request(endpoint, asked))
            assert question is not None, name
            ids = await observer.ids.fetch(question, observer.node("prefill"))
            assert ids is not None, name
            assert list(ids) == await in_thread(first_token_ids, url, endpoint, body), name


async def test_what_asking_for_token_ids_costs(fleet: Fleet) -> None:
    """Prints the cost on an idle node, as a share of the time of its prefill."""
    async with observing(fleet.nodes) as observer:
        for tokens in (400, 1000, 2100):
            asking, computing = [], []
            for seed in range(7):
                prompt = quiz(20_000 + tokens + seed, tokens).prompt()
                began = time.monotonic()
                await observer.tokens(prompt)
                asking.append(time.monotonic() - began)
                began = time.monotonic()
                await in_thread(complete, fleet.nodes["prefill"].url, prompt, 1)
                computing.append(time.monotonic() - began)
            ids, prefill = (sorted(each)[3] for each in (asking, computing))
            print(
                f"\n{tokens} tokens: ids {1000 * ids:.1f} ms, prefill {1000 * prefill:.0f} ms: {ids / prefill:.3f} x",
                end="",
            )
        print()
    assert ids < prefill
