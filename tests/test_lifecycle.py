"""The life of a request: the moves of the table and no others."""

import itertools

import pytest

from pdproxy.lifecycle import TRANSITIONS, IllegalTransition, RequestState, Transition

ROADS: dict[RequestState, list[Transition]] = {
    RequestState.PLANNING: [],
    RequestState.PREFILLING: [Transition.PREFILL],
    RequestState.HANDING_OVER: [Transition.PREFILL, Transition.TICKET],
    RequestState.STREAMING: [Transition.LOCAL, Transition.FIRST_EVENT],
    RequestState.ENDED: [Transition.END],
}


def _after(state: RequestState, *moves: Transition) -> RequestState:
    for move in moves:
        state = TRANSITIONS[state, move]
    return state


@pytest.mark.parametrize("state", RequestState)
def test_every_state_can_be_reached(state: RequestState) -> None:
    assert _after(RequestState.PLANNING, *ROADS[state]) is state


@pytest.mark.parametrize(("state", "move"), list(itertools.product(RequestState, Transition)))
def test_a_move_that_is_not_in_the_table_raises(state: RequestState, move: Transition) -> None:
    if (state, move) in TRANSITIONS:
        assert isinstance(TRANSITIONS[state, move], RequestState)
        return
    with pytest.raises(IllegalTransition, match=f"{move} is not a move from {state}"):
        TRANSITIONS[state, move]


@pytest.mark.parametrize("state", RequestState)
def test_every_life_can_end_at_any_moment(state: RequestState) -> None:
    assert _after(state, Transition.END, Transition.END) is RequestState.ENDED


def test_a_migrating_stream_goes_the_normal_way_again() -> None:
    state = _after(
        RequestState.STREAMING,
        Transition.MIGRATE,
        Transition.PREFILL,
        Transition.AGAIN,
        Transition.LOCAL,
        Transition.AGAIN,
        Transition.PREFILL,
        Transition.TICKET,
        Transition.SAME_TICKET,
        Transition.FIRST_EVENT,
    )
    assert state is RequestState.STREAMING
