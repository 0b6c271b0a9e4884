"""Asks the children for a request's prefix and lets `choice` decide; in the scheduler's process.

Two kinds of children see two kinds of local hits. One that brings the state with it (it has a ticket) is told the hit
of attention alone; every other one is told the *shared* hit, where all groups agree. vLLM looks a request up once, in
one way, before it asks; so when a child of the second kind wins and the two hits differ, the request is put off for one
step, and in that step (`_shared_step`) every request is looked up in the shared way. Such steps never follow on each
other, so that requests with tickets, which are put off in them, wait for one step at most.
"""

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from connector.multi.child import Child
from connector.multi.choice import Claim, Compute, Take, Wait, choose, sound
from connector.multi.desk import Desk

if TYPE_CHECKING:
    from vllm.v1.request import Request

log = logging.getLogger("vllm.pdproxy.multi")

Answer = tuple[int | None, bool]
"""vLLM's: tokens to load beyond the local hit, None to be asked again; whether they are loaded between steps."""


class Chooser:
    """`groups`: how many KV-cache groups the model has. `shared_hit` looks up, in tokens, where all of them agree."""

    def __init__(
        self,
        children: Sequence[Child],
        desk: Desk,
        *,
        groups: int,
        decide_within: float,
        shared_hit: Callable[["Request"], int],
        now: Callable[[], float],
    ) -> None:
        self._children = tuple(children)
        self._desk = desk
        self._groups = groups
        self._decide_within = decide_within
        self._shared_hit = shared_hit
        self._now = now
        self._shared_step = False
        self._put_off: set[str] = set()
        self._warned: set[int] = set()

    @property
    def offers_divergent_hits(self) -> bool:
        """Whether vLLM shall look requests up by attention alone, now."""
        return not self._shared_step and any(child.completes_hybrid_hits for child in self._children)

    def ask(self, request: "Request", hit: int) -> tuple[Answer, Claim | None]:
        """What to answer to vLLM, and whose claim it is. `hit`: the local one, in tokens, as vLLM looked it up."""
        request_id = request.request_id
        late = self._desk.waited(request_id, self._now()) >= self._decide_within
        shared = self._shared_hit(request) if hit and self.offers_divergent_hits else hit
        claims, asynchronous = self._claims(request, hit, shared)
        match choose(claims, shared=shared, prompt=request.num_tokens, late=late):
            case Wait():
                return (None, False), None
            case Take(claim) if self._must_look_up_again(request_id, claim, hit):
                return (None, False), None
            case Take(claim):
                loads_between_steps = claim.child in asynchronous
                self._desk.answered(request_id, claims, claim, asynchronous=loads_between_steps)
                return (claim.tokens, loads_between_steps), claim
            case Compute():
                self._desk.answered(request_id, claims, None, asynchronous=False)
                return (0, False), None

    def step_planned(self) -> None:
        """The scheduler has gone through its requests once."""
        self._shared_step = bool(self._put_off) and not self._shared_step

    def forget(self, request_id: str) -> None:
        """The request was admitted, or is over."""
        self._put_off.discard(request_id)

    def _must_look_up_again(self, request_id: str, claim: Claim, hit: int) -> bool:
        if claim.base != hit:
            self._put_off.add(request_id)
            return True
        if self._shared_step and self._children[claim.child].completes_hybrid_hits:
            self._put_off.discard(request_id)
            return True
        return False

    def _claims(self, request: "Request", hit: int, shared: int) -> tuple[list[Claim], set[int]]:
        """Every child's claim, and which of them load between steps."""
        claims: list[Claim] = []
        asynchronous: set[int] = set()
        barred = self._desk.barred(request.request_id)
        for child in self._children:
            if child.number in barred:
                continue
            base = hit if child.completes_hybrid_hits else shared
            tokens, between_steps = child.connector.get_num_new_matched_tokens(request, base)
            tokens = self._usable(child, sound(tokens, base=base, prompt=request.num_tokens), between_steps)
            claims.append(Claim(child.number, base, tokens, child.settings.weight))
            asynchronous |= {child.number} if between_steps else set()
        return claims, asynchronous

    def _usable(self, child: Child, tokens: int | None, between_steps: bool) -> int | None:
        """With several groups vLLM has no way to take a load back that runs within a step, so none is begun."""
        if not tokens or between_steps or self._groups == 1:
            return tokens
        if child.number not in self._warned:
            self._warned.add(child.number)
            log.warning(
                "Connector %r loads within a step, and a failure of that could not be repaired on a model with several "
                "cache groups: what it offers is not used.",
                child.settings.name,
            )
        return 0
