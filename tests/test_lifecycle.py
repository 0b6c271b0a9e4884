"""The life of a request: the moves of the table and no others."""

import itertools

import pytest

from pdproxy.lifecycle import TRANSITIONS, IllegalTransition, RequestLifecycle, RequestState, Transition

ROADS: dict[RequestState, list[Transition]] = {
    RequestState.PLANNING: [],
    RequestState.PREFILLING: [Transition.PREFILL],
    RequestState.HANDING_OVER: [Transition.PREFILL, Transition.TICKET],
    RequestState.STREAMING: [Transition.LOCAL, Transition.FIRST_EVENT],
    RequestState.ENDED: [Transition.END],
}


def _at(state: RequestState) -> RequestLifecycle:
    life = RequestLifecycle()
    for move in ROADS[state]:
        life.move(move)
    assert life.state is state
    return life


@pytest.mark.parametrize(("state", "move"), list(itertools.product(RequestState, Transition)))
def test_a_move_is_in_the_table_or_raises(state: RequestState, move: Transition) -> None:
    life = _at(state)
    if (state, move) in TRANSITIONS:
        life.move(move)
        assert life.state is TRANSITIONS[state, move]
        return
    with pytest.raises(IllegalTransition):
        life.move(move)
    assert life.state is state


@pytest.mark.parametrize("state", RequestState)
def test_every_life_can_end_at_any_moment(state: RequestState) -> None:
    life = _at(state)
    life.move(Transition.END)
    life.move(Transition.END)
    assert life.state is RequestState.ENDED


def test_a_migrating_stream_goes_the_normal_way_again() -> None:
    life = _at(RequestState.STREAMING)
    for move in (
        Transition.MIGRATE,
        Transition.PREFILL,
        Transition.AGAIN,
        Transition.LOCAL,
        Transition.AGAIN,
        Transition.PREFILL,
        Transition.TICKET,
    ):
        life.move(move)
    for move in (Transition.SAME_TICKET, Transition.FIRST_EVENT):
        life.move(move)
    assert life.state is RequestState.STREAMING
