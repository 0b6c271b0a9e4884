"""Grammars of resumed requests, xgrammar's own, on vLLM's real scheduler: they stand where they stood when it was cut.

What a request may sample next is compared with the same request that was not cut.
"""

from __future__ import annotations

import time
from copy import deepcopy
from typing import Any

import pytest
from vllm.config import ModelConfig
from vllm.reasoning import ReasoningParser
from vllm.sampling_params import StructuredOutputsParams
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.v1.engine import FinishReason
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from connector.resume_order import KEY, sign
from tests.connector.harness import MODEL, Node, make_node, prompt, received, take_ticket

pytestmark = [
    pytest.mark.usefixtures("every_pace"),
    # vLLM 0.32 makes xgrammar's matchers so.
    pytest.mark.filterwarnings("ignore:max_rollback_tokens is deprecated:DeprecationWarning"),
]

TEXT = "abc-12 def-34 "
REGEX = "([a-f]{3}-[0-9]{2} ){2}"
MODEL_CONFIG = ModelConfig(model=str(MODEL), dtype="bfloat16", max_model_len=4096)


def ids(text: str) -> list[int]:
    found: list[int] = cached_tokenizer_from_config(MODEL_CONFIG).encode(text)
    return found


END = ids("=")[0]
"""The token that ends reasoning in these tests."""


class EqualsEndsReasoning(ReasoningParser):
    """Reasoning ends with the first token END that is produced."""

    def is_reasoning_end(self, input_ids: Any) -> bool:
        return END in input_ids

    def is_reasoning_end_streaming(self, input_ids: Any, delta_ids: Any) -> bool:
        assert list(input_ids)[-len(delta_ids) :] == list(delta_ids)
        return END in delta_ids

    def extract_content_ids(self, input_ids: list[int]) -> list[int]:
        raise NotImplementedError

    def extract_reasoning(self, model_output: str, request: Any) -> tuple[str | None, str | None]:
        raise NotImplementedError

    def extract_reasoning_streaming(self, *args: Any) -> Any:
        raise NotImplementedError


@pytest.fixture
def node() -> Node:
    node = make_node("kv_consumer", engine_id="engine-d")
    config = deepcopy(node.scheduler.vllm_config)
    config.model_config = MODEL_CONFIG
    node.scheduler.structured_output_manager = StructuredOutputManager(config)
    return node


def add(node: Node, name: str, say: list[int], old: int, params: Any = None, regex: str = REGEX) -> Request:
    """A request that says all of `say`, of which the other node has produced the first `old`. Its grammar is compiled
    from the moment on in which vLLM's engine takes a request in, which is before the scheduler sees it."""
    node.says[name] = say[old:]
    wanted = StructuredOutputsParams(regex=regex)
    wanted._backend = "xgrammar"
    stock = node.scheduler.add_request

    def add_request(request: Request) -> None:
        node.scheduler.structured_output_manager.grammar_init(request)
        stock(request)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(node.scheduler, "add_request", add_request)
        order = {KEY: sign(node.side.resumed.secret, name, say[:old])} if old else {}
        return node.add(name, prompt(100), {**(params or {}), **order}, sampling={"structured_outputs": wanted},
                        max_tokens=len(say))  # fmt: skip


def compiled(request: Request) -> Any:
    """Its grammar, when it is compiled and has taken the tokens in."""
    deadline = time.monotonic() + 10
    while not request.structured_output_request.is_grammar_ready:
        assert time.monotonic() < deadline
        time.sleep(0.002)
    return request.structured_output_request.grammar


def allowed(request: Request) -> set[int]:
    """Which tokens the grammar would let follow."""
    grammar = compiled(request)
    return {token for token in range(1024) if grammar.validate_tokens([token])}


def uncut(node: Node, say: list[int], regex: str = REGEX) -> Request:
    """A request that has said this much of it itself."""
    request = add(node, "uncut", [*say, *say], 0, regex=regex)
    compiled(request)
    for _ in range(100):
        node.step()
        if request.num_output_tokens == len(say):
            return request
    raise AssertionError("it did not say so much")


@pytest.mark.parametrize("old", [1, 3, 4, 7, 13])
def test_the_grammar_is_where_it_was(node: Node, old: int) -> None:
    before = uncut(node, ids(TEXT)[:old])
    request = add(node, "d", ids(TEXT), old)
    assert allowed(request) == allowed(before) != set()


def test_it_goes_on_with_it(node: Node) -> None:
    request = add(node, "d", ids(TEXT), 9)
    compiled(request)
    outputs = node.run_out("d")
    assert outputs[-1].finish_reason is FinishReason.LENGTH
    assert list(request.output_token_ids) == ids(TEXT)


def test_it_is_not_scheduled_before_its_grammar_has_the_tokens(node: Node) -> None:
    manager = node.scheduler.structured_output_manager
    gate = manager.executor.submit(time.sleep, 0.2)
    for _ in range(manager.executor._max_workers - 1):
        manager.executor.submit(time.sleep, 0.2)
    request = add(node, "d", ids(TEXT), 9)
    node.step()
    assert request.status is RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    gate.result()
    compiled(request)
    assert node.run_out("d")[-1].finish_reason is FinishReason.LENGTH


def test_with_a_ticket_the_grammar_takes_the_tokens_in_once(node: Node) -> None:
    ticket = take_ticket(make_node("kv_producer", engine_id="engine-p"), prompt(100))
    request = add(node, "d", ids(TEXT), 9, ticket)
    compiled(request)
    node.step()
    assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    node.step(received(node, "d"))
    node.run_out("d")
    assert list(request.output_token_ids) == ids(TEXT)


def test_a_preempted_one_keeps_it(node: Node) -> None:
    request = add(node, "d", ids(TEXT), 4)
    compiled(request)
    node.step()
    node.step()
    node.scheduler.running.remove(request)
    node.scheduler._preempt_request(request, 0.0)
    node.run_out("d")
    assert list(request.output_token_ids) == ids(TEXT)


def test_tokens_that_the_grammar_does_not_allow_end_the_request(node: Node) -> None:
    request = add(node, "d", ids("abc-xx def"), 7)
    compiled(request)
    outputs = node.run_out("d")
    assert [(each.finish_reason, each.new_token_ids) for each in outputs] == [(FinishReason.ERROR, [])]
    assert node.counts("resumes_refused") == {"grammar": 1}


def test_a_grammar_that_does_not_compile_ends_it_as_ever(node: Node) -> None:
    request = add(node, "d", ids(TEXT), 4, regex="(")
    compiled(request)
    assert node.run_out("d")[-1].finish_reason is FinishReason.ERROR
    assert node.counts("resumes_refused") == {}


# ---- grammars that begin where reasoning ends

THOUGHT = [*ids("12>abc"), END]


@pytest.fixture
def thinking(node: Node) -> Node:
    node.scheduler.structured_output_manager.reasoner_cls = EqualsEndsReasoning
    return node


@pytest.mark.parametrize("old", [1, 6, 7, 8, 11, 18])
def test_reasoning_that_has_ended_stays_ended(thinking: Node, old: int) -> None:
    say = [*THOUGHT, *ids(TEXT)]
    before = uncut(thinking, say[:old])
    request = add(thinking, "d", say, old)
    assert allowed(request) == allowed(before)
    mine, theirs = request.structured_output_request, before.structured_output_request
    assert bool(mine.reasoning_ended) is bool(theirs.reasoning_ended) is (old >= len(THOUGHT))
    thinking.run_out("d", 100)
    assert list(request.output_token_ids) == say
