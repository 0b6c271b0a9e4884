"""Whether an answer after a hand-over is the answer of the decode node alone, within what rounding does: pure.

Compared are the log-probabilities of the likeliest tokens, position by position while the tokens agree, and at the
first that does not: up to there both answers are to the same prompt. A token that only one of them shows is for the
other at most as likely as the least likely one that it shows. The distance of two answers is the root mean square of
all these differences, in nats.

What is allowed comes from the decode node itself: it answers alone twice, in two ways of computing the same (see
`known_answer`). How far these two lie apart is what rounding does on that node with that model and that prompt, and
four times as much is allowed. Where the two are (nearly) the same, for kernels that add in a fixed order, the prefill
node's may round otherwise all the same, with another tensor-parallel degree or GPU: then it is two last places of a
logit of 16 to 32 in bfloat16, 0.25 nats.

Measured on the tiny hybrid model in bfloat16 on CPUs, prompts of 640 tokens over blocks of 256
(`pytest -s -m long tests/e2e/test_known_answer.py` prints the table): right pairs lay at most 0.064 nats apart, with
tensor parallel 1 on one side and 2 on the other; a decode node's own two answers at most 0.047. Wrong pairs lay at
least 0.396 apart (rope: partial_rotary_factor 0.25, 0.5); 0.517 with 10 % of noise on the weights, 0.990 with another
model of the same shapes, 2.929 with a block size of 256 read as 512, 3.118 with a state of bfloat16 read as float32 or
the other way round. All 120 tests of wrong pairs failed, none of 240 of right ones. So 0.25 is four times what was seen
of right pairs, and less than anything seen of wrong ones.

What changes answers no more than another tensor-parallel degree does is not found (seen: `rope_theta` 10,000 read as
12,000, 0.013 to 0.058; weights with 0.3 % of noise, 0.031 to 0.058): that is what fingerprints are for.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from pdproxy.request import Json

FLOOR = 0.25
"""Nats that are always allowed."""
OWN_SPREADS = 4.0
"""How many times its own spread a decode node's answer may change by a hand-over."""
MOST = 1.0
"""Nats that are allowed at most. A model whose own answers lie more than a quarter of that apart shows too little of
what was handed over: then it neither passes (unless its answer is nearer) nor fails."""

Position = Mapping[str, float]
"""Log-probabilities by token."""


@dataclasses.dataclass(frozen=True, slots=True)
class ScoredAnswer:
    """An answer's tokens, and the log-probabilities of the likeliest tokens at the position of each."""

    tokens: Sequence[int]
    top_logprobs: Sequence[Position]

    @classmethod
    def read(cls, answer: Json) -> "ScoredAnswer | None":
        """The first choice of a completions answer; None where it has no log-probabilities or token ids."""
        choices = answer.get("choices")
        choice = _mapping(choices[0]) if isinstance(choices, list) and choices else {}
        tokens, top_logprobs = choice.get("token_ids"), _mapping(choice.get("logprobs")).get("top_logprobs")
        if not isinstance(tokens, list) or not tokens or not isinstance(top_logprobs, list):
            return None
        return cls(tokens, [_numbers(position) for position in top_logprobs])

    def without_first(self) -> "ScoredAnswer":
        """The rest of the answer, where the first token is part of the prompt."""
        return ScoredAnswer(self.tokens[1:], self.top_logprobs[1:])


def _numbers(position: object) -> dict[str, float]:
    return {token: float(value) for token, value in _mapping(position).items() if isinstance(value, int | float)}


def _mapping(value: object) -> Json:
    return value if isinstance(value, dict) else {}


@dataclasses.dataclass(frozen=True, slots=True)
class Distance:
    """How far two answers lie apart.

    Attributes:
        nats: root mean square; infinite where one has no numbers to compare.
        greatest: the greatest single difference, which is at position ``at``, from 0.
        compared: how many positions were.
    """

    nats: float
    greatest: float
    at: int
    compared: int


@dataclasses.dataclass(frozen=True, slots=True)
class AnswerDistance:
    """An answer after a hand-over beside the two that the decode node gave alone.

    ``distance`` is to the nearer of them, ``spread`` the distance between them, in nats.
    """

    distance: Distance
    spread: float

    @property
    def allowed(self) -> float:
        return min(MOST, max(FLOOR, OWN_SPREADS * self.spread))

    def agrees(self) -> bool:
        """Whether rounding explains the difference."""
        return self.distance.nats <= self.allowed

    def undecided(self) -> bool:
        """Whether it might, but the node's own answers lie too far apart to tell."""
        return not self.agrees() and self.spread * OWN_SPREADS > MOST

    def sentence(self) -> str:
        """All figures, for the operator."""
        far = self.distance
        return (
            f"log-probabilities differ by {far.nats:.3g} nats (root mean square over {far.compared} tokens; allowed are"
            f" {self.allowed:.3g}), at most by {far.greatest:.3g} at answer token {far.at + 1}; alone the decode"
            f" node's answers, computed in two ways, differ by {self.spread:.3g}"
        )


def compare(handed: ScoredAnswer, alone: ScoredAnswer, alone_again: ScoredAnswer) -> AnswerDistance:
    """Judge the answer after a hand-over by two that the decode node gave alone, to the same prompt."""
    spread = distance(alone, alone_again).nats
    nearer = min((distance(handed, alone), distance(handed, alone_again)), key=lambda far: far.nats)
    return AnswerDistance(nearer, spread)


def distance(one: ScoredAnswer, other: ScoredAnswer) -> Distance:
    """How far two answers to the same prompt lie apart; infinitely where nothing can be compared."""
    differences = [_differences(one.top_logprobs[at], other.top_logprobs[at]) for at in range(_common(one, other))]
    flat = [difference for position in differences for difference in position]
    if not flat or not all(map(math.isfinite, flat)):
        return Distance(math.inf, math.inf, 0, len(differences))
    greatest = max(flat)
    at = next(at for at, position in enumerate(differences) if greatest in position)
    return Distance(math.sqrt(sum(each * each for each in flat) / len(flat)), greatest, at, len(differences))


def _common(one: ScoredAnswer, other: ScoredAnswer) -> int:
    """How many positions follow the same tokens."""
    most = min(len(one.top_logprobs), len(other.top_logprobs), len(one.tokens), len(other.tokens))
    agreeing = next((at for at in range(most) if one.tokens[at] != other.tokens[at]), most)
    return min(most, agreeing + 1)


def _differences(one: Position, other: Position) -> list[float]:
    if not one or not other:
        return [math.inf]
    least_one, least_other = min(one.values()), min(other.values())
    shown = [
        abs(value - other[token]) if token in other else max(0.0, value - least_other) for token, value in one.items()
    ]
    return shown + [max(0.0, value - least_one) for token, value in other.items() if token not in one]
