"""Pairs whose bytes mean different things fail the known-answer test; all others pass it.

Fingerprints are not compared here (`known_answers.trusting`). The figures (`-s` prints them) are those in the docstring
of `pdproxy.orchestration.answers_agree`.
"""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from deploy.local.model.quiz import quiz
from deploy.local.node import Node, NodeSpec, Role, on_free_ports
from deploy.local.paths import MODEL
from deploy.local.stack import logs_of, start_nodes
from deploy.local.supervise import Supervisor
from pdproxy.nodes.node import Role as PoolRole
from pdproxy.observe.labels import Proof
from tests.e2e.conftest import Pair
from tests.e2e.known_answers import HEAD, ask, bench, trusting
from tests.e2e.test_differences import checked, parts

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="function")]

HONEST = 200
ODD = 20
"""Tests of each pair."""
BLOCK = ("--block-size", "256")
"""Given explicitly, for other flags would change it, and then the nodes would differ in more than one thing."""
OTHER_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %} ="
STATES = ("--mamba-ssm-cache-dtype", "bfloat16", *BLOCK)
ROPE = {"rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 10000.0, "rope_type": "default"}}


@dataclass(frozen=True)
class Odd:
    """The difference between the nodes of a pair.

    Attributes:
        name: of the pair.
        prefill, decode: more arguments of the two nodes.
        weights: of the decode node: the factor, and the noise added as a multiple of the standard deviation.
        tensor_parallel: of the prefill node, of the decode node.
    """

    name: str
    prefill: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()
    weights: tuple[float, float] = (1.0, 0.0)
    tensor_parallel: tuple[int, int] = (1, 1)


WRONG = (
    Odd("state dtype: float32 to bfloat16", decode=STATES),
    Odd("state dtype: bfloat16 to float32", prefill=STATES, decode=BLOCK),
    Odd("block size: 256 to 512", decode=("--block-size", "512")),
    Odd("rope: partial_rotary_factor 0.25 to 0.5", decode=("--hf-overrides", json.dumps(ROPE))),
    Odd("weights changed by 10 %, same path", weights=(1.0, 0.1)),
    Odd("another model of the same shapes, same path", weights=(0.0, 1.0)),
)
RIGHT = (
    Odd("the same"),
    Odd("tensor parallel 1 to 2", prefill=BLOCK, decode=BLOCK, tensor_parallel=(1, 2)),
    Odd("tensor parallel 2 to 1", prefill=BLOCK, decode=BLOCK, tensor_parallel=(2, 1)),
)


def change_weights(folder: Path, kept: float, noise: float) -> None:
    """Write other weights into a folder. Nodes that have the file open keep the old ones."""
    import torch
    from safetensors.torch import load_file, save_file

    source = torch.Generator().manual_seed(7)
    weights = load_file(MODEL / "model.safetensors")
    for name, weight in weights.items():
        if weight.dim() > 1:
            drawn = torch.randn(weight.shape, generator=source) * weight.float().std()
            weights[name] = (kept * weight.float() + noise * drawn).to(weight.dtype)
    save_file(weights, folder / "new", metadata={"format": "pt"})
    (folder / "new").rename(folder / "model.safetensors")


@pytest.fixture
def supervisor() -> Iterator[Supervisor]:
    with Supervisor(logs_of("known_answer")) as made:
        yield made


def start(supervisor: Supervisor, odd: Odd, folder: Path) -> tuple[Node, Node]:
    """Start both nodes. The prefill node has loaded its weights before the decode node's are written."""
    shutil.copytree(MODEL, folder)
    specs = on_free_ports(
        NodeSpec("prefill", Role.PREFILL, 0, 0, folder, more_arguments=odd.prefill,
                 tensor_parallel_size=odd.tensor_parallel[0]),
        NodeSpec("decode", Role.DECODE, 0, 0, folder, more_arguments=odd.decode,
                 tensor_parallel_size=odd.tensor_parallel[1]),
    )  # fmt: skip
    (give,) = start_nodes(supervisor, specs[:1], print)
    change_weights(folder, *odd.weights)
    (take,) = start_nodes(supervisor, [trusting(specs[1])], print)
    return give, take


async def test_a_pair_that_fails_is_kept_apart_and_its_clients_get_right_answers(
    pair: Pair, supervisor: Supervisor
) -> None:
    (spec,) = on_free_ports(NodeSpec("odd", Role.DECODE, 0, 0, more_arguments=STATES))
    (odd,) = start_nodes(supervisor, [trusting(spec)], print)
    async with bench() as made:
        prefill = await made.node(pair.prefill, PoolRole.PREFILL)
        right = await made.node(pair.decode, PoolRole.DECODE)
        wrong = await made.node(odd, PoolRole.DECODE)
        await made.join(prefill, right, wrong)
        bars = made.means.pool.state().bars
        assert bars.allow("prefill", "decode")
        assert set(bars.nodes) == {"odd"}
        made.means.pool.remove("decode")
        for seed in range(900, 903):
            question = quiz(seed, 800)
            assert await made.answer(question.prompt()) == (question.answer, "local")


@pytest.mark.long
async def test_a_node_with_another_chat_template_is_named_and_fails(pair: Pair, supervisor: Supervisor) -> None:
    """The engines' fingerprints are equal: only the API server knows its arguments."""
    (spec,) = on_free_ports(NodeSpec("odd", Role.DECODE, 0, 0, more_arguments=("--chat-template", OTHER_TEMPLATE)))
    (odd,) = start_nodes(supervisor, [spec], print)
    assert parts(odd.url) == parts(pair.prefill.url)
    status, lines = checked(pair.prefill, odd)
    assert status == 1
    for name in ("prefill-0", "decode-0"):
        assert [line for line in lines if line.startswith(f"{name}: exchanges no tickets: chat_template: ")]
    async with bench() as made:
        prefill = await made.node(pair.prefill, PoolRole.PREFILL)
        usual, other = await made.node(pair.decode, PoolRole.DECODE), await made.node(odd, PoolRole.DECODE)
        assert (await made.test.ask(prefill, usual)).proof is Proof.PASSED
        failed = await made.test.ask(prefill, other)
    assert failed.proof is Proof.FAILED
    assert "of one chat prefill makes a prompt of" in failed.why


@pytest.mark.long
@pytest.mark.parametrize("odd", WRONG, ids=lambda odd: odd.name)
async def test_a_wrong_pair_always_fails(supervisor: Supervisor, odd: Odd, tmp_path: Path) -> None:
    row = await ask(odd.name, *start(supervisor, odd, tmp_path / "model"), range(ODD))
    print(f"\n{HEAD}\n{row}")
    assert row.caught() == ODD


@pytest.mark.long
@pytest.mark.parametrize("odd", RIGHT, ids=lambda odd: odd.name)
async def test_a_right_pair_always_passes(supervisor: Supervisor, odd: Odd, tmp_path: Path) -> None:
    count = HONEST if odd.tensor_parallel == (1, 1) else ODD
    row = await ask(odd.name, *start(supervisor, odd, tmp_path / "model"), range(count))
    print(f"\n{HEAD}\n{row}")
    assert row.caught() == 0
