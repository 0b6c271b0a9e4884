"""Mamba-2 nodes of different tensor-parallel sizes: vLLM's reader reads wrong bytes where it repeated groups.

Without the parts `state_groups` and `state_shapes` of the fingerprint the Granite pairs are read wrong (the first
prompt here by 0.097 nats), and each read is counted as verified. Every offset of every such pair:
`tests/connector/test_peer_layouts.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from connector.ticket_fields import RefusalReason
from deploy.local.model.quiz import quiz
from deploy.local.node import Node, NodeSpec, Role
from deploy.local.stack import logs_of, start_nodes
from deploy.local.supervise import Supervisor
from tests.e2e.legs import complete, prefill
from tests.e2e.mamba_nodes import granite, mamba_node, nemotron_h, write_model
from tests.e2e.metrics_reader import watch
from tests.e2e.test_differences import checked, parts

pytestmark = [pytest.mark.e2e, pytest.mark.long]

LENGTHS = (650, 1000)
"""Tokens of a prompt: two blocks, and three, and a part of one."""
ROUNDING = 0.02
"""Nats."""


@dataclass(frozen=True)
class Ranks:
    """A pair's tensor-parallel sizes, prefill node first, and the groups that each node has over its ranks."""

    make: Callable[[], Any]
    sizes: tuple[int, int]
    groups: tuple[str, str]


PAIRS = {
    "one group, 1 and 2 ranks": Ranks(granite, (1, 2), ("1", "2")),
    "one group, 2 and 1 ranks": Ranks(granite, (2, 1), ("2", "1")),
    "two groups, 1 and 2 ranks": Ranks(nemotron_h, (1, 2), ("2", "2")),
}


@pytest.fixture(params=PAIRS.values(), ids=list(PAIRS))
def started(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Ranks, Node, Node]]:
    ranks: Ranks = request.param
    model = write_model(ranks.make, tmp_path / "model")
    roles = zip((Role.PREFILL, Role.DECODE), ranks.sizes, strict=True)
    specs = [NodeSpec(role.name.lower(), role, 0, 0, tensor_parallel_size=size) for role, size in roles]
    with Supervisor(logs_of("mamba_groups")) as supervisor:
        give, take = start_nodes(supervisor, [mamba_node(spec, model, tmp_path) for spec in specs], print)
        yield ranks, give, take


def test_groups_that_are_repeated_are_refused_by_name_and_others_handed_over(
    started: tuple[Ranks, Node, Node],
) -> None:
    ranks, give, take = started
    here, there = parts(take.url), parts(give.url)
    assert (there["state_groups"], here["state_groups"]) == ranks.groups
    assert here["attention_backend"] == there["attention_backend"] == "CPU_ATTN+MAMBA2_ATTN"
    refused, reads = watch(take.url, "refused", reason=RefusalReason.FINGERPRINT), watch(take.url, "reads")
    for seed, length in enumerate(LENGTHS):
        prompt = quiz(500 + seed, length).prompt()
        ticket = prefill(give.url, prompt, pdproxy_hand_over=f"repeated-groups-{seed}")
        after, right = complete(take.url, prompt, 12, ticket), complete(give.url, prompt, 12)
        assert after.text == right.text
        assert max(abs(one - other) for one, other in zip(after.logprobs, right.logprobs, strict=True)) < ROUNDING
    status, lines = checked(give, take)
    log = take.part.log.read_text(encoding="utf-8")
    if len(set(ranks.groups)) == 1:
        reads.reaches(len(LENGTHS) * ranks.sizes[1])
        assert (refused.grown(), status) == (0, 0)
        return
    refused.reaches(len(LENGTHS))
    assert (reads.grown(), status) == (0, 1)
    said = f"state_groups is {ranks.groups[1]} here, {ranks.groups[0]} on the prefill node: start both with the same"
    assert log.count(f"{said} --tensor-parallel-size") == len(LENGTHS)
    assert [line for line in lines if line.startswith("decode-0: exchanges no tickets: state_groups: ")]
