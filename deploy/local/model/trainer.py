"""One optimiser over one model: a step on a batch of samples, and how right the model was."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import Qwen3NextForCausalLM

from deploy.local.model.architecture import config
from deploy.local.model.curriculum import UNLEARNED, Sample
from deploy.local.model.initial_weights import begin

WARM_UP = 20
CLIP = 1.0


@dataclass(frozen=True)
class Outcome:
    """A step's loss (nats per learned token), the share of learned tokens that were right, the smallest margin."""

    loss: float
    right: float
    margin: float

    def __str__(self) -> str:
        return f"loss {self.loss:.4f}, right {self.right:.4f}, smallest margin {self.margin:.2f}"


class Trainer:
    """Trains from random weights in float32. Seed torch before making one."""

    def __init__(self) -> None:
        self.model = Qwen3NextForCausalLM(config())
        begin(self.model)
        self._optimiser = torch.optim.AdamW(self.model.parameters(), lr=1e-3, betas=(0.9, 0.98), weight_decay=0.01)
        self._steps = 0

    def step(self, samples: Sequence[Sample], rate: float) -> Outcome:
        """Learn one batch at the given learning rate, which the first `WARM_UP` steps approach."""
        self._steps += 1
        for group in self._optimiser.param_groups:
            group["lr"] = rate * min(1.0, self._steps / WARM_UP)
        logits, targets = self._predict(samples)
        loss = nn.functional.cross_entropy(logits, targets)
        self._optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self._optimiser.step()
        return _judge(logits.detach(), targets, loss.item())

    def _predict(self, samples: Sequence[Sample]) -> tuple[Tensor, Tensor]:
        """Logits (learned tokens, vocabulary) and the tokens that were right there."""
        longest = max(len(sample.tokens) for sample in samples)
        tokens = torch.tensor([_padded(sample.tokens, longest, 0) for sample in samples])
        targets = torch.tensor([_padded(sample.targets, longest, UNLEARNED) for sample in samples])
        learned = targets != UNLEARNED
        hidden = self.model.model(tokens, use_cache=False).last_hidden_state
        return self.model.lm_head(hidden[learned]), targets[learned]


def _padded(values: list[int], length: int, filler: int) -> list[int]:
    return values + [filler] * (length - len(values))


def _judge(logits: Tensor, targets: Tensor, loss: float) -> Outcome:
    best = logits.topk(2).values
    margin = (best[:, 0] - best[:, 1]).min().item()
    right = (logits.argmax(-1) == targets).float().mean().item()
    return Outcome(loss, right if math.isfinite(loss) else 0.0, margin)
