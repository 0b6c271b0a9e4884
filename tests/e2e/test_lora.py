"""Hand-overs with a LoRA adapter: the adapter's content decides, not its name or path."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from connector.ticket_fields import RefusalReason
from deploy.local.node import SERVED_NAME, Node, NodeSpec, Role
from deploy.local.stack import logs_of, start_nodes
from deploy.local.supervise import Supervisor
from tests.e2e.dense import Dense, make_dense
from tests.e2e.legs import TO_HAND_OVER, Params
from tests.e2e.lora import arguments, negating, silent
from tests.e2e.metrics_reader import watch
from tests.e2e.ranks import TELLING, Question, complete_ids, draw

pytestmark = [pytest.mark.e2e, pytest.mark.own_engines, pytest.mark.long]

BLOCKS = 128
QUESTIONS = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Dense:
    return make_dense(tmp_path_factory.mktemp("dense"))


@pytest.fixture(scope="module")
def nodes(model: Dense, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Node, Node]]:
    """`mine` of the prefill node is `theirs` of the decode node. `common` is on both, with different content."""
    folder = tmp_path_factory.mktemp("adapters")
    here = {"mine": negating(folder / "a", model.folder), "common": silent(folder / "b", model.folder)}
    there = {"theirs": negating(folder / "c", model.folder), "common": negating(folder / "d", model.folder)}
    specs = [spec("prefill", Role.PREFILL, model.folder, here), spec("decode", Role.DECODE, model.folder, there)]
    with Supervisor(logs_of("lora")) as supervisor:
        give, take = start_nodes(supervisor, specs, print)
        yield give, take


def spec(name: str, role: Role, model: Path, adapters: dict[str, Path]) -> NodeSpec:
    """A node with these adapters."""
    more = ("--dtype", "float32", *arguments(adapters))
    return NodeSpec(name, role, 0, 0, model=model, gpu_blocks=BLOCKS, more_arguments=more)


def ticket(give: Node, asked: Question, adapter: str) -> Params:
    """Send the prefill leg with this adapter."""
    got: Params = complete_ids(give.url, asked.prompt, 1, model=adapter, kv_transfer_params=TO_HAND_OVER)
    return dict(got["kv_transfer_params"])


def tokens_of(take: Node, asked: Question, adapter: str, params: Params | None = None) -> list[int]:
    """Send the decode leg, or without a ticket the whole request."""
    more = {} if params is None else {"kv_transfer_params": params}
    got = complete_ids(take.url, asked.prompt, TELLING, model=adapter, **more)
    return list(got["choices"][0]["token_ids"])


def test_the_same_adapter_by_another_name_is_handed_over(nodes: tuple[Node, Node], model: Dense) -> None:
    give, take = nodes
    verified, pulled = watch(take.url, "reads", outcome="verified"), watch(take.url, "prompt_tokens", source="pulled")
    for seed in range(40, 40 + QUESTIONS):
        asked = draw(model, seed)
        assert tokens_of(take, asked, "theirs", ticket(give, asked, "mine")) == asked.answer
    verified.reaches(QUESTIONS)
    pulled.reaches(QUESTIONS * 690)


@pytest.mark.parametrize(
    ("prefilled", "decoded"),
    [("common", "common"), (SERVED_NAME, "theirs"), ("mine", SERVED_NAME)],
    ids=["another content", "an adapter on the decode node alone", "an adapter on the prefill node alone"],
)
def test_other_content_is_refused_and_poisons_nothing(
    nodes: tuple[Node, Node], model: Dense, prefilled: str, decoded: str
) -> None:
    give, take = nodes
    refused, reads = watch(take.url, "refused", reason=RefusalReason.DIGEST), watch(take.url, "reads")
    for seed in range(50, 50 + QUESTIONS):
        asked = draw(model, seed + 10 * len(prefilled + decoded))
        assert tokens_of(take, asked, decoded, ticket(give, asked, prefilled)) == asked.answer
        following = asked.then(model, [17, 23, 42])
        assert tokens_of(take, following, decoded) == following.answer
    refused.reaches(QUESTIONS)
    assert (refused.grown(), reads.grown()) == (QUESTIONS, 0)
