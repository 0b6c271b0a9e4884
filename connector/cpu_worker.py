"""A worker for nodes without a GPU that survives seeded requests, and continues requests that another node began:
`--worker-cls connector.cpu_worker.SeededCPUWorker`.

*Seeds.* vLLM 0.32 samples a token at the end of every chunk of a prompt, discards all but the last, and sets a
request's own random generator back by the numbers that the discarded ones took. It does so by the generator's offset,
which generators on a CPU do not have: "CPU Generator does not use offset" ends the engine, and with it every stream of
the node. A hybrid model's prompt is computed in chunks whenever it is longer than a block, so one client's `seed` is
enough.

Here their generators can be set back (`RewindableGenerator`): to where they stood when the step began.

*Resumed requests* (`resumed_requests`). vLLM's V1 runner takes every request that is new to it for one without output
tokens, and its generator for unused. Here such a request has its output tokens before it enters the batch, where
penalties, minimum length, bad words and logits processors look for them; and its generator has given
as many numbers as they took.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker

from .vllm_version import require_tested

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
    from vllm.v1.worker.gpu_input_batch import CachedRequestState


class RewindableGenerator(torch.Generator):
    """A CPU's generator that vLLM can set back as it does a GPU's: by its offset, to before the numbers that a
    discarded token took. These are all the numbers of a step: it goes back to where `mark` found it."""

    _marked: torch.Tensor

    @classmethod
    def like(cls, generator: torch.Generator) -> RewindableGenerator:
        """With the same numbers to come."""
        made = cls(device=generator.device)
        made.set_state(generator.get_state())
        return made

    def mark(self) -> None:
        """A step begins."""
        self._marked = self.get_state()

    def get_offset(self) -> int:
        return 0

    def set_offset(self, offset: int) -> RewindableGenerator:  # noqa: ARG002 - torch names the argument
        self.set_state(self._marked)
        return self


class SeededCPURunner(CPUModelRunner):
    """Gives seeded requests generators that can be set back, and resumed requests theirs.

    So a seed gives the same answer whether the prompt was computed in chunks, at once, or not at all, and whether one
    node computed the answer or two.
    """

    def _update_states(self, scheduler_output: SchedulerOutput) -> Callable[..., Any] | None:
        """As vLLM does, with our generators, and with the output tokens of new requests that have some."""
        outputs = {each.req_id: _outputs(each) for each in scheduler_output.scheduled_new_reqs}
        batch = self.input_batch
        stock = batch.add_request

        def add_request(request: CachedRequestState) -> int:
            if request.generator is not None and not isinstance(request.generator, RewindableGenerator):
                request.generator = RewindableGenerator.like(request.generator)
            self._resume(request, outputs.get(request.req_id, []))
            return int(stock(request))

        # vLLM makes the request's state and adds it to the batch in one method.
        batch.add_request = add_request
        try:
            finish: Callable[..., Any] | None = super()._update_states(scheduler_output)
        finally:
            del batch.add_request
        for generator in batch.generators.values():
            generator.mark()
        return finish

    def _resume(self, request: CachedRequestState, token_ids: list[int]) -> None:
        request.output_token_ids.extend(token_ids)
        if request.generator is not None and token_ids:
            self._draw(request.generator, len(token_ids))

    def _draw(self, generator: torch.Generator, tokens: int) -> None:
        """Take as many numbers from a generator as the sampling of so many tokens takes (`TopKTopPSampler`): one for
        each token on most CPUs, else one for each token of the vocabulary."""
        sampler = self.sampler.topk_topp_sampler
        if sampler.forward == sampler.forward_cpu and not sampler.use_fp64_gumbel:
            torch.randint(0, 2**31, (tokens,), generator=generator, dtype=torch.long)
            return
        for _ in range(tokens):
            logits = torch.zeros(1, self.input_batch.vocab_size)
            sampler.forward(logits, {0: generator}, None, None)


def _outputs(request: NewRequestData) -> list[int]:
    """The output tokens of a request that is new to the worker: those after its prompt, which only `resumed_requests`
    tells a V1 runner."""
    return [] if request.prefill_token_ids is None else request.prefill_token_ids[request.prompt_len :]


class SeededCPUWorker(CPUWorker):
    """vLLM's, with that runner. vLLM's newer runner keeps seeds as numbers and needs nothing."""

    def init_device(self) -> None:
        transfer = self.vllm_config.kv_transfer_config
        require_tested(None if transfer is None else transfer.kv_connector_extra_config)
        super().init_device()
        if not self.vllm_config.use_v2_model_runner:
            self.model_runner = SeededCPURunner(self.vllm_config, self.device)
