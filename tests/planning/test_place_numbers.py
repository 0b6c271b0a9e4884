"""Sets of places as integers: numbers that come and go, and the same set as the same object."""

import pytest

from pdproxy.nodes.node import MOST_SETS, Node, PlaceSet, PoolState, Role, State
from pdproxy.planning.place_numbers import PlaceNumbers
from pdproxy.planning.prefix import Place
from tests.fakes.views import view_of

A, B, C = Place("a"), Place("b"), Place("b", 1)


def places(numbers: PlaceNumbers, mask: int) -> list[tuple[str, int]]:
    return list(numbers.places(mask).places)


@pytest.fixture
def numbers() -> PlaceNumbers:
    made = PlaceNumbers()
    for place in (A, B, C):
        made.add(place)
    return made


def test_a_mask_has_a_bit_for_each_place(numbers: PlaceNumbers) -> None:
    assert places(numbers, numbers.get(A) | numbers.get(C)) == [A, C]
    assert places(numbers, numbers.all) == [A, B, C]
    assert places(numbers, 0) == []
    assert numbers.get(Place("unknown")) == 0


def test_the_same_mask_is_the_same_set(numbers: PlaceNumbers) -> None:
    assert numbers.places(5) is numbers.places(5)


def test_a_number_that_is_free_goes_to_the_next_place(numbers: PlaceNumbers) -> None:
    bit = numbers.get(B)
    before = numbers.places(bit)
    numbers.drop(B)
    numbers.drop(B)
    assert places(numbers, numbers.all) == [A, C]
    assert numbers.add(Place("new")) == bit
    assert places(numbers, bit) == [Place("new")]
    assert list(before.places) == [B], "who has a set keeps it as it was"


def test_few_sets_are_remembered(numbers: PlaceNumbers) -> None:
    for number in range(12):
        numbers.add(Place(f"n{number}"))
    sets = {numbers.places(mask) for mask in range(2 * MOST_SETS)}
    assert len(sets) == 2 * MOST_SETS
    assert numbers.places(0) not in sets


def node(name: str, unit: int = 0, roles: tuple[Role, ...] = (Role.PREFILL,)) -> Node:
    return Node(name, f"http://{name}", roles, "m", block_size=64, prefix_match_unit=unit, ranks=2)


def test_places_of_nodes_that_are_alike_are_one_kind(numbers: PlaceNumbers) -> None:
    state = PoolState(tuple(view_of(each, State.UP) for each in (node("a"), node("b"), node("c", 16))))
    assert [(kind.name, places(numbers, mask)) for kind, mask in numbers.kinds(state)] == [("a", [A, B, C]), ("c", [])]
    numbers.add(Place("c"))
    assert places(numbers, {kind.name: mask for kind, mask in numbers.kinds(state)}["c"]) == [Place("c")]
    fewer = PoolState((view_of(node("a"), State.UP),))
    assert [places(numbers, mask) for _, mask in numbers.kinds(fewer)] == [[A]], "nodes that have left are of no kind"


def test_nodes_of_a_set_are_those_that_serve_in_a_role() -> None:
    both = (Role.PREFILL, Role.DECODE)
    state = PoolState(tuple(view_of(each, State.UP) for each in (node("a"), node("b", roles=both))))
    served, wanted = state.served("m"), PlaceSet([A, Place("b", 1), Place("gone"), Place("a", 7)])
    for _ in range(2):
        found = {role: [(view.name, place.rank) for view, place in served.spots_of(role, wanted)] for role in Role}
        assert found == {Role.PREFILL: [("a", 0), ("b", 1)], Role.DECODE: [("b", 1)]}
