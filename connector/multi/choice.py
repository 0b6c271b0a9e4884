"""Which child loads a request's prefix: claims in, one choice out. Pure.

A claim is worth the prompt tokens that need not be computed because of it, times the child's `load_weight`. That is
counted from the *shared* hit, the boundary at which every local cache group agrees: without a load the node resumes
there. A claim that stands on a deeper local hit, of attention alone, makes that hit usable by bringing the state, and
so is worth it too: with attention cached up to 96, state nowhere, and a ticket up to 131, it saves 131 tokens, not 35.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Claim:
    """What a child said when it was asked.

    `base`: the local hit, in tokens, that it was told of and builds on. `tokens`: how many it would bring beyond that;
    0 for none, None while it is still looking.
    """

    child: int
    base: int
    tokens: int | None
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Take:
    """This claim wins."""

    claim: Claim


@dataclass(frozen=True, slots=True)
class Wait:
    """A child that has not decided could still win: ask again."""


@dataclass(frozen=True, slots=True)
class Compute:
    """No child has anything worth loading."""


Choice = Take | Wait | Compute


def choose(claims: Sequence[Claim], *, shared: int, prompt: int, late: bool) -> Choice:
    """The best claim; of two that are worth the same, the child's that stands first.

    `shared`, `prompt`: tokens of the shared hit and of the whole request. `late`: the deadline for children that have
    not decided is over; they count as having nothing. Before it they are waited for only while they could win.
    """
    best: Claim | None = None
    for claim in claims:
        if worth(claim, shared) > (0.0 if best is None else worth(best, shared)):
            best = claim
    if not late and any(_may_beat(claim, best, shared, prompt) for claim in claims if claim.tokens is None):
        return Wait()
    return Compute() if best is None else Take(best)


def worth(claim: Claim, shared: int) -> float:
    """What a claim saves, in weighted tokens; 0 for one that has nothing, or is undecided."""
    if not claim.tokens or claim.tokens < 0:
        return 0.0
    return max(0, claim.base + claim.tokens - shared) * claim.weight


def _may_beat(undecided: Claim, best: Claim | None, shared: int, prompt: int) -> bool:
    # One that stands on a hit of the whole prompt has nothing left to bring.
    most = max(0, prompt - shared) * undecided.weight if undecided.base < prompt else 0.0
    if best is None:
        return most > 0
    return (most, -undecided.child) > (worth(best, shared), -best.child)


def sound(tokens: int | None, *, base: int, prompt: int) -> int | None:
    """A child's answer as it may be counted: less than nothing, or more than the prompt has, is nothing.

    vLLM's scheduler asserts on both, which would end the engine. An answer that is too large is not cut down: where it
    would be cut there is no state to resume from.
    """
    if tokens is None:
        return None
    return tokens if 0 < tokens <= prompt - base else 0
