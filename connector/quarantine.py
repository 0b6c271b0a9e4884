"""Local blocks under a transfer that was given up on but may still write: kept out of the pool until it has ended.

References are taken in vLLM's block pool, so that whatever vLLM frees meanwhile stays allocated here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


class Pool(Protocol):
    """The part of vLLM's `BlockPool` that counts references."""

    def touch(self, blocks: Sequence[Any]) -> None: ...
    def free_blocks(self, ordered_blocks: Sequence[Any]) -> None: ...


@dataclass(slots=True)
class _Held:
    blocks: list[Any]
    ranks: int


class Quarantine:
    """Blocks by the nonce of the read that may still write to them. vLLM binds its pool before the first step."""

    def __init__(self) -> None:
        self._pool: Pool | None = None
        self._held: dict[str, _Held] = {}

    def bind(self, pool: Pool) -> None:
        """The pool whose references count."""
        self._pool = pool

    def __len__(self) -> int:
        """How many reads are waited for."""
        return len(self._held)

    def __contains__(self, nonce: str) -> bool:
        return nonce in self._held

    def stall(self, nonce: str, blocks: Sequence[Any], ranks: int) -> None:
        """`ranks` more ranks have a live transfer into `blocks`. Must come before vLLM frees them."""
        held = self._held.get(nonce)
        if held is not None:
            held.ranks += ranks
            return
        if self._pool is None:
            return
        kept = [block for block in blocks if not block.is_null]
        self._pool.touch(kept)
        self._held[nonce] = _Held(kept, ranks)

    def drain(self, drained: Mapping[str, int]) -> list[str]:
        """Live transfers that have ended, by nonce, in ranks; the last one frees the blocks. Which nonces that were."""
        freed = []
        for nonce, ranks in drained.items():
            held = self._held.get(nonce)
            if held is None or self._pool is None:
                continue
            held.ranks -= ranks
            if held.ranks <= 0:
                del self._held[nonce]
                self._pool.free_blocks(held.blocks)
                freed.append(nonce)
        return freed
