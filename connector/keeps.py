"""Keeps of a node's prefix cache: for whom, and until when. In the scheduler's process; pure but for vLLM's cache.

- A *keep* is for the next turn of a conversation: what a prompt that goes on from the last turn would resume from, its
  attention blocks and the state behind them in every state group. It begins when a turn ends that asked for it
  (`keep_orders`), and ends with the next turn, after its time, or when it is given up.
- A prompt that *waits* in vLLM's queue keeps what it will resume from, so that prompts before it do not evict that.

Nothing here holds a reference: the blocks stay free, and are only given out last (`eviction_order`). So no request
waits for a keep, none is preempted for one, and a node that ends loses nothing else with them. When a block is needed
and only kept ones are free, keeps are given up first: those whose time is over, then the one whose age * blocks /
tokens is the largest (the oldest; of equally old ones the one that saves the fewest tokens for each of its blocks).
Then goes what waiting prompts keep, the last one's first.

Keeps have a share of the cache. Where it is full, a turn is not kept, rather than that another keep ends for it: to
end the oldest one would lose all of them, where more conversations come back in turn than the share has room for. The
exception are keeps that are overdue: next turns come long before on this node, so that theirs probably never comes.
"""

from __future__ import annotations

from collections import Counter as Numbers
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .counters import Counters, KeepEnd, NotKept, WaitEnd
from .eviction_order import EvictionOrder, Hold
from .keep_orders import KeepOrder

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.request import Request

HIT, TOKENS, BLOCKS, WHY = "hit", "tokens", "blocks", "why"
REPORT = "pdproxy_kept"
"""In the `kv_transfer_params` of a turn's answer: HIT tokens that the prompt resumed from an earlier keep of its
conversation, TOKENS in so many BLOCKS that are kept for the next turn, and WHY none are."""


OVERDUE = 4.0
"""Times the mean pause after which a next turn came: a keep that is older makes room for another one in the share."""
PAUSES = 8
"""The mean pause is of about so many, the latest."""


@dataclass(eq=False, slots=True)
class _Keep:
    """Blocks that hold `tokens`; `since` and `until` in seconds of the engine's clock."""

    hold: Hold
    tokens: int
    since: float
    until: float

    def cheapness(self, now: float) -> tuple[bool, float]:
        """The larger, the sooner it is given up."""
        return now >= self.until, (now - self.since) * len(self.hold) / self.tokens


@dataclass(eq=False, slots=True)
class _Turn:
    """A request until its end. `hold`: of what it resumes from, `tokens` of them; `keep`: of its conversation, which it
    ends. Both only while it waits."""

    order: KeepOrder | None
    hold: Hold
    tokens: int
    keep: _Keep | None
    admitted: bool = False
    hit: int = 0


class Keeps:
    """The keeps of one engine, and what waiting prompts keep. `share`: of the cache's blocks, for all keeps together.

    vLLM binds its cache before the first request.
    """

    def __init__(self, share: float, counters: Counters, now: Callable[[], float]) -> None:
        self._share = share
        self._counters = counters
        self._now = now
        self._manager: KVCacheManager | None = None
        self._keeps: dict[str, _Keep] = {}
        self._kept: Numbers[int] = Numbers()
        self._soonest = self._pause = float("inf")
        self._turns: dict[str, _Turn] = {}
        self._waiting: dict[str, _Turn] = {}

    def bind(self, manager: KVCacheManager) -> None:
        """vLLM's cache: from now on its free blocks are given out in our order. With several of our connectors on one
        node the first one keeps for all."""
        pool = manager.block_pool
        if isinstance(pool.free_block_queue, EvictionOrder):
            return
        pool.free_block_queue = self._free = EvictionOrder.after(pool.free_block_queue, self._give_up)
        self._room = int(self._share * (pool.num_gpu_blocks - 1))
        self._manager = manager

    def __len__(self) -> int:
        """How many requests have an entry here."""
        return len(self._turns)

    # ---- a request's way

    def on_new_request(self, request: Request, order: KeepOrder | None, *, reads: bool) -> None:
        """A request is in the queue. `reads`: with a ticket, so that it goes on from its attention blocks alone."""
        if self._manager is None:
            return
        look_up = self._manager.get_computed_blocks_for_connector if reads else self._manager.get_computed_blocks
        found = look_up(request)
        keep = None if order is None else self._keeps.pop(order.conversation, None)
        turn = self._turns[request.request_id] = _Turn(order, _hold(found[0], self._manager), int(found[1]), keep)
        if len(turn.hold) or keep is not None:
            self._waiting[request.request_id] = turn
            self._free.hold(turn.hold)

    def on_admitted(self, request_id: str) -> None:
        """vLLM has allocated the request's blocks; those that it has found are in use."""
        turn = self._turns.get(request_id)
        if turn is None or turn.admitted:
            return
        turn.admitted = True
        if self._waiting.pop(request_id, None) is None:
            return
        self._end_wait(turn, WaitEnd.ADMITTED)
        if turn.keep is not None:
            self._came_back(self._now() - turn.keep.since)
            turn.hit = min(turn.tokens, turn.keep.tokens)
            self._end(turn.keep, KeepEnd.HIT if turn.hit == turn.keep.tokens else KeepEnd.MISSED, hit=turn.hit)

    def on_request_finished(self, request: Request) -> dict[str, Any]:
        """The request has ended, and vLLM is about to free its blocks. The report for its answer, if it is a turn."""
        turn = self._turns.pop(request.request_id, None)
        if turn is None:
            return {}
        if self._waiting.pop(request.request_id, None) is not None:
            self._leave(turn)
        if turn.order is None or not turn.admitted:
            return {}
        kept = self._begin(request, turn.order)
        blocks, tokens, why = (len(kept.hold), kept.tokens, "") if isinstance(kept, _Keep) else (0, 0, str(kept))
        return {REPORT: {HIT: turn.hit, TOKENS: tokens, BLOCKS: blocks, WHY: why}}

    def forget(self, conversations: Iterable[str]) -> None:
        """End what is kept for these, if anything is."""
        for conversation in conversations:
            self._end_if_kept(conversation, KeepEnd.FORGOTTEN)

    def on_step(self) -> None:
        """A step is planned: keeps whose time is over end."""
        now = self._now()
        if now < self._soonest:
            return
        for conversation in [each for each, keep in self._keeps.items() if now >= keep.until]:
            self._end_if_kept(conversation, KeepEnd.EXPIRED)
        self._soonest = min((keep.until for keep in self._keeps.values()), default=float("inf"))

    # ---- keeps

    def _begin(self, request: Request, order: KeepOrder) -> _Keep | NotKept:
        if not order.seconds or self._manager is None:
            return NotKept.NOT_ASKED
        if not self._share:
            return NotKept.OFF
        blocks, tokens, _ = self._manager.get_computed_blocks(request)
        hold, now = _hold(blocks, self._manager), self._now()
        if not tokens or not len(hold):
            return self._refuse(NotKept.NOTHING_CACHED)
        self._end_if_kept(order.conversation, KeepEnd.REPLACED)
        if not self._make_room(hold):
            return self._refuse(NotKept.TOO_LARGE)
        keep = self._keeps[order.conversation] = _Keep(hold, int(tokens), now, now + order.seconds)
        self._soonest = min(self._soonest, keep.until)
        self._free.hold(hold)
        self._kept.update(block.block_id for block in hold.blocks)
        self._counters.keep_begun(keep.tokens)
        self._tell()
        return keep

    def _refuse(self, why: NotKept) -> NotKept:
        self._counters.keep_refused(why)
        return why

    def _make_room(self, hold: Hold) -> bool:
        """Whether another keep fits into the share, once others have been given up for it."""
        if len(hold) > self._room:
            return False
        while len(self._kept) + sum(block.block_id not in self._kept for block in hold.blocks) > self._room:
            overdue = self._overdue()
            if not overdue:
                return False
            self._end_cheapest(overdue, KeepEnd.SHARE)
        return True

    def _overdue(self) -> list[str]:
        now, longest = self._now(), OVERDUE * self._pause
        return [each for each, keep in self._keeps.items() if now - keep.since > longest or now >= keep.until]

    def _came_back(self, pause: float) -> None:
        known = self._pause < float("inf")
        self._pause = self._pause + (pause - self._pause) / PAUSES if known else pause

    def _end_cheapest(self, among: Iterable[str], why: KeepEnd) -> None:
        now = self._now()
        conversation = max(among, key=lambda each: self._keeps[each].cheapness(now))
        self._end_if_kept(conversation, KeepEnd.EXPIRED if now >= self._keeps[conversation].until else why)

    def _end_if_kept(self, conversation: str, why: KeepEnd) -> None:
        keep = self._keeps.pop(conversation, None)
        if keep is not None:
            self._end(keep, why)

    def _end(self, keep: _Keep, why: KeepEnd, *, hit: int = 0) -> None:
        self._free.release(keep.hold)
        for block in keep.hold.blocks:
            self._kept[block.block_id] -= 1
            if not self._kept[block.block_id]:
                del self._kept[block.block_id]
        self._counters.keep_ended(why, hit=hit)
        self._tell()

    def _tell(self) -> None:
        taken = sum(turn.keep is not None for turn in self._waiting.values())
        self._counters.keeps(len(self._keeps) + taken, blocks=len(self._kept))

    # ---- prompts that wait

    def _end_wait(self, turn: _Turn, why: WaitEnd) -> None:
        self._free.release(turn.hold)
        if len(turn.hold):
            self._counters.wait_ended(why)

    def _leave(self, turn: _Turn) -> None:
        """The request has ended without being admitted: its conversation's keep stays, for another try."""
        self._end_wait(turn, WaitEnd.GONE)
        if turn.keep is None or turn.order is None:
            return
        if turn.order.conversation in self._keeps:
            self._end(turn.keep, KeepEnd.REPLACED)
        else:
            self._keeps[turn.order.conversation] = turn.keep
            self._soonest = min(self._soonest, turn.keep.until)

    # ---- need

    def _give_up(self) -> None:
        """A block is needed, and only held ones are free."""
        if self._keeps:
            self._end_cheapest(self._keeps, KeepEnd.NEED)
            return
        _, turn = self._waiting.popitem()
        self._end_wait(turn, WaitEnd.NEED)
        if turn.keep is not None:
            self._end(turn.keep, KeepEnd.NEED)


def _hold(found: KVCacheBlocks, manager: KVCacheManager) -> Hold:
    """The blocks found, but for those of a group that has a pool of its own (HiSparse's in the host's memory)."""
    every = (block for group in found.blocks for block in group)
    return Hold([block for block in every if not block.is_null and block.pool is manager.block_pool])
