"""vLLM's own `NixlConnector` with a hybrid model, without our connector: a column of `docs/tested.md`.

The two nodes have nothing of this project but the class that lets a CPU sample with a seed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest

from deploy.local.model.quiz import quiz
from deploy.local.node import KV_ROLES, Node, NodeSpec, Role
from deploy.local.stack import logs_of, pair_specs, start_nodes
from deploy.local.supervise import Supervisor
from tests.e2e.legs import Completion, Params, complete, prefill
from tests.e2e.metrics_reader import read

pytestmark = [pytest.mark.e2e, pytest.mark.own_engines, pytest.mark.long]

LENGTH = 1500
"""Tokens: five blocks and a part of one."""
BLOCK = 256
TRANSFERS = "vllm:nixl_xfer_time_seconds_count"


def stock(spec: NodeSpec) -> NodeSpec:
    """A node with vLLM's connector. `kv_load_failure_policy` is ours, so that the answers can be compared."""
    config = {"kv_connector": "NixlConnector", "kv_role": KV_ROLES[spec.role], "kv_load_failure_policy": "recompute"}
    return replace(
        spec,
        prefix_match_unit=None,
        more_arguments=("--kv-transfer-config", json.dumps(config)),
        more_environment={"VLLM_PLUGINS": ""},
    )


@pytest.fixture(scope="module")
def nodes() -> Iterator[tuple[Node, Node]]:
    """A prefill and a decode node."""
    with Supervisor(logs_of("stock-nixl")) as supervisor:
        give, take = start_nodes(supervisor, [stock(spec) for spec in pair_specs()], print)
        assert (give.spec.role, take.spec.role) == (Role.PREFILL, Role.DECODE)
        yield give, take


def handed_over(nodes: tuple[Node, Node], prompt: str, ticket: Params | None = None) -> Completion:
    give, take = nodes
    return complete(take.url, prompt, params=ticket or prefill(give.url, prompt))


def test_a_hand_over_is_right(nodes: tuple[Node, Node]) -> None:
    question, before = quiz(801, LENGTH), read(nodes[1].url, TRANSFERS)
    said, alone = handed_over(nodes, question.prompt()), complete(nodes[0].url, question.prompt())
    assert said.text == alone.text == question.answer
    assert said.logprobs == pytest.approx(alone.logprobs, abs=0.05)
    assert read(nodes[1].url, TRANSFERS) > before


def test_the_second_turn_pulls_only_what_is_new(nodes: tuple[Node, Node]) -> None:
    """vLLM counts the decode node's hits by attention alone where a connector brings the state (0.32 and later)."""
    talk = quiz(802, LENGTH)
    handed_over(nodes, talk.prompt())
    before = local_hits(nodes[1])
    assert handed_over(nodes, talk.at_turn(2).prompt()).text == talk.at_turn(2).answer
    assert local_hits(nodes[1]) - before >= LENGTH // BLOCK * BLOCK - BLOCK


def local_hits(node: Node) -> float:
    """Tokens that the node's own cache had."""
    return read(node.url, "vllm:prefix_cache_hits_total")


def test_nothing_is_hit_without_a_ticket(nodes: tuple[Node, Node]) -> None:
    """The state that was read is not registered in the cache: the next turn is computed from its first token."""
    talk = quiz(803, LENGTH)
    handed_over(nodes, talk.prompt())
    said = complete(nodes[1].url, talk.at_turn(2).prompt())
    assert (said.text, said.cached) == (talk.at_turn(2).answer, 0)


def test_the_ticket_of_another_prompt_gives_a_wrong_answer(nodes: tuple[Node, Node]) -> None:
    """The right ticket of that prompt then also gives a wrong answer, for the wrong blocks are in the prefix cache."""
    one, other = quiz(804, LENGTH), quiz(805, LENGTH)
    said = handed_over(nodes, other.prompt(), prefill(nodes[0].url, one.prompt()))
    again = handed_over(nodes, other.prompt())
    print(f"right: {other.answer!r}; with another's ticket: {said.text!r}; then with its own: {again.text!r}")
    assert said.text != other.answer
