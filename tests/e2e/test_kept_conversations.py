"""Conversations that nodes with small caches keep between turns, while as many others evict everything else.

Twelve conversations pause after their first turn, as an agent's do while a tool runs. Then twelve others come. Kept
blocks are there afterwards, and the answers are those of one engine with room for everything. Run with -s to see hits.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count

import httpx
import pytest

from deploy.local.model.quiz import Quiz, quiz
from deploy.local.node import SERVED_NAME, Node, NodeSpec, Role, start_node
from deploy.local.stack import Proxy, ProxySpec, await_nodes, logs_of, start_nodes, start_proxy
from deploy.local.supervise import Supervisor
from tests.e2e.conftest import REQUEST_TIMEOUT_S
from tests.e2e.legs import TO_HAND_OVER, Completion, Params, complete
from tests.e2e.metrics_reader import read, watch
from tests.e2e.process_faults import ProcessFault, strike

pytestmark = [pytest.mark.e2e, pytest.mark.own_engines, pytest.mark.timeout(600)]

BLOCKS = 60
"""Blocks of 256 tokens. A first turn takes seven: its attention blocks, and a state for each of three groups."""
TOKENS = 900
TALKS = 12
OTHERS_AT_ONCE = 2
SECONDS = 300
SHARE = 0.6
"""The share of the decode node's cache. The prefill node has the default, 0.3."""
AGAIN_WITHIN_S = 60.0
STOPPED_WITHIN_S = 20.0
"""Far below SECONDS, and below the hour for which the proxy has conversations kept."""
ENOUGH = 0.95
"""The share of a first turn's prompt tokens that the next turn must hit where they are kept."""


@dataclass
class Scene:
    """Two nodes with small caches, and one that computes everything by itself, with room for all."""

    supervisor: Supervisor
    prefill: Node
    decode: Node
    alone: Node
    seeds: Iterator[int]

    def talk(self) -> Quiz:
        """A conversation that no node has seen."""
        return quiz(next(self.seeds), TOKENS)

    def talks(self) -> list[Quiz]:
        """As many conversations as a test needs."""
        return [self.talk() for _ in range(TALKS)]


@dataclass(frozen=True)
class Turns:
    """Both turns of a conversation: the answers, and the cached tokens of the second prompt."""

    first: Completion
    next: Completion

    @property
    def share(self) -> float:
        """The share of the first prompt that the second one hit."""
        return self.next.cached / self.first.prompt


Ask = Callable[[Quiz, int], Completion]
"""Asks turn 1 or 2 of a conversation."""


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    """Logs: `.run/e2e-kept-conversations`."""
    with Supervisor(logs_of("e2e-kept-conversations")) as supervisor:
        specs = (
            NodeSpec("prefill", Role.PREFILL, 0, 0, gpu_blocks=BLOCKS),
            NodeSpec("decode", Role.DECODE, 0, 0, gpu_blocks=BLOCKS, connector_config={"pdproxy_keep_share": SHARE}),
            NodeSpec("alone", Role.DECODE, 0, 0),
        )
        prefill, decode, alone = start_nodes(supervisor, specs, print)
        yield Scene(supervisor, prefill, decode, alone, count(31_000))


def keep(talk: Quiz, seconds: float = SECONDS) -> Params:
    """The order for a turn of this conversation, whose id is made of its first line."""
    name, number = talk.lines[0]
    return {"pdproxy_keep": {"id": f"conversation-of-{name}-{number}", "seconds": seconds}}


def through(proxy: Proxy, question: Quiz, **more: str) -> Completion:
    """The answer through the proxy. Raises httpx.HTTPError."""
    body = {"model": SERVED_NAME, "prompt": question.prompt(), "max_tokens": 8, "temperature": 0, **more}
    answer = httpx.post(f"{proxy.url}/v1/completions", json=body, timeout=REQUEST_TIMEOUT_S, trust_env=False)
    got = answer.raise_for_status().json()
    usage = got["usage"]
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return Completion(got["choices"][0]["text"], None, usage["prompt_tokens"], cached, ())


def pause(talks: Sequence[Quiz], others: Sequence[Quiz], ask: Ask) -> list[Turns]:
    """The first turns; then all of the others; then the next turns."""
    first = [ask(talk, 1) for talk in talks]
    with ThreadPoolExecutor(OTHERS_AT_ONCE) as threads:
        list(threads.map(lambda other: ask(other, 0), others))
    return [Turns(one, ask(talk, 2)) for talk, one in zip(talks, first, strict=True)]


def as_one_engine(scene: Scene, talks: Sequence[Quiz], turns: Sequence[Turns]) -> None:
    """Every answer is right, and the same as that of the engine with room for all."""
    for talk, answered in zip(talks, turns, strict=True):
        for number, got in ((1, answered.first), (2, answered.next)):
            question = talk.at_turn(number)
            assert got.text == complete(scene.alone.url, question.prompt()).text == question.answer


def kept_ones_hit(node: Node, turns: Sequence[Turns], kept: float, least: int) -> None:
    """As many conversations hit enough as the node still kept when the next turns began: `least` or more."""
    hits = sum(each.share >= ENOUGH for each in turns)
    shares = ", ".join(f"{each.share:.0%}" for each in turns)
    print(f"{node.spec.name}: {kept:g} kept, {hits} hit at least {ENOUGH:.0%}: {shares}")
    assert least <= kept <= hits < len(turns)


def test_a_node_that_computes_prompts_keeps_what_it_is_told_to(scene: Scene) -> None:
    """No other prompt waits for blocks: kept blocks are free."""
    talks, node = scene.talks(), scene.decode
    kept: list[float] = []

    def ask(talk: Quiz, turn: int) -> Completion:
        if turn == 2 and not kept:
            kept.append(read(node.url, "pdproxy_connector_keeps"))
            assert read(node.url, "vllm:kv_cache_usage_perc") == 0
        order = keep(talk, SECONDS if turn == 1 else 0) if turn else None
        return complete(node.url, talk.at_turn(max(turn, 1)).prompt(), params=order)

    preempted = read(node.url, "vllm:num_preemptions_total")
    turns = pause(talks, scene.talks(), ask)
    kept_ones_hit(node, turns, kept[0], least=4)
    as_one_engine(scene, talks, turns)
    assert read(node.url, "vllm:num_preemptions_total") == preempted
    assert read(node.url, "pdproxy_connector_keeps") == 0


def test_a_prefill_node_keeps_what_it_is_told_to(scene: Scene) -> None:
    """The decode node keeps nothing: it gets a ticket for each turn."""
    talks, node = scene.talks(), scene.prefill
    kept: list[float] = []

    def ask(talk: Quiz, turn: int) -> Completion:
        if turn == 2 and not kept:
            kept.append(read(node.url, "pdproxy_connector_keeps"))
        order = keep(talk, SECONDS if turn == 1 else 0) if turn else {}
        prompt = talk.at_turn(max(turn, 1)).prompt()
        given = complete(node.url, prompt, 1, {**TO_HAND_OVER, **order})
        got = complete(scene.decode.url, prompt, params=given.ticket)
        return Completion(got.text, given.ticket, given.prompt, given.cached, got.logprobs)

    refused = watch(scene.decode.url, "refused")
    turns = pause(talks, scene.talks(), ask)
    kept_ones_hit(node, turns, kept[0], least=2)
    as_one_engine(scene, talks, turns)
    told = [(each.next.ticket or {})["pdproxy_kept"]["hit"] for each in turns]
    assert sum(each > 0 for each in told) == kept[0]
    assert refused.grown() == 0


@pytest.fixture(scope="module")
def proxy(scene: Scene) -> Proxy:
    """A proxy before the decode node alone: each turn goes to the same node."""
    return start_proxy(scene.supervisor, ProxySpec(), [scene.decode], print)


def test_the_proxy_has_a_node_keep_what_clients_ask_for(scene: Scene, proxy: Proxy) -> None:
    talks, node = scene.talks(), scene.decode
    kept: list[float] = []

    def ask(talk: Quiz, turn: int) -> Completion:
        if turn == 2 and not kept:
            kept.append(read(node.url, "pdproxy_connector_keeps"))
        more = {"prompt_cache_retention": "in_memory"} if turn == 1 else {}
        return through(proxy, talk.at_turn(max(turn, 1)), **more)

    hits = watch(node.url, "keeps_ended", reason="hit")
    turns = pause(talks, scene.talks(), ask)
    kept_ones_hit(node, turns, kept[0], least=4)
    assert hits.grown() >= kept[0]
    as_one_engine(scene, talks, turns)
    assert read(proxy.admin_url, "pdproxy_keeps_total", outcome="kept") >= kept[0]


@dataclass
class Keeper:
    """A proxy before both nodes, for tests of what a lost node costs its conversations."""

    scene: Scene
    proxy: Proxy

    @property
    def node(self) -> str:
        """The prefill node's URL for operators."""
        return f"{self.proxy.admin_url}/nodes/prefill-0"

    def operate(self, verb: str) -> None:
        """Call an operator's route for the node. Raises httpx.HTTPError."""
        httpx.post(f"{self.node}/{verb}", timeout=REQUEST_TIMEOUT_S, trust_env=False).raise_for_status()

    def begin_talk(self) -> Quiz:
        """A new conversation that the prefill node keeps."""
        talk, begun = self.scene.talk(), watch(self.scene.prefill.url, "keeps_begun")
        self.answers(talk, 1, prompt_cache_retention="in_memory")
        begun.reaches(1)
        return talk

    def answers(self, talk: Quiz, turn: int, **more: str) -> None:
        """Ask one turn; its answer must be right."""
        assert through(self.proxy, talk.at_turn(turn), **more).text == talk.at_turn(turn).answer

    def becomes(self, state: str) -> None:
        """Wait for the node's state. Raises AssertionError after AGAIN_WITHIN_S."""
        limit = time.monotonic() + AGAIN_WITHIN_S
        while (seen := httpx.get(self.node, trust_env=False).raise_for_status().json()["state"]) != state:
            assert time.monotonic() < limit, f"{self.node} is {seen}, not {state}"
            time.sleep(0.1)


@pytest.fixture(scope="module")
def keeper(scene: Scene) -> Keeper:
    """Each prompt is handed over while there is a prefill node."""
    spec = ProxySpec(more_environment={"PDPROXY_POLICY_ITL_BUDGET": "0"})
    return Keeper(scene, start_proxy(scene.supervisor, spec, [scene.prefill, scene.decode], print))


def test_a_node_that_goes_away_loses_its_keeps_and_nothing_else(scene: Scene, keeper: Keeper) -> None:
    """The node is drained and rejoins; is stopped, as for an upgrade, and started again; is killed."""
    talk = keeper.begin_talk()
    keeper.operate("drain")
    keeper.becomes("draining")
    keeper.answers(talk, 2)
    forgotten = watch(scene.prefill.url, "keeps_ended", reason="forgotten")
    keeper.operate("rejoin")
    keeper.becomes("up")
    talk = keeper.begin_talk()
    forgotten.reaches(1)  # the keep of the conversation that went elsewhere meanwhile

    began = time.monotonic()
    scene.supervisor.stop(scene.prefill.part)
    assert time.monotonic() - began < STOPPED_WITHIN_S, "it waited for its keeps"
    keeper.answers(talk, 2)
    scene.prefill = start_node(scene.supervisor, scene.prefill.spec)
    await_nodes(scene.supervisor, [scene.prefill], print)
    keeper.becomes("up")
    assert read(scene.prefill.url, "pdproxy_connector_keeps") == 0

    talk = keeper.begin_talk()
    strike(scene.prefill.part, ProcessFault.KILLED)
    keeper.answers(talk, 2)
    scene.supervisor.stop(scene.prefill.part)
