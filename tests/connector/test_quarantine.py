"""Blocks under a live read stay out of the pool until every rank's read has ended."""

from collections.abc import Sequence
from dataclasses import dataclass

from connector.decode_reads import Quarantine


@dataclass
class Block:
    references: int = 1
    is_null: bool = False
    block_hash: str | None = None


class Pool:
    """Counts references as vLLM's does."""

    def touch(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            block.references += 1

    def free_blocks(self, ordered_blocks: Sequence[Block]) -> None:
        for block in ordered_blocks:
            block.references -= 1


def bound() -> Quarantine:
    quarantine = Quarantine()
    quarantine.bind(Pool())
    return quarantine


def test_blocks_outlive_their_request() -> None:
    quarantine, blocks = bound(), [Block(), Block()]
    quarantine.add("n", blocks, ranks=1)
    Pool().free_blocks(blocks)
    assert [block.references for block in blocks] == [1, 1]
    assert quarantine.blocks == 2
    quarantine.on_transfers_ended({"n": 1})
    assert [block.references for block in blocks] == [0, 0]
    assert (len(quarantine), quarantine.blocks) == (0, 0)


def test_the_last_rank_frees() -> None:
    quarantine, block = bound(), Block()
    quarantine.add("n", [block], ranks=1)
    quarantine.add("n", [block], ranks=1)
    assert quarantine.on_transfers_ended({"n": 1}) == []
    assert block.references == 2
    assert "n" in quarantine
    assert quarantine.on_transfers_ended({"n": 1}) == ["n"]
    assert block.references == 1
    assert "n" not in quarantine


def test_null_blocks_and_strangers_are_left_alone() -> None:
    quarantine, null = bound(), Block(is_null=True)
    quarantine.add("n", [null], ranks=1)
    quarantine.on_transfers_ended({"other": 1})
    assert null.references == 1
    assert len(quarantine) == 1


def test_a_local_hit_is_not_kept_from_others() -> None:
    """No transfer writes to it, and others may have it in use."""
    quarantine, hit, pulled = bound(), Block(block_hash="h"), Block()
    quarantine.add("n", [hit, pulled], ranks=1)
    assert (hit.references, pulled.references, quarantine.blocks) == (1, 2, 1)


def test_nothing_can_be_held_before_there_is_a_pool() -> None:
    quarantine = Quarantine()
    quarantine.add("n", [Block()], ranks=1)
    assert len(quarantine) == 0
