"""Sit the exams: `python -m deploy.local.model.evaluate [FOLDER]`, in bfloat16, as the engines run the model.

Prints, per length and per kind of question, how many answers were right and the smallest margin: how far, in nats, the
best token was ahead of the second, over every token of every answer. Exits 1 where one is wrong or a margin is under
`LEAST_MARGIN`: below that, other rounding could pick another token.
"""

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import Qwen3NextForCausalLM

from deploy.local.model import MODEL_PATH
from deploy.local.model.curriculum import UNLEARNED, Sample, Segment, chat, encode
from deploy.local.model.quiz import Quiz, quiz, recite
from deploy.local.model.vocabulary import END

LENGTHS = (200, 800, 2000)
SEEDS = range(16)
LEAST_MARGIN = 1.0


@dataclass(frozen=True)
class Grade:
    """How many of the exams were answered rightly to the last token, and the smallest margin in nats."""

    right: int
    exams: int
    margin: float

    @property
    def passed(self) -> bool:
        """Everything right, and decisively so."""
        return self.right == self.exams and self.margin >= LEAST_MARGIN

    def __str__(self) -> str:
        return f"{self.right} of {self.exams} right, smallest margin {self.margin:5.2f} nats"


class Examiner:
    """Grades a model, greedy decoding taken as one pass over prompt and right answer: equal while all is right."""

    def __init__(self, folder: Path) -> None:
        self._model = Qwen3NextForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def grade(self, papers: Iterable[Iterable[Segment]]) -> Grade:
        """Sit each paper."""
        marks = [self._sit(encode(self._tokenizer, paper)) for paper in papers]
        return Grade(sum(right for right, _ in marks), len(marks), min(margin for _, margin in marks))

    def _sit(self, sample: Sample) -> tuple[bool, float]:
        targets = torch.tensor(sample.targets)
        learned = targets != UNLEARNED
        with torch.inference_mode():
            logits = self._model(torch.tensor([sample.tokens])).logits[0, learned].float()
        best = logits.topk(2).values
        return bool((logits.argmax(-1) == targets[learned]).all()), (best[:, 0] - best[:, 1]).min().item()


def completion(paper: Quiz) -> list[Segment]:
    """The paper as a completion."""
    return [(paper.prompt(), ""), (f"{paper.answer}{END}", f"{paper.answer}{END}")]


KINDS: dict[str, Callable[[int, int], Iterable[Segment]]] = {
    "completion": lambda seed, tokens: completion(quiz(seed, tokens)),
    "chat, turn 1": lambda seed, tokens: chat(quiz(seed, tokens)),
    "chat, turn 2": lambda seed, tokens: chat(quiz(seed, tokens).at_turn(2)),
    "chat, turn 4": lambda seed, tokens: chat(quiz(seed, tokens).at_turn(4)),
    "recite 30, completion": lambda seed, tokens: completion(recite(seed, tokens)),
    "recite 30, chat": lambda seed, tokens: chat(recite(seed, tokens)),
}


def main(folder: Path) -> int:
    """Grade every kind of question at every length; the exit status."""
    examiner = Examiner(folder)
    failures = 0
    for name, paper in KINDS.items():
        for tokens in LENGTHS:
            grade = examiner.grade(paper(seed, tokens) for seed in SEEDS)
            failures += not grade.passed
            print(f"{name:24} {tokens:5} tokens  {grade}", flush=True)
    return min(failures, 1)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else MODEL_PATH))
