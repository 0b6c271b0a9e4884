"""A stream's second decode node, without the API server's part: a ticket for the prompt, and an order with its tokens.

Both nodes get the secret and name requests as the caller does, so that orders can be made here. One node's uncut answer
is compared with the other's continuation from each cut.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from connector.config import SECRET_VARIABLE
from connector.resume_order import KEY, sign
from deploy.local.model.quiz import quiz
from deploy.local.node import SERVED_NAME
from deploy.local.stack import logs_of, pair_specs, start_nodes
from deploy.local.supervise import Supervisor
from tests.e2e.conftest import REQUEST_TIMEOUT_S, Pair
from tests.e2e.legs import LENGTH, Params, prefill
from tests.e2e.metrics_reader import watch

pytestmark = [pytest.mark.e2e, pytest.mark.own_engines, pytest.mark.long]

SECRET = "known to this test alone"
ENVIRONMENT = {SECRET_VARIABLE: SECRET, "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": "1"}
TOKENS = 24
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "penalties": {"temperature": 0, "presence_penalty": 1.5, "repetition_penalty": 1.3},
    "seed": {"temperature": 2.0, "seed": 5, "presence_penalty": 1.0},
    "regex, seed": {"temperature": 1.5, "seed": 3, "structured_outputs": {"regex": "([a-f]{3}-[0-9]{2} ){30}"}},
}


@pytest.fixture(scope="module")
def known_pair() -> Iterator[Pair]:
    specs = [replace(spec, more_environment=ENVIRONMENT) for spec in pair_specs()]
    with Supervisor(logs_of("resumed_hand_overs")) as supervisor:
        yield Pair(*start_nodes(supervisor, specs, print))


def produced(url: str, name: str, prompt: str, settings: dict[str, Any], params: Params | None = None) -> list[int]:
    """The token ids of a completion that the engine knows as `cmpl-<name>-0`."""
    body = {"model": SERVED_NAME, "prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True, "return_token_ids": True}
    body |= {**settings, "kv_transfer_params": params}
    answer = httpx.post(
        f"{url}/v1/completions",
        json=body,
        headers={"X-Request-Id": name},
        timeout=REQUEST_TIMEOUT_S,
        trust_env=False,
    )
    assert answer.status_code == 200, answer.text
    ids: list[int] = answer.json()["choices"][0]["token_ids"]
    return ids


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("cut", [1, 12, TOKENS - 1])
def test_another_node_goes_on_with_a_ticket_for_the_prompt(known_pair: Pair, case: str, cut: int) -> None:
    give, take = known_pair.prefill.url, known_pair.decode.url
    prompt = quiz(9000 + 100 * list(CASES).index(case) + cut, LENGTH).prompt()
    name = f"{case.replace(', ', '-')}-{cut}"
    uncut = produced(give, f"{name}-uncut", prompt, CASES[case])
    assert len(uncut) == TOKENS
    verified, resumed = watch(take, "reads", outcome="verified"), watch(take, "resumed_requests")
    order = {KEY: sign(SECRET.encode(), f"cmpl-{name}-0", uncut[:cut])}
    assert produced(take, name, prompt, CASES[case], {**prefill(give, prompt), **order}) == uncut[cut:]
    verified.reaches(1)
    assert resumed.grown() == 1
