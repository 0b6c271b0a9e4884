"""On a CPU a seed's random numbers go on where they stood: as many are drawn as vLLM's sampler drew for the tokens, and
those of a discarded token are drawn again."""

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
        self.generators: dict[int, Any] = {}

    def add_request(self, request: Any) -> int:
        index = len(self.added)
        self.added.append((request.req_id, list(request.output_token_ids)))
        if request.generator is not None:
            self.generators[index] = request.generator
        return index


def new(name: str, old: list[int] | None) -> NewRequestData:
    return NewRequestData(name, [1, 2, 3], [], None, None, ([],), 0, None,
                          prefill_token_ids=None if old is None else [1, 2, 3, *old])  # fmt: skip


class Steps:
    """A runner's steps, of whose plan vLLM makes the states of requests; `seeded` have generators."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.runner = runner(TopKTopPSampler())
        self.runner.input_batch = self.batch = Batch()
        self._states: dict[str, Any] = {}
        monkeypatch.setattr(CPUModelRunner, "_update_states", self._stock)

    def _stock(self, plan: Any) -> str:
        for each in plan.scheduled_new_reqs:
            self._states[each.req_id] = SimpleNamespace(req_id=each.req_id, output_token_ids=[], generator=generator())
        for name in (*(each.req_id for each in plan.scheduled_new_reqs), *plan.again):
            self.batch.add_request(self._states[name])
        return "what vLLM answers"

    def step(self, *requests: NewRequestData, again: tuple[str, ...] = ()) -> Any:
        """`again`: preempted ones, which enter the batch with the state that they had."""
        return self.runner._update_states(SimpleNamespace(scheduled_new_reqs=requests, again=again))

    def sample(self, index: int) -> None:
        TopKTopPSampler()(torch.randn(index + 1, VOCABULARY), {index: self.batch.generators[index]}, None, None)

    def discard(self, index: int) -> None:
        """As vLLM's `_bookkeeping_sync` does."""
        drawn = self.batch.generators[index]
        drawn.set_offset(drawn.get_offset() - 4)

    def stands_after(self, index: int, tokens: int) -> bool:
        expected = generator()
        self.runner._draw(expected, tokens)
        return bool(torch.equal(self.batch.generators[index].get_state(), expected.get_state()))


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    return Steps(monkeypatch)


def test_requests_enter_the_batch_with_what_they_had(steps: Steps) -> None:
    answer = steps.step(new("plain", None), new("resumed", [7, 8]), new("at its start", []))
    assert answer == "what vLLM answers"
    assert steps.batch.added == [("plain", []), ("resumed", [7, 8]), ("at its start", [])]
    assert [steps.stands_after(index, tokens) for index, tokens in enumerate((0, 2, 0))] == [True, True, True]
    assert "add_request" not in vars(steps.batch)


@pytest.mark.parametrize("old", [None, [7, 8]])
def test_a_discarded_token_takes_no_numbers(steps: Steps, old: list[int] | None) -> None:
    steps.step(new("chunks", old))
    for _ in range(3):
        steps.sample(0)
        assert not steps.stands_after(0, len(old or []))
        steps.discard(0)
        assert steps.stands_after(0, len(old or []))
        steps.step()


def test_a_preempted_request_goes_on_where_it_stood(steps: Steps) -> None:
    """Its prompt and what it has are computed again, in chunks, whose tokens are discarded."""
    steps.step(new("preempted", None))
    steps.sample(0)
    steps.step(again=("preempted",))
    steps.sample(1)
    steps.discard(1)
    assert steps.stands_after(1, 1)


def test_the_node_s_label_names_this_worker() -> None:
    assert f"{SeededCPUWorker.__module__}.{SeededCPUWorker.__qualname__}" == f"connector.{CPU_WORKER}"
