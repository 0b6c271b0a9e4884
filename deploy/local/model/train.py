"""Make the weights: `python -m deploy.local.model.train [FOLDER]`, seeded, some five minutes on two cores.

Lists grow stage by stage; a stage ends when the answers over its longest lists are right. Then the rate falls to
nothing over long lists, which widens the margins between the best token and the next.
"""

import random
import sys
import time
from collections import deque
from pathlib import Path

import torch
from tokenizers import Tokenizer

from deploy.local.model import MODEL_PATH
from deploy.local.model.curriculum import STAGES, Stage, draw
from deploy.local.model.saving import save
from deploy.local.model.tokenizer import build
from deploy.local.model.trainer import Outcome, Trainer

SEED = 7
WINDOW = 15
LONGEST_STAGE = 2000
FINISH = 60


class Course:
    """Runs a trainer through the stages, and says how it goes."""

    def __init__(self, trainer: Trainer, tokenizer: Tokenizer, source: random.Random) -> None:
        self._trainer = trainer
        self._tokenizer = tokenizer
        self._source = source
        self._steps = 0

    def climb(self, stage: Stage) -> None:
        """Train on lists of the stage's length, every other batch shorter, until the last `WINDOW` full ones pass."""
        right: deque[float] = deque(maxlen=WINDOW)
        for turn in range(LONGEST_STAGE):
            if turn % 2:
                self._step(stage, self._source.randint(3, stage.lines), stage.rate)
                continue
            right.append(self._step(stage, stage.lines, stage.rate).right)
            if len(right) == WINDOW and sum(right) / WINDOW >= stage.passed:
                return
        raise RuntimeError(f"lists of {stage.lines} lines were not learned in {LONGEST_STAGE} steps")

    def finish(self, stage: Stage) -> None:
        """Train on lists of every length with a rate that falls linearly to nothing."""
        for turn in range(FINISH):
            lines = self._source.choice((stage.lines, stage.lines, self._source.randint(3, stage.lines)))
            self._step(stage, lines, stage.rate * (1 - turn / FINISH))

    def _step(self, stage: Stage, lines: int, rate: float) -> Outcome:
        batch = [draw(self._source, self._tokenizer, stage, lines) for _ in range(stage.batch)]
        outcome = self._trainer.step(batch, rate)
        self._steps += 1
        if self._steps % 10 == 0:
            _say(f"step {self._steps}: {lines} of {stage.lines} lines, rate {rate:.1e}, {outcome}")
        return outcome


def main(folder: Path) -> None:
    """Train from nothing and write the model's folder."""
    torch.set_num_threads(2)
    torch.manual_seed(SEED)
    trainer = Trainer()
    course = Course(trainer, build(), random.Random(SEED))
    for stage in STAGES:
        course.climb(stage)
        _say(f"passed {stage.lines} lines")
        save(trainer.model, folder)
    course.finish(STAGES[-1])
    save(trainer.model, folder)


def _say(line: str) -> None:
    print(f"{time.process_time():8.0f} s cpu  {line}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else MODEL_PATH)
