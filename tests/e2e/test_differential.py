"""Odd values in every field of vLLM's own schema: the proxy's answer is one engine's answer.

`make test-differential` runs the whole grid; this test covers every field and every odd value once.
"""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from deploy.local.model.quiz import Quiz, quiz
from deploy.local.node import SERVED_NAME, Node
from deploy.local.stack import Proxy
from pdproxy.nodes.node import State
from pdproxy.request import Endpoint
from tests.differential.comparing import compare
from tests.differential.grid import Case, cases, some_of
from tests.differential.ledger import Difference, read, unexplained, unused

pytestmark = pytest.mark.e2e

LEDGER = Path(__file__).parents[1] / "differential" / "ledger.toml"
PROMPT_TOKENS = 120
SHOWN = 20


def good_bodies(question: Quiz) -> Mapping[Endpoint, Mapping[str, Any]]:
    """A good request for each endpoint, with a question that the tiny model answers in one way only."""
    common = {"model": SERVED_NAME, "temperature": 0}
    messages = question.messages()
    return {
        Endpoint.CHAT: {**common, "messages": messages, "max_tokens": 6},
        Endpoint.COMPLETIONS: {**common, "prompt": question.prompt(), "max_tokens": 6},
        Endpoint.RESPONSES: {**common, "input": messages, "max_output_tokens": 6},
        Endpoint.MESSAGES: {**common, "messages": messages, "max_tokens": 6},
    }


def grid_of(node: Node) -> list[Case]:
    """All cases, from the node's own schema."""
    document = httpx.get(f"{node.url}/openapi.json", trust_env=False, timeout=60).json()
    return list(cases(document, good_bodies(quiz(1, PROMPT_TOKENS))))


def found_by(proxy: Proxy, reference: Node, chosen: Sequence[Case]) -> list[Difference]:
    """All differences. No node may have been blamed for a request."""
    found = asyncio.run(compare(reference.url, proxy.url, chosen))
    nodes = httpx.get(f"{proxy.admin_url}/nodes", trust_env=False).json()["nodes"]
    assert {node["state"] for node in nodes} == {State.UP}, nodes
    return found


def report(differences: Sequence[Difference]) -> str:
    """The first differences, with both answers."""
    shown = "\n\n".join(f"{each.case.name}\n{each.told}" for each in differences[:SHOWN])
    return f"{len(differences)} differences have no row in {LEDGER.name}; the first ones:\n\n{shown}"


def test_a_slice_of_the_grid_differs_nowhere_without_a_reason(proxy: Proxy, reference: Node) -> None:
    rows = read(LEDGER.read_text(encoding="utf-8"))
    new = unexplained(found_by(proxy, reference, some_of(grid_of(reference))), rows)
    assert not new, report(new)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_the_whole_grid_differs_nowhere_without_a_reason(proxy: Proxy, reference: Node) -> None:
    rows, whole = read(LEDGER.read_text(encoding="utf-8")), grid_of(reference)
    found = found_by(proxy, reference, whole)
    new, stale = unexplained(found, rows), unused(found, rows)
    print(f"{len(whole)} cases on four endpoints, {len(found)} differ, {len(new)} of them without a reason")
    assert not new, report(new)
    assert not stale, [row.reason for row in stale]
