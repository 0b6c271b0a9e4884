"""Nodes as plans see them, with a load that is given."""

from collections.abc import Sequence

from pdproxy.nodes.node import NO_FOOTPRINT, Footprint, Node, NodeView, State


def view_of(
    node: Node,
    state: State = State.UP,
    active: int = 0,
    share: float = 1.0,
    *,
    legs: Sequence[int] = (),
    queued: Sequence[int] = (),
    held: Sequence[Footprint] = (),
    trials: int = 0,
) -> NodeView:
    """A node in a state, of which so many legs run. By rank: its legs, the tokens that are to be computed of their
    prompts, and what they take of the caches."""
    view = NodeView(node, state, active, share, trials)
    for place in view.places:
        rank = place.rank
        place.legs = legs[rank] if legs else 0
        place.queued = queued[rank] if queued else 0
        taken = held[rank] if held else NO_FOOTPRINT
        place.tokens, place.sequences = taken.tokens, taken.sequences
        view.changed(place)
    return view
