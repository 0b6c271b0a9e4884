"""The life of a request: the moves of the table and no others."""

import itertools

import pytest

from pdproxy.lifecycle import MOVES, IllegalMove, Life, Move, Stage

ROADS: dict[Stage, list[Move]] = {
    Stage.PLANNING: [],
    Stage.PREFILLING: [Move.PREFILL],
    Stage.HANDING_OVER: [Move.PREFILL, Move.TICKET],
    Stage.STREAMING: [Move.LOCAL, Move.FIRST_EVENT],
    Stage.ENDED: [Move.END],
}


def _at(stage: Stage) -> Life:
    life = Life()
    for move in ROADS[stage]:
        life.move(move)
    assert life.stage is stage
    return life


@pytest.mark.parametrize(("stage", "move"), list(itertools.product(Stage, Move)))
def test_a_move_is_in_the_table_or_raises(stage: Stage, move: Move) -> None:
    life = _at(stage)
    if (stage, move) in MOVES:
        life.move(move)
        assert life.stage is MOVES[stage, move]
        return
    with pytest.raises(IllegalMove):
        life.move(move)
    assert life.stage is stage


@pytest.mark.parametrize("stage", Stage)
def test_every_life_can_end_at_any_moment(stage: Stage) -> None:
    life = _at(stage)
    life.move(Move.END)
    life.move(Move.END)
    assert life.stage is Stage.ENDED


def test_a_migrating_stream_goes_the_normal_way_again() -> None:
    life = _at(Stage.STREAMING)
    for move in (Move.MIGRATE, Move.PREFILL, Move.AGAIN, Move.LOCAL, Move.AGAIN, Move.PREFILL, Move.TICKET):
        life.move(move)
    for move in (Move.SAME_TICKET, Move.FIRST_EVENT):
        life.move(move)
    assert life.stage is Stage.STREAMING
