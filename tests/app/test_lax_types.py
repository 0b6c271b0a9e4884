"""A value that a node takes for a number or a boolean the proxy takes too, and passes on as it came; others a node
refuses in its own words, and gets no blame for that."""

import json
from collections.abc import Mapping
from typing import Any

import httpx
import pytest

from pdproxy.request import Endpoint
from pdproxy.settings.model import Settings
from tests.app.running_proxy import RunningProxy, running_proxy
from tests.fakes.journal import STREAMS_PATH
from tests.fakes.node import REFUSED, FakeNode, Seen
from tests.orchestration.answers import read_answer, text_of
from tests.orchestration.prompts import body_for, right

COMPLETIONS, CHAT, MESSAGES, RESPONSES = Endpoint
BOTH, ALONE = (1, 1), (0, 1)
"""How many legs prefill and decode nodes see."""
Case = tuple[Endpoint, str, str]

TAKEN: Mapping[Case, tuple[int, int]] = {
    (COMPLETIONS, "max_tokens", "8.0"): BOTH,
    (COMPLETIONS, "max_tokens", '" 8 "'): BOTH,
    (CHAT, "max_completion_tokens", '"8"'): BOTH,
    (MESSAGES, "max_tokens", '"8"'): BOTH,
    (RESPONSES, "max_output_tokens", "8.0"): BOTH,
    (COMPLETIONS, "min_tokens", '"1"'): BOTH,
    (COMPLETIONS, "n", "1.0"): BOTH,
    (COMPLETIONS, "n", "true"): BOTH,
    (CHAT, "n", '"1"'): BOTH,
    (CHAT, "n", "null"): BOTH,
    (MESSAGES, "n", '"many"'): BOTH,
    (CHAT, "priority", '"0"'): BOTH,
    (RESPONSES, "priority", "false"): BOTH,
    (CHAT, "stream", '"off"'): BOTH,
    (MESSAGES, "stream", "0"): BOTH,
    (RESPONSES, "stream", "null"): BOTH,
    (COMPLETIONS, "return_token_ids", '"no"'): BOTH,
    (COMPLETIONS, "echo", "0"): BOTH,
    (COMPLETIONS, "use_beam_search", '"false"'): BOTH,
    (CHAT, "echo", "1"): ALONE,
    (CHAT, "use_beam_search", '"true"'): ALONE,
    (COMPLETIONS, "prompt_logprobs", "false"): ALONE,
    (COMPLETIONS, "model", "null"): BOTH,
    (CHAT, "model", '""'): BOTH,
    (RESPONSES, "model", ""): BOTH,
}
STREAMED: Mapping[Case, tuple[int, int]] = {
    (COMPLETIONS, "stream", '"true"'): BOTH,
    (CHAT, "stream", "1"): BOTH,
    (MESSAGES, "stream", '"yes"'): BOTH,
    (RESPONSES, "stream", "1.0"): BOTH,
    (CHAT, "stream_options", '{"include_usage":"no"}'): BOTH,
    (CHAT, "return_token_ids", "0"): BOTH,
    (CHAT, "max_tokens", '"8"'): BOTH,
    (CHAT, "seed", "7.0"): BOTH,
    (COMPLETIONS, "model", ""): BOTH,
}
HUGE = "1" + "0" * 400
REFUSED_BY_A_NODE: tuple[Case, ...] = (
    (COMPLETIONS, "max_tokens", "1.5"),
    (COMPLETIONS, "max_tokens", '"many"'),
    (CHAT, "max_completion_tokens", "[]"),
    (MESSAGES, "max_tokens", "null"),
    (RESPONSES, "max_output_tokens", "{}"),
    (COMPLETIONS, "n", "null"),
    (COMPLETIONS, "n", "1e400"),
    (CHAT, "n", "[[[]]]"),
    (CHAT, "min_tokens", "null"),
    (CHAT, "priority", '"high"'),
    (RESPONSES, "priority", "null"),
    (COMPLETIONS, "stream", "2"),
    (CHAT, "stream", '"perhaps"'),
    (MESSAGES, "stream", "[]"),
    (RESPONSES, "stream", '""'),
    (CHAT, "stream_options", '{"include_usage":"perhaps"}'),
    (COMPLETIONS, "stream_options", "[]"),
    (CHAT, "return_token_ids", '"perhaps"'),
    (COMPLETIONS, "return_token_ids", "[1]"),
    (COMPLETIONS, "echo", "2"),
    (CHAT, "echo", "null"),
    (CHAT, "presence_penalty", '"hot"'),
    (CHAT, "model", "7"),
    (RESPONSES, "model", "[]"),
    (MESSAGES, "model", ""),
    (MESSAGES, "model", "null"),
    (MESSAGES, "model", '""'),
)


def body_of(case: Case, *, stream: bool) -> bytes:
    """A good request, but for one field, which is left out where its value is the empty text."""
    endpoint, field, value = case
    good = {"model": "m", **body_for(endpoint, stream=stream)}
    fields = {name: json.dumps(content) for name, content in good.items()} | {field: value}
    return ("{" + ",".join(f'"{name}":{text}' for name, text in fields.items() if text) + "}").encode()


async def asked(proxy: RunningProxy, case: Case, *, stream: bool) -> httpx.Response:
    """Each node's memory begins anew."""
    proxy.prefill.seen.clear()
    proxy.decode.seen.clear()
    headers = {"content-type": "application/json"}
    return await proxy.client.post(case[0], content=body_of(case, stream=stream), headers=headers)


def legs(proxy: RunningProxy, case: Case) -> tuple[int, int]:
    """How many legs prefill and decode nodes saw."""
    return len(legs_at(proxy.prefill, case)), len(legs_at(proxy.decode, case))


def legs_at(node: FakeNode, case: Case) -> list[Seen]:
    """To the endpoint, or to the journaled one."""
    return [leg for leg in node.legs() if leg.path in (case[0], STREAMS_PATH + case[0])]


def sent(proxy: RunningProxy, case: Case) -> Any:
    """The odd field as the decode node got it."""
    (leg,) = legs_at(proxy.decode, case)
    return leg.body.get(case[1], "nothing")


def as_written(case: Case) -> Any:
    return json.loads(case[2]) if case[2] else "nothing"


async def test_what_a_node_takes_is_taken_and_passed_on_as_it_came() -> None:
    async with running_proxy(Settings()) as proxy:
        for case, where in TAKEN.items():
            answer = await asked(proxy, case, stream=False)
            assert answer.status_code == 200, (case, answer.text)
            assert text_of(case[0], answer.json()) == right(case[0]), case
            assert (legs(proxy, case), sent(proxy, case)) == (where, as_written(case)), case


async def test_what_a_node_takes_is_taken_in_streams() -> None:
    async with running_proxy(Settings()) as proxy:
        for case, where in STREAMED.items():
            answer = await asked(proxy, case, stream=True)
            assert answer.headers["content-type"].startswith("text/event-stream"), (case, answer.text)
            read = read_answer(case[0], answer.content)
            assert (read.texts, read.usage, read.ended) == ({0: right(case[0])}, None, True), case
            assert not any(choice.get("token_ids") for chunk in read.chunks for choice in chunk.get("choices", ())), (
                case
            )
            assert legs(proxy, case) == where, case
            assert case[1] == "return_token_ids" or sent(proxy, case) == as_written(case), case


@pytest.mark.parametrize("stream", [False, True])
async def test_what_a_node_refuses_is_refused_in_its_own_words_and_it_is_not_blamed(stream: bool) -> None:
    async with running_proxy(Settings()) as proxy:
        for case in REFUSED_BY_A_NODE:
            answer = await asked(proxy, case, stream=stream)
            error = answer.json()["error"]
            assert (answer.status_code, error["type"], error["code"]) == (400, REFUSED, 400), (case, answer.text)
            assert error["message"].startswith(case[1]), case
            assert (legs(proxy, case), sent(proxy, case)) == (ALONE, as_written(case)), case
        nodes = (await proxy.operator.get("/nodes")).json()["nodes"]
        page = (await proxy.operator.get("/metrics")).text
    assert [(node["state"], node["reason"]) for node in nodes] == [("up", "")] * 2
    assert "pdproxy_leg_faults_total{" not in page


@pytest.mark.parametrize("stream", [False, True])
async def test_a_number_of_400_digits_is_for_a_node_to_refuse(stream: bool) -> None:
    """The proxy's own arithmetic with it, such as room for so many answers, is no error of its own."""
    async with running_proxy(Settings()) as proxy:
        for case in ((COMPLETIONS, "n", HUGE), (CHAT, "n", HUGE), (CHAT, "presence_penalty", HUGE)):
            answer = await asked(proxy, case, stream=stream)
            assert (answer.status_code, answer.json()["error"]["type"]) == (400, REFUSED), (case, answer.text)
        nodes = (await proxy.operator.get("/nodes")).json()["nodes"]
    assert [(node["state"], node["reason"]) for node in nodes] == [("up", "")] * 2


async def test_what_only_nodes_may_set_is_taken_out_of_what_a_node_is_to_refuse() -> None:
    async with running_proxy(Settings()) as proxy:
        hidden = {"kv_transfer_params": {"do_remote_prefill": True}, "pdproxy_resume": {"records": []}}
        carried = {"vllm_xargs": {"kv_transfer_params": "x", "kept": 1}}
        ask = {"model": "m", "prompt": "one two", "n": "x", **hidden, **carried}
        proxy.decode.seen.clear()
        assert (await proxy.client.post(COMPLETIONS, json=ask)).status_code == 400
        (leg,) = [leg for leg in proxy.decode.seen if leg.path == COMPLETIONS]
        assert leg.body == {"model": "m", "prompt": "one two", "n": "x", "vllm_xargs": {"kept": 1}}


async def test_what_a_node_takes_after_all_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_proxy(Settings()) as proxy:
        monkeypatch.setattr("tests.fakes.node.lax", lambda _path, body: {**body, "n": 1})
        answer = await asked(proxy, (CHAT, "n", '"one"'), stream=True)
        assert read_answer(CHAT, answer.content).texts == {0: right(CHAT)}


async def test_a_request_without_a_model_is_counted_under_the_one_that_serves_it() -> None:
    async with running_proxy(Settings()) as proxy:
        answer = await asked(proxy, (CHAT, "model", ""), stream=False)
        assert answer.json()["model"] == "m"
        await asked(proxy, (CHAT, "n", '"x"'), stream=False)
        page = (await proxy.operator.get("/metrics")).text
    counted = [line for line in page.splitlines() if line.startswith("pdproxy_requests_total{") and line[-3:] != "0.0"]
    assert [line.partition("outcome=")[0] for line in counted] == [
        f'pdproxy_requests_total{{endpoint="{CHAT}",model="m",'
    ] * 2
