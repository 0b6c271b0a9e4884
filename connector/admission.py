"""Keeps a request that vLLM cannot admit from holding up those behind it. In the scheduler's process; pure.

vLLM's scheduler asks a connector about the request at the head of its queue, then allocates the request's blocks. If
they do not fit, it ends the step's admissions: every request behind the head waits. That is fair as long as the blocks
come back by themselves, when requests that run have ended. In four cases they do not (vLLM 0.32 and 0.33):

- A read or load that was given up still holds its blocks (`decode_reads.Quarantine`), while its peer is frozen.
- A failed load leaves its reservation behind: the request stays in `Scheduler._inflight_prefills` until it computes or
  ends. Every asynchronous load that is offered meanwhile must leave that many blocks free, beside its own, and a second
  load of the same request must leave its own reservation free.
- With `--prefix-match-unit`, a local hit can end inside a block. vLLM copies that block, of attention and of state, and
  needs both. A prompt nearly as large as the cache fits without the hit and not with it, and nothing evicts the hit, as
  nothing else is admitted. vLLM waits so without a connector, too.
- A hybrid's request needs one more block for its state when it goes on from what was loaded (`BoundedGroup.peak`), and
  keeps its other blocks while it waits for that one. Loads that fill the cache to the last block then wait for each
  other, and no request runs that could end.

`AdmissionControl` changes a connector's answer to `get_num_new_matched_tokens` in these cases. vLLM takes None as "not
known yet": it skips the request in this step, offers the step to the one behind it, and asks again in the next step. It
takes 0 as "nothing to load", and computes the prompt. The first that holds counts (`AdmissionControl.answer`):

    when                                                  answer      what follows
    the request may not fit into the whole cache beside   None once   such hits leave the prefix cache; the next answer
    copies of blocks inside which its local hit ends                  goes by a hit that ends at a block
    it cannot fit before a quarantine ends                None        it is asked about in each step until that ends
    its load has just failed, and it may not fit now      None once   vLLM has it wait behind those that hold blocks
    its load may fill the cache, and no request           None        it waits until others that hold blocks have ended
    computes that could end and free some                 0           the same in an unused cache, where none will end
    its load was offered and not admitted, and a load     0           a prompt that is computed needs no reservation,
    that failed has left a reservation (its own, too),                and so the failed load's does not hinder it
    or only a quarantine holds blocks

"Once": the request is remembered, so that the next step gets the connector's own answer, or another row's.
"In an unused cache" (`_Room.is_unused`) nothing but quarantines holds blocks: no request can end and make more room.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from .kv_groups import SequenceBlocks

if TYPE_CHECKING:
    from vllm.v1.request import Request

log = logging.getLogger("vllm.pdproxy.scheduler")

_SET_ASIDE = (
    "Request %s waits, and others pass it: it needs at least %d blocks; transfers that were given up, and whose "
    "prefill node or tier does not answer, hold %d, and leave %d."
)
_NO_PARTIAL_HIT = (
    "Request %s: computing its prompt from the last whole block of its local hit on. The hit ended inside a block, and "
    "the cache has no room for that block and its copy."
)
_NO_LOAD = "Request %s: computing its prompt; the cache has no room to load it."

Answer = tuple[int | None, bool]
"""To vLLM: tokens to load beyond the local hit, None to be asked again; whether they are loaded between steps."""


class FreeBlocks(Protocol):
    """The part of vLLM's `BlockPool` that counts free blocks. `num_gpu_blocks` includes vLLM's null block."""

    num_gpu_blocks: int

    def get_num_free_blocks(self) -> int: ...


class PartialHits(Protocol):
    """The part of `resume_boundary.LocalHits` that lets no hit end inside a block."""

    def forget_partial_hits(self, request: Request) -> bool: ...


@dataclass(frozen=True, slots=True)
class _Room:
    """Blocks: `free` now, `held` by quarantines, `reachable`: free once nothing else holds any."""

    free: int
    held: int
    reachable: int

    @property
    def is_unused(self) -> bool:
        """Whether nothing but quarantines holds blocks, so that no request can end and make more room."""
        return self.free == self.reachable


class AdmissionControl:
    """The admission of one engine. `sizes`: blocks that a sequence takes. `quarantined`: blocks in quarantine now."""

    def __init__(self, sizes: SequenceBlocks, quarantined: Callable[[], int], local_hits: PartialHits) -> None:
        self._sizes = sizes
        self._quarantined = quarantined
        self._local_hits = local_hits
        self._pool: FreeBlocks | None = None
        self._offered_loads: set[str] = set()
        """Requests whose load was offered to vLLM, which has not admitted them yet."""
        self._loading: set[str] = set()
        """Admitted requests whose load is under way, or has ended well."""
        self._computing: set[str] = set()
        """Admitted requests that load nothing: they compute, and free their blocks when they end."""
        self._failed: set[str] = set()
        """Requests whose load has failed, and which wait to be admitted again."""
        self._tried_alone: dict[str, tuple[int, int]] = {}
        """Blocks in quarantine, and admissions so far, when the request was left to vLLM in an unused cache. If vLLM
        asks about it again with both the same, it did not fit."""
        self._searched: set[str] = set()
        """Requests whose hits inside a block were looked for; that takes a look at each hash of the prompt."""
        self._set_aside: set[str] = set()
        """Requests that wait for a quarantine, of which the log has a line."""
        self._admitted = 0
        """Admissions so far."""

    def bind(self, pool: FreeBlocks) -> None:
        """vLLM's block pool, before the first request."""
        self._pool = pool

    def __len__(self) -> int:
        """How many requests have an entry here."""
        return len(frozenset().union(*self._sets(), self._tried_alone))

    def answer(self, request: Request, answer: Answer) -> Answer:
        """The connector's answer, or another one, where this would hold others up."""
        if answer[0] is None or self._pool is None:
            return None, False
        free, held = self._pool.get_num_free_blocks(), self._quarantined()
        room = _Room(free, held, self._pool.num_gpu_blocks - 1 - held)
        self._computing.discard(request.request_id)  # it was preempted
        has_just_failed = self._has_just_failed(request.request_id)
        if self._forgets_partial_hits(request, room) or self._waits_for_quarantine(request, room):
            return None, False
        if has_just_failed and self._sizes.most(request.num_tokens) > free:
            return None, False
        return self._offer(request, answer, room)

    def on_admitted(self, request_id: str, tokens: int) -> None:
        """vLLM has allocated the request's blocks; `tokens` are loaded into them."""
        loads = tokens > 0 and request_id in self._offered_loads
        self.forget(request_id)
        self._admitted += 1
        (self._loading if loads else self._computing).add(request_id)

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        for requests in self._sets():
            requests.discard(request_id)
        self._tried_alone.pop(request_id, None)

    def _sets(self) -> tuple[set[str], ...]:
        """All that remember requests by their ids alone."""
        return self._offered_loads, self._loading, self._computing, self._failed, self._searched, self._set_aside

    def _has_just_failed(self, request_id: str) -> bool:
        """Whether the request's load has failed since it was asked about last: vLLM asks again only then, for what was
        loaded well is not looked up again."""
        if request_id not in self._loading:
            return False
        self._loading.discard(request_id)
        self._failed.add(request_id)
        return True

    def _did_not_fit_alone(self, request_id: str, room: _Room) -> bool:
        """Whether vLLM could not admit the request while nothing but quarantines held blocks, and nothing has changed:
        the quarantine is the same, and nothing was admitted since, which may change the prefix cache."""
        return self._tried_alone.get(request_id) == (room.held, self._admitted)

    def _forgets_partial_hits(self, request: Request, room: _Room) -> bool:
        """Whether hits that end inside a block may be in the way, and have left the prefix cache."""
        request_id = request.request_id
        if self._sizes.with_copies(request.num_tokens) <= room.reachable:
            return False
        if request_id in self._searched and not self._did_not_fit_alone(request_id, room):
            return False
        self._searched.add(request_id)
        if not self._local_hits.forget_partial_hits(request):
            return False
        self._tried_alone.pop(request_id, None)
        log.warning(_NO_PARTIAL_HIT, request_id)
        return True

    def _waits_for_quarantine(self, request: Request, room: _Room) -> bool:
        """Whether the request does not fit even while nothing but quarantines holds blocks.

        `SequenceBlocks.least` may be a little less than what vLLM asks for, so it counts, too, if vLLM could not admit
        the request at such a time. A request that was preempted needs its next block as well: without it, it would be
        preempted again before its next token.
        """
        if not room.held:
            self._set_aside.clear()
            return False
        request_id = request.request_id
        needed = (self._sizes.most if request.num_preemptions else self._sizes.least)(request.num_tokens)
        if needed <= room.reachable and not self._did_not_fit_alone(request_id, room):
            return False
        if request_id not in self._set_aside:
            log.warning(_SET_ASIDE, request_id, needed, room.held, room.reachable)
        self._set_aside.add(request_id)
        return True

    def _offer(self, request: Request, answer: Answer, room: _Room) -> Answer:
        request_id, loads = request.request_id, answer[1] and answer[0] != 0
        fills_up = loads and self._may_fill_up(request, room)
        if fills_up and not room.is_unused:
            return None, False
        hindered = request_id in self._offered_loads and (bool(self._failed) or (room.held > 0 and room.is_unused))
        if loads and not fills_up and not hindered:
            self._offered_loads.add(request_id)
            return answer
        if room.is_unused:
            self._tried_alone[request_id] = (room.held, self._admitted)
        if loads:
            log.warning(_NO_LOAD, request_id)
            return 0, False
        return answer

    def _may_fill_up(self, request: Request, room: _Room) -> bool:
        """Whether the request's load may leave no block to go on with, and no request runs whose end would free one."""
        return not self._computing and self._sizes.most(request.num_tokens) > room.free


class NoAdmissionControl(AdmissionControl):
    """For a connector that is one of several: the connector that chooses among them decides instead."""

    def answer(self, request: Request, answer: Answer) -> Answer:  # noqa: ARG002 - as its base
        """As it is."""
        return answer
