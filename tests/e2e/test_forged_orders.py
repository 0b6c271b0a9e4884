"""A resume order that the node did not sign, such as a client's, ends its own request and no other.

Orders that the node signs itself are covered by the tests of streams that move.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from connector.resume_order import KEY, sign
from deploy.local.model.quiz import quiz
from deploy.local.node import SERVED_NAME
from tests.e2e.conftest import Pair
from tests.e2e.metrics_reader import read, watch

pytestmark = pytest.mark.e2e

QUESTION = quiz(seed=815, tokens=400).prompt()
FORGED: tuple[Any, ...] = (7, {"token_ids": [34, 35], "mac": "0" * 64}, sign(b"a guessed secret", "cmpl-x-0", [34, 35]))


async def complete(url: str, params: Any, *, stream: bool = False) -> httpx.Response:
    body = {"model": SERVED_NAME, "prompt": QUESTION, "max_tokens": 8, "temperature": 0, "stream": stream}
    async with httpx.AsyncClient(trust_env=False, timeout=120) as client:
        return await client.post(f"{url}/v1/completions", json={**body, "kv_transfer_params": params})


async def test_a_forged_order_is_an_error_and_the_others_are_answered(pair: Pair) -> None:
    refused = watch(pair.decode.url, "resumes_refused")
    honest = (await complete(pair.decode.url, None)).json()["choices"][0]["text"]
    wrong = [complete(pair.decode.url, {KEY: order}) for order in FORGED]
    *forged, beside = await asyncio.gather(*wrong, complete(pair.decode.url, None))
    assert [answer.status_code for answer in forged] == [500] * len(FORGED)
    assert beside.json()["choices"][0]["text"] == honest
    refused.reaches(len(FORGED))


async def test_a_stream_with_one_has_an_error_and_no_text(pair: Pair) -> None:
    answer = await complete(pair.decode.url, {KEY: FORGED[-1]}, stream=True)
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    assert [list(event) for event in events] == [["error"]]


def test_the_nodes_say_whether_streams_can_go_on_there(pair: Pair) -> None:
    for node in (pair.prefill, pair.decode):
        assert read(node.url, "pdproxy_connector_info", resume="true") == 1
