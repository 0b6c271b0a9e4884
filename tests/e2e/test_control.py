"""The negative control: losing any part of a hand-over must show in the comparison that good hand-overs pass.

A saboteur in the decode node zeroes one part of a read after its verification and before the request runs. A lost
attention block shows in the text, for the name that is asked for is in that block. A lost state shows in the text or in
the log-probabilities.
"""

import random
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, replace

import httpx
import pytest

from deploy.local.model.quiz import ASK, TOKENS_PER_LINE, Question, Quiz, quiz
from deploy.local.node import SERVED_NAME, Node, NodeSpec, Role, on_free_ports
from deploy.local.stack import logs_of, start_nodes
from deploy.local.supervise import Supervisor
from tests.e2e.conftest import REQUEST_TIMEOUT_S
from tests.e2e.legs import Params, hand_over, prefill, release
from tests.e2e.sabotaged_connector import Moment, Order, Orders, sabotaged

pytestmark = [pytest.mark.e2e, pytest.mark.own_engines]

BLOCK = 256
IN_CI_AND_LONG = (833, *(pytest.param(size, marks=pytest.mark.long) for size in (193, 1953)))
"""Prompt lengths: one token past a boundary. After a lost state the decode node's own tokens repair it, sixteen of them
so well that no answer shows the loss. CI runs one length, because engines are slow on two cores."""
SHOWN = 20
TOLERANCE = 0.3
"""In nats. Good hand-overs differed by at most 0.06, lost states by at least 0.5."""
STATES = 3
TRIES = 2
BLOCKS = (
    (800, 1),
    *(
        pytest.param(*at, marks=pytest.mark.long)
        for at in [(200, 0), (800, 0), (800, 3), (2000, 0), (2000, 4), (2000, 7)]
    ),
)


@dataclass(frozen=True)
class FirstTokenAnswer:
    """An answer. `first`: the log-probabilities of the likeliest first tokens."""

    text: str
    first: dict[str, float]

    def away_from(self, other: "FirstTokenAnswer") -> float:
        """The largest difference in the log-probability of a digit, in nats."""
        both = self.first.keys() & other.first.keys()
        return max(abs(self.first[token] - other.first[token]) for token in both)


def ask(node: Node, question: Quiz, params: Params | None = None) -> FirstTokenAnswer:
    """Ask a node."""
    body = {"model": SERVED_NAME, "prompt": question.prompt(), "max_tokens": 8, "temperature": 0, "logprobs": SHOWN}
    body |= {} if params is None else {"kv_transfer_params": params}
    got = httpx.post(f"{node.url}/v1/completions", json=body, timeout=REQUEST_TIMEOUT_S, trust_env=False)
    (choice,) = got.raise_for_status().json()["choices"]
    return FirstTokenAnswer(choice["text"], choice["logprobs"]["top_logprobs"][0])


@dataclass(frozen=True)
class Scene:
    """A prefill node, and a decode node whose saboteur reads `orders`."""

    prefill: Node
    decode: Node
    orders: Orders

    def alone(self, question: Quiz) -> FirstTokenAnswer:
        """The answer of one node alone."""
        return ask(self.prefill, question)

    def handed(self, question: Quiz, *orders: Order) -> FirstTokenAnswer:
        """The answer by a hand-over, with these orders; every order must have been carried out."""
        self.orders.give(*orders)
        got = ask(self.decode, question, prefill(self.prefill.url, question.prompt()))
        assert self.orders.done(len(orders)), "the read was not verified"
        return got


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """Two nodes for all tests here. Logs: `.run/e2e-control`."""
    orders = tmp_path_factory.mktemp("control") / "orders"
    decode = sabotaged(NodeSpec("decode", Role.DECODE, 0, 0), orders)
    with Supervisor(logs_of("e2e-control")) as supervisor:
        specs = on_free_ports(NodeSpec("prefill", Role.PREFILL, 0, 0), decode)
        give, take = start_nodes(supervisor, specs, print)
        hand_over(give.url, take.url, quiz(790, 300))
        yield Scene(give, take, Orders(orders))


def same(one: FirstTokenAnswer, other: FirstTokenAnswer) -> bool:
    """The comparison under test."""
    return one.text == other.text and one.away_from(other) <= TOLERANCE


def state_groups(scene: Scene) -> list[int]:
    """The groups with one block for any prompt length."""
    name = secrets.token_hex(16)
    ids = prefill(scene.prefill.url, quiz(800, 800).prompt(), pdproxy_hand_over=name)["remote_block_ids"]
    release(scene.prefill.url, name)
    return [at for at, blocks in enumerate(ids) if len(blocks) == 1]


def asking_in_block(seed: int, size: int, block: int) -> Quiz:
    """An exam that asks for a name whose whole line lies in this block of the prompt."""
    paper = quiz(seed, size)
    within = [
        name
        for at, (name, _) in enumerate(paper.lines)
        if block * BLOCK <= at * TOKENS_PER_LINE and (at + 1) * TOKENS_PER_LINE <= (block + 1) * BLOCK
    ]
    return replace(paper, asked=(Question(ASK, random.Random(seed).choice(within)),))


@pytest.mark.parametrize("size", IN_CI_AND_LONG)
def test_an_undisturbed_hand_over_passes(scene: Scene, size: int) -> None:
    for seed in range(810, 810 + TRIES):
        question = quiz(seed, size)
        alone, handed = scene.alone(question), scene.handed(question)
        assert alone.text == question.answer
        assert same(handed, alone)


@pytest.mark.parametrize("size", IN_CI_AND_LONG)
@pytest.mark.parametrize("state", range(STATES))
def test_a_lost_state_is_noticed(scene: Scene, state: int, size: int) -> None:
    group = state_groups(scene)[state]
    for seed in range(820 + 20 * state, 820 + 20 * state + TRIES):
        question = quiz(seed, size)
        alone, handed = scene.alone(question), scene.handed(question, Order(Moment.VERIFIED, group=group))
        assert not same(handed, alone)


@pytest.mark.parametrize(("size", "block"), BLOCKS)
def test_a_lost_attention_block_is_noticed(scene: Scene, size: int, block: int) -> None:
    attention = next(group for group in range(STATES + 1) if group not in state_groups(scene))
    question = asking_in_block(900 + size + block, size, block)
    alone = scene.alone(question)
    handed = scene.handed(question, Order(Moment.VERIFIED, group=attention, block=block))
    assert alone.text == question.answer
    assert handed.text != alone.text
    assert not same(handed, alone)
