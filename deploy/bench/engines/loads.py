"""The loads that engines are asked. Pure.

guidellm makes random prompts by itself. The tiny model answers those with no text, and guidellm takes the first text
for the first token; so it gets a file of prompts that the model answers: lists, of which it recites a part
(`deploy/local/model/quiz.py`).
"""

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from deploy.local.model.quiz import TOKENS_PER_LINE, recite

SEEDS_PER_RUN = 1000
"""Lists of one run; two runs have no list in common, so that no prefix cache knows anything of a prompt."""


class Shape(NamedTuple):
    """A kind of request: about how many tokens its prompt has, and exactly how many its answer."""

    name: str
    prompt: int
    answer: int


class Load(NamedTuple):
    """The load that one run of the load generator sends.

    Attributes:
        profile: guidellm's: when requests go out.
        shapes: of the requests, in turn.
        requests: in one run.
        first: how many of them, the first ones, are in no figure.
        seconds: a run that takes longer has failed.
    """

    name: str
    title: str
    profile: Mapping[str, object]
    shapes: Sequence[Shape]
    requests: int
    first: int
    seconds: float = 90.0

    def sized(self, share: float) -> "Load":
        """With that share of its requests: at least one of each shape that counts."""
        return self._replace(requests=max(self.first + len(self.shapes), round(self.requests * share)))


class Question(NamedTuple):
    """One request, and what the model should begin its answer with: all of it is longer."""

    shape: Shape
    prompt: str
    answer: str


USUAL = Shape("prompts of 800 tokens", 800, 64)
SHORT = Shape("short prompts", 300, 96)
LONG = Shape("long prompts", 2100, 16)
ONE = Load("one", "One request at a time", {"kind": "synchronous"}, [USUAL], 22, 2)
EIGHT = Load("eight", "Eight at once", {"kind": "concurrent", "streams": [8]}, [USUAL], 72, 8)
MIXED = Load("mixed", "Mixed: five a second", {"kind": "constant", "rate": [5.0]}, [SHORT, LONG], 64, 4)
LOADS = {load.name: load for load in (ONE, EIGHT, MIXED)}


def questions(load: Load, run: int) -> list[Question]:
    """The requests of one run, in order; each run has lists of its own."""
    shapes = [load.shapes[at % len(load.shapes)] for at in range(load.requests)]
    return [question(shape, run * SEEDS_PER_RUN + at) for at, shape in enumerate(shapes)]


def question(shape: Shape, seed: int) -> Question:
    """A list, and the request to recite so much of its end that the answer is cut by its length."""
    whole = recite(seed, shape.prompt, lines=shape.answer // TOKENS_PER_LINE + 2)
    return Question(shape, whole.prompt(), whole.answer)


def rows(asked: Sequence[Question]) -> str:
    """The file that guidellm reads; the second column has it ask for exactly so many tokens."""
    return "".join(
        json.dumps({"prompt": each.prompt, "output_tokens_count": each.shape.answer}) + "\n" for each in asked
    )
