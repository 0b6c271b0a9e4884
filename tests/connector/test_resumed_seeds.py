"""On a CPU a seed's random numbers go on where they stood: as many are drawn as vLLM's sampler drew for the tokens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from connector.cpu_worker import SeededCPURunner, SeededCPUWorker
from connector.resumed_requests import CPU_WORKER

VOCABULARY = 50


def runner(sampler: TopKTopPSampler) -> Any:
    """Ours, without a model."""
    made: Any = object.__new__(SeededCPURunner)
    made.sampler = SimpleNamespace(topk_topp_sampler=sampler)
    made.input_batch = SimpleNamespace(vocab_size=VOCABULARY)
    return made


def generator() -> torch.Generator:
    made = torch.Generator()
    made.manual_seed(5)
    return made


SAMPLERS = {
    "most CPUs": TopKTopPSampler,
    "64-bit noise": lambda: TopKTopPSampler(use_fp64_gumbel=True),
    "POWER and RISC-V": lambda: _native(TopKTopPSampler()),
}


def _native(sampler: TopKTopPSampler) -> TopKTopPSampler:
    sampler.forward = sampler.forward_native
    return sampler


@pytest.fixture(params=list(SAMPLERS))
def sampler(request: pytest.FixtureRequest) -> TopKTopPSampler:
    return SAMPLERS[request.param]()


@pytest.mark.parametrize("tokens", [1, 2, 17, 300])
def test_the_next_number_is_the_one_that_the_first_node_would_have_drawn(sampler: TopKTopPSampler, tokens: int) -> None:
    drawn, resumed = generator(), generator()
    for _ in range(tokens):
        sampler.forward(torch.randn(2, VOCABULARY), {1: drawn}, None, torch.tensor([0.9, 0.9]))
    runner(sampler)._draw(resumed, tokens)
    assert torch.equal(drawn.get_state(), resumed.get_state())


class Batch:
    """vLLM's, as far as requests enter it."""

    vocab_size = VOCABULARY

    def __init__(self) -> None:
        self.added: list[tuple[str, list[int]]] = []

    def add_request(self, request: Any) -> int:
        self.added.append((request.req_id, list(request.output_token_ids)))
        return len(self.added) - 1


def new(name: str, old: list[int] | None) -> NewRequestData:
    return NewRequestData(name, [1, 2, 3], [], None, None, ([],), 0, None,
                          prefill_token_ids=None if old is None else [1, 2, 3, *old])  # fmt: skip


def test_requests_enter_the_batch_with_what_they_had(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [new("plain", None), new("resumed", [7, 8]), new("at its start", [])]

    def stock(self: Any, plan: Any) -> str:
        for each in plan.scheduled_new_reqs:
            self.input_batch.add_request(SimpleNamespace(req_id=each.req_id, output_token_ids=[], generator=drawn))
        return "what vLLM answers"

    drawn, expected = generator(), generator()
    monkeypatch.setattr(CPUModelRunner, "_update_states", stock)
    made = runner(TopKTopPSampler())
    made.input_batch = Batch()
    assert made._update_states(SimpleNamespace(scheduled_new_reqs=requests)) == "what vLLM answers"
    assert made.input_batch.added == [("plain", []), ("resumed", [7, 8]), ("at its start", [])]
    made._draw(expected, 2)
    assert torch.equal(drawn.get_state(), expected.get_state())
    assert "add_request" not in vars(made.input_batch)


def test_the_node_s_label_names_this_worker() -> None:
    assert f"{SeededCPUWorker.__module__}.{SeededCPUWorker.__qualname__}" == f"connector.{CPU_WORKER}"
