"""A worker for nodes without a GPU that survives seeded requests: `--worker-cls connector.cpu_worker.SeededCPUWorker`.

vLLM 0.32 samples a token at the end of every chunk of a prompt, discards all but the last, and sets a request's own
random generator back by the numbers that the discarded ones took. It does so by the generator's offset, which
generators on a CPU do not have: "CPU Generator does not use offset" ends the engine, and with it every stream of the
node. A hybrid model's prompt is computed in chunks whenever it is longer than a block, so one client's `seed` is
enough.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker

from connector.shape_check import require_fit
from connector.vllm_contracts import SEEDED_CPU

if TYPE_CHECKING:
    import torch
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import SamplerOutput
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata


class SeededCPURunner(CPUModelRunner):
    """Sets generators back to their saved state.

    So a seed gives the same answer whether the prompt was computed in chunks, at once, or not at all.
    """

    def _sample(self, logits: torch.Tensor | None, spec_decode_metadata: SpecDecodeMetadata | None) -> SamplerOutput:
        before = [(generator, generator.get_state()) for generator in self._discarded()]
        sampled = super()._sample(logits, spec_decode_metadata)
        for generator, state in before:
            generator.set_state(state)
        return sampled

    def _bookkeeping_sync(
        self,
        scheduler_output: SchedulerOutput,
        sampler_output: SamplerOutput,
        logits: torch.Tensor | None,
        hidden_states: torch.Tensor,
        num_scheduled_tokens: int,
    ) -> Any:
        """As vLLM does, without the generators: it would read their offsets."""
        generators, self.input_batch.generators = self.input_batch.generators, {}
        try:
            return super()._bookkeeping_sync(
                scheduler_output, sampler_output, logits, hidden_states, num_scheduled_tokens
            )
        finally:
            self.input_batch.generators = generators

    def _discarded(self) -> list[torch.Generator]:
        """The generators of requests whose sample of this step is discarded."""
        discarded = np.nonzero(self.discard_request_mask.np[: self.input_batch.num_reqs])[0]
        generators = self.input_batch.generators
        return [generators[index] for index in map(int, discarded) if index in generators]


class SeededCPUWorker(CPUWorker):
    """vLLM's, with that runner. vLLM's newer runner keeps seeds as numbers and needs nothing."""

    def init_device(self) -> None:
        require_fit(SEEDED_CPU)
        super().init_device()
        if not self.use_v2_model_runner:
            self.model_runner = SeededCPURunner(self.vllm_config, self.device)
