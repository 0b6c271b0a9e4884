"""Requests of every kind where nothing fails."""

from math import inf

import pytest

from pdproxy.orchestration.forward import ForwardRequest
from pdproxy.request import Endpoint, HeldBody
from tests.orchestration.answers import read_answer, text_of
from tests.orchestration.cluster import FakeCluster
from tests.orchestration.prompts import body_for, prompt_ids, right


@pytest.mark.parametrize("endpoint", Endpoint)
async def test_a_whole_answer_is_the_decode_nodes(endpoint: Endpoint) -> None:
    cluster = FakeCluster()
    got = await cluster.ask(endpoint, body_for(endpoint, stream=False))
    assert (got.status, text_of(endpoint, got.json())) == (200, right(endpoint))
    assert got.route == "disaggregated"
    assert got.headers["content-type"] == "application/json"
    assert got.json()["kv_transfer_params"] is None
    assert cluster.fabric.pulled == 1
    assert cluster.fabric.released == set()
    await cluster.settle()


@pytest.mark.parametrize("endpoint", Endpoint)
async def test_a_stream_is_passed_on_to_its_end(endpoint: Endpoint) -> None:
    cluster = FakeCluster()
    got = await cluster.ask(endpoint, body_for(endpoint, stream=True))
    answer = read_answer(endpoint, got.body)
    assert (got.status, answer.texts[0], answer.error, answer.ended) == (200, right(endpoint), None, True)
    assert got.headers["content-type"].startswith("text/event-stream")
    assert cluster.fabric.pulled == 1
    assert cluster.count("pdproxy_requests_total", endpoint=endpoint, outcome="ok") == 1
    await cluster.settle()


async def test_our_own_additions_are_not_in_the_stream() -> None:
    cluster = FakeCluster()
    got = await cluster.ask(Endpoint.COMPLETIONS, body_for(Endpoint.COMPLETIONS, stream=True))
    answer = read_answer(Endpoint.COMPLETIONS, got.body)
    assert answer.usage is None
    assert all(chunk["choices"][0].get("token_ids") is None for chunk in answer.chunks)
    assert all(chunk["choices"][0].get("prompt_token_ids") is None for chunk in answer.chunks)


async def test_cached_tokens_are_the_prefill_nodes_in_answers_and_streams() -> None:
    cluster = FakeCluster()
    got = await cluster.ask(Endpoint.CHAT, body_for(Endpoint.CHAT, stream=False))
    assert got.json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}
    asked = body_for(Endpoint.CHAT, stream=True, stream_options={"include_usage": True})
    answer = read_answer(Endpoint.CHAT, (await cluster.ask(Endpoint.CHAT, asked)).body)
    assert answer.usage is not None
    assert answer.usage["prompt_tokens_details"] == {"cached_tokens": 1}
    assert answer.usage["prompt_tokens"] == len(prompt_ids(Endpoint.CHAT))
    await cluster.settle()


@pytest.mark.parametrize("endpoint", Endpoint)
@pytest.mark.parametrize("stream", [True, False])
async def test_recomputing_is_seen(endpoint: Endpoint, stream: bool) -> None:
    cluster = FakeCluster(prefills=1, decodes=1)
    cluster.fabric.deaf = True
    got = await cluster.ask(endpoint, body_for(endpoint, stream=stream))
    assert got.status == 200
    assert cluster.count("pdproxy_recomputed_total") == 1
    assert got.headers.get("x-pdproxy-recomputed") == (None if stream else "1")
    answer = got.body.replace(b": ", b":")
    served = [name for name in (b'"cached_tokens":1', b'"cache_read_input_tokens":1') if name in answer]
    assert served == [], "what the prefill node had cached served nobody"
    await cluster.settle()


@pytest.mark.parametrize("endpoint", Endpoint)
@pytest.mark.parametrize("stream", [True, False])
async def test_a_ticket_that_was_used_is_no_recomputing(endpoint: Endpoint, stream: bool) -> None:
    cluster = FakeCluster(prefills=1, decodes=1)
    got = await cluster.ask(endpoint, body_for(endpoint, stream=stream))
    assert cluster.count("pdproxy_recomputed_total") == 0
    assert cluster.count("pdproxy_tokens_total", kind="prompt") == len(prompt_ids(endpoint))
    if endpoint in (Endpoint.MESSAGES, Endpoint.RESPONSES):
        name = b'"cache_read_input_tokens":1' if endpoint is Endpoint.MESSAGES else b'"cached_tokens":1,'
        assert name in got.body.replace(b": ", b":"), "the prefill node's"
    await cluster.settle()


async def test_several_prompts_are_answered_in_order() -> None:
    cluster = FakeCluster()
    prompts = ["alpha beta gamma", [5, 6, 7, 8], "delta"]
    for stream in (False, True):
        bodies = [{"prompt": prompt, "max_tokens": 4, "stream": stream, "temperature": 0} for prompt in prompts]
        single = [await cluster.ask(Endpoint.COMPLETIONS, body) for body in bodies]
        merged_prompts: list[object] = ["alpha beta gamma", "delta"]
        both = await cluster.ask(Endpoint.COMPLETIONS, {**bodies[0], "prompt": merged_prompts})
        if stream:
            answer = read_answer(Endpoint.COMPLETIONS, both.body)
            assert answer.texts == {
                0: read_answer(Endpoint.COMPLETIONS, single[0].body).texts[0],
                1: read_answer(Endpoint.COMPLETIONS, single[2].body).texts[0],
            }
            assert (answer.ended, len(answer.ids)) == (True, 1)
        else:
            texts = [choice["text"] for choice in both.json()["choices"]]
            assert texts == [single[index].json()["choices"][0]["text"] for index in (0, 2)]
            assert [choice["index"] for choice in both.json()["choices"]] == [0, 1]
            assert both.json()["usage"]["completion_tokens"] == 8
        await cluster.settle()


@pytest.mark.parametrize("stream", [True, False])
async def test_several_answers_share_a_hand_over(stream: bool) -> None:
    cluster = FakeCluster()
    got = await cluster.ask(Endpoint.COMPLETIONS, body_for(Endpoint.COMPLETIONS, stream=stream, n=3))
    assert got.status == 200
    assert cluster.fabric.pulled == 1
    assert cluster.prefills[0].seen[0].body["kv_transfer_params"]["pdproxy_readers"] == 3
    await cluster.settle()


async def test_an_unknown_model_is_404() -> None:
    cluster = FakeCluster()
    got = await cluster.ask(Endpoint.CHAT, {**body_for(Endpoint.CHAT, stream=False), "model": "other"})
    assert got.status == 404
    message = "The model `other` does not exist. Valid aliases: tiny."
    assert got.json()["error"] == {"message": message, "type": "NotFoundError", "param": "model", "code": 404}


async def test_the_fingerprint_stays_with_the_finish() -> None:
    cluster = FakeCluster()
    plain = await cluster.ask(Endpoint.CHAT, body_for(Endpoint.CHAT, stream=True))
    asked = body_for(Endpoint.CHAT, stream=True, stream_options={"include_usage": True})
    withusage = await cluster.ask(Endpoint.CHAT, asked)
    marked = [chunk for chunk in read_answer(Endpoint.CHAT, plain.body).chunks if "system_fingerprint" in chunk]
    assert [chunk["choices"][0]["finish_reason"] for chunk in marked] == ["length"]
    marked = [chunk for chunk in read_answer(Endpoint.CHAT, withusage.body).chunks if "system_fingerprint" in chunk]
    assert [chunk["choices"] for chunk in marked] == [[]]


async def test_other_paths_go_to_one_node() -> None:
    cluster = FakeCluster()
    reply = await cluster.orchestrator.forward(
        ForwardRequest("r-1", "POST", "/tokenize", (), HeldBody(b"{}"), "tiny", inf, lambda: True)
    )
    assert (reply.status, reply.body) == (200, b'{"path": "/tokenize", "node": "d0"}')
    await cluster.settle()
