"""Resumed requests on vLLM's real scheduler: with what another node produced they go on as after a preemption."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.request import Request, RequestStatus

from connector.counters import ReadOutcome
from connector.resume_order import KEY, sign
from connector.resumed_requests import CPU_WORKER, ResumeLimits
from connector.ticket_fields import RefusalReason
from tests.connector.harness import DENSE, Node, lost, make_node, prompt, received, take_ticket

pytestmark = pytest.mark.usefixtures("every_pace")

OLD = [21, 22, 23]
"""The tokens that the other node has produced."""


@pytest.fixture
def prefill() -> Node:
    return make_node("kv_producer", engine_id="engine-p")


@pytest.fixture
def node() -> Node:
    return make_node("kv_consumer", engine_id="engine-d")


def order(node: Node, name: str, ids: list[int]) -> dict[str, Any]:
    return {KEY: sign(node.side.resumed.secret, name, ids)}


def resume(
    node: Node, name: str, tokens: list[int], params: Any = None, *, old: list[int] = OLD, **more: Any
) -> Request:
    """As the node's API server sends a stream's request in. `max_tokens`: 8 in all."""
    return node.add(name, tokens, {**(params or {}), **order(node, name, old)}, **{"max_tokens": 8, **more})


def told(node: Node, name: str) -> list[int] | None:
    """The tokens of a new request that the workers learn beside its prompt."""
    found = [data for plan in node.planned for data in plan.scheduled_new_reqs if data.req_id == name]
    assert len(found) == 1
    assert found[0].prompt_token_ids == prompt(100)
    ids: list[int] | None = found[0].prefill_token_ids
    # V2 gets the request's own list, to which the engine in this process adds what it samples.
    return None if ids is None else ids[:103]


def computed(node: Node, name: str) -> list[int]:
    """The tokens of a request that were computed, by step, from its first on."""
    return [step[name] for step in node.scheduled if name in step]


def ends_as(output: EngineCoreOutput) -> FinishReason | None:
    reason: FinishReason | None = output.finish_reason
    return reason


# ---- it goes on


def test_it_goes_on_where_the_other_node_stopped(node: Node) -> None:
    free = node.free_blocks
    request = resume(node, "d", prompt(100))
    outputs = node.run_out("d")
    assert len(outputs) == 8 - 3
    assert list(request.output_token_ids) == [*OLD, *[7] * 5]
    assert (sum(computed(node, "d")), told(node, "d")) == (103 + 4, [*prompt(100), *OLD])
    assert ends_as(outputs[-1]) is FinishReason.LENGTH
    assert node.counts("resumed_requests") == {"": 1}
    assert node.counts("resumed_tokens") == {"": 3}
    assert (node.free_blocks, len(node.side.resumed)) == (free, 0)


def test_no_other_node_counts_its_prompt_again(node: Node) -> None:
    resume(node, "d", prompt(100))
    outputs = node.run_out("d")
    assert node.counts("prompt_tokens") == {}
    assert all(output.prefill_stats is None for output in outputs)


def test_connectors_and_workers_do_not_see_the_order(prefill: Node, node: Node) -> None:
    assert resume(node, "d", prompt(100)).kv_transfer_params is None
    assert KEY not in resume(node, "e", prompt(100), take_ticket(prefill, prompt(100))).kv_transfer_params


def test_an_order_without_tokens_is_a_request_from_its_start(node: Node) -> None:
    resume(node, "d", prompt(100), old=[])
    assert len(node.run_out("d")) == 8
    assert node.counts("prompt_tokens") == {"computed": 100}
    assert node.counts("resumed_requests") == {"": 1}


def test_every_sample_of_a_request_has_its_own(node: Node) -> None:
    requests = [resume(node, f"{at}_d", prompt(100), old=[30 + at] * at) for at in range(1, 4)]
    for _ in range(20):
        node.step()
    assert [list(each.output_token_ids[:at]) for at, each in enumerate(requests, 1)] == [[31], [32] * 2, [33] * 3]
    assert {each.num_output_tokens for each in requests} == {8}


def test_a_local_hit_may_go_beyond_the_prompt() -> None:
    """As on the node that produced the tokens itself, or has computed them for a stream that left it."""
    node = make_node("kv_consumer", DENSE, engine_id="engine-d")
    node.add("first", prompt(100), max_tokens=80)
    node.run_out("first", 90)
    resume(node, "d", prompt(100), old=[7] * 60, max_tokens=70)
    assert len(node.run_out("d")) == 10
    assert computed(node, "d")[0] == 16


# ---- with a ticket


def test_its_ticket_brings_the_prompt_and_it_computes_what_it_had(prefill: Node, node: Node) -> None:
    request = resume(node, "d", prompt(100), take_ticket(prefill, prompt(100)))
    node.step()
    assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    read = node.metas[-1].reads["d"]
    assert (read.hit_tokens, read.pull_tokens) == (0, 99)
    node.step(received(node, "d"))
    assert len(node.run_out("d")) == 5
    assert (sum(computed(node, "d")), told(node, "d")) == (1 + 3 + 4, [*prompt(100), *OLD])


def test_a_failed_read_is_computed_with_what_it_had(prefill: Node, node: Node) -> None:
    request = resume(node, "d", prompt(100), take_ticket(prefill, prompt(100)))
    node.step()
    node.step(lost(node, ReadOutcome.NOT_HELD, "d"))
    assert len(node.run_out("d")) == 5
    assert sum(computed(node, "d")) == 103 + 4
    assert list(request.output_token_ids[:3]) == OLD


def test_a_ticket_for_the_prompt_with_what_it_had_is_refused(prefill: Node, node: Node) -> None:
    resume(node, "d", prompt(100), take_ticket(prefill, [*prompt(100), *OLD]))
    assert len(node.run_out("d")) == 5
    assert node.counts("refused") == {"number": 1}


def test_a_preempted_one_goes_on_from_there(prefill: Node, node: Node) -> None:
    request = resume(node, "d", prompt(100), take_ticket(prefill, prompt(100)))
    node.step()
    node.step(received(node, "d"))
    for _ in range(2):
        node.step()
    node.scheduler.running.remove(request)
    node.scheduler._preempt_request(request, 0.0)
    node.run_out("d")
    assert list(request.output_token_ids) == [*OLD, *[7] * 5]


def test_one_that_ends_while_it_waits_leaves_nothing(prefill: Node, node: Node) -> None:
    free = node.free_blocks
    resume(node, "d", prompt(100), take_ticket(prefill, prompt(100)))
    node.step()
    node.abort("d")
    node.step(received(node, "d"))
    assert (node.free_blocks, len(node.side.resumed)) == (free, 0)


# ---- it is refused


def refused(node: Node, name: str) -> dict[str, int]:
    """The request ends with an error, and not a token of it is computed."""
    outputs = node.run_out(name)
    assert [(ends_as(each), each.new_token_ids) for each in outputs] == [(FinishReason.ERROR, [])]
    assert computed(node, name) == []
    assert name not in node.scheduler.requests
    return node.counts("resumes_refused")


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (7, "not_an_object"),
        ({"token_ids": OLD}, "bad_field"),
        ({"token_ids": OLD, "mac": "0" * 64}, "bad_signature"),
        ({"token_ids": ["1"], "mac": "0" * 64}, "bad_field"),
    ],
)
def test_an_order_that_the_node_did_not_make_ends_its_request(node: Node, made: Any, reason: str) -> None:
    node.add("d", prompt(100), {KEY: made})
    assert refused(node, "d") == {reason: 1}


def test_another_request_s_order_ends_it_too(node: Node) -> None:
    node.add("d", prompt(100), order(node, "e", OLD))
    assert refused(node, "d") == {"bad_signature": 1}


@pytest.mark.parametrize(
    ("old", "more", "reason"),
    [
        (OLD, {"max_tokens": 3}, "number"),
        ([7] * 3996, {"max_tokens": 5000}, "number"),
        ([21, 1024], {}, "bad_field"),
        (OLD, {"resumable": True}, "unsuitable_request"),
    ],
)
def test_one_that_cannot_go_on_is_ended(node: Node, old: list[int], more: dict[str, Any], reason: str) -> None:
    resume(node, "d", prompt(100), old=old, **more)
    assert refused(node, "d") == {reason: 1}


def test_the_last_token_before_a_limit_is_still_produced(node: Node) -> None:
    resume(node, "d", prompt(100), max_tokens=4)
    resume(node, "e", prompt(100), old=[7] * 3995, max_tokens=5000)
    assert len(node.run_out("d")) == 1
    assert len(node.run_out("e")) == 1


def test_a_refused_one_gives_its_ticket_back_and_others_run(prefill: Node, node: Node) -> None:
    free = node.free_blocks
    node.add("d", prompt(100), {**take_ticket(prefill, prompt(100)), KEY: 7})
    node.add("other", prompt(50, seed=2))
    assert refused(node, "d") == {"not_an_object": 1}
    node.step()
    assert [meta.reads["d"].pull_tokens for meta in node.metas if "d" in meta.reads] == [0]
    node.run_out("other")
    assert node.free_blocks == free


@pytest.mark.parametrize("sampling", [{"prompt_logprobs": 1}, {"structured_outputs": None}])
def test_so_are_those_that_vllm_computes_whole(node: Node, sampling: dict[str, Any]) -> None:
    node.add("d", prompt(100), {KEY: 7}, sampling=sampling)
    assert refused(node, "d") == {"not_an_object": 1}


def test_a_request_that_the_api_server_rejects_is_no_refused_order(node: Node) -> None:
    node.add("d", prompt(100), {"do_remote_prefill": True, KEY: 7}, abort_immediately=True)
    assert node.counts("resumes_refused") == {}


def limits(**changes: Any) -> ResumeLimits:
    return ResumeLimits(
        **{"able": True, "thinking_budgets": False, "max_model_len": 4096, "vocab_size": 973, "speculates": False}
        | changes
    )


@pytest.mark.parametrize(
    ("node_limits", "sampling", "reason"),
    [
        (limits(), {"seed": 1}, None),
        (limits(speculates=True), {}, None),
        (limits(speculates=True), {"seed": 1, "temperature": 0}, None),
        (limits(speculates=True), {"seed": 1}, RefusalReason.UNSUITABLE_REQUEST),
        (limits(able=False), {}, RefusalReason.UNSUITABLE_REQUEST),
        (limits(), {"max_tokens": None}, RefusalReason.NUMBER),
        (limits(), {"thinking_token_budget": 9}, RefusalReason.UNSUITABLE_REQUEST),
        (limits(thinking_budgets=True), {"thinking_token_budget": 9}, None),
    ],
)
def test_what_a_node_cannot_resume(
    node_limits: ResumeLimits, sampling: dict[str, Any], reason: RefusalReason | None
) -> None:
    refusal = node_limits.refusal(SamplingParams(**{"max_tokens": 8, **sampling}), 100, OLD)
    assert (None if refusal is None else refusal.reason) is reason


def test_a_request_without_sampling_is_none() -> None:
    assert limits().refusal(None, 100, OLD) is not None


@pytest.mark.parametrize(
    ("v2", "worker", "able"),
    [
        (True, "any.Worker", True),
        (False, f"pdproxy_connector.{CPU_WORKER}", True),
        (False, "vllm.v1.worker.cpu_worker.CPUWorker", False),
    ],
)
def test_a_node_is_able_by_its_model_runner(v2: bool, worker: str, able: bool) -> None:
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=4096, get_vocab_size=lambda: 973),
        num_speculative_tokens=3,
        parallel_config=SimpleNamespace(worker_cls=worker),
        use_v2_model_runner=v2,
    )
    assert ResumeLimits.of(config) == limits(able=able, thinking_budgets=v2, speculates=True)
