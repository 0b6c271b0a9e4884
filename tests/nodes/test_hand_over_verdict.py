"""Whether prompts are handed over at all, in one line."""

from collections.abc import Mapping
from typing import Any

from pdproxy.nodes.hand_over_verdict import HandOverVerdict, verdict
from pdproxy.nodes.hand_overs import Used
from pdproxy.nodes.node import Bars, Node, NodeView, PoolState, Role, State

CANNOT = "d0 cannot reach p0 at 127.0.0.1:5600: set NODE_ADDRESS"


def view(name: str, state: State = State.UP, reason: str = "", **more: Any) -> NodeView:
    role = Role.PREFILL if name.startswith("p") else Role.DECODE
    return NodeView(
        Node(name, f"http://{name}", (role,), **{"model": "m", "cohort": "a", **more}), state, 0, reason=reason
    )


def of(
    *views: NodeView, pairs: Mapping[tuple[str, str], str] | None = None, nodes: Mapping[str, str] | None = None,
    used: Used | None = None,
) -> HandOverVerdict:  # fmt: skip
    return verdict(PoolState(views, Bars(pairs or {}, nodes or {})), used or Used())


def test_all_is_well() -> None:
    found = of(view("p0"), view("d0"))
    assert (found.why, found.fail) == ((), False)
    assert found.line() == "nothing keeps hand-overs from happening. No ticket was given in 5 minutes"
    line = of(view("p0"), view("d0"), used=Used(1200, 12)).line()
    assert line.endswith("Computed twice: the prompts of 12 of 1,200 tickets in 5 minutes (1%)")


def test_no_pair_hands_over() -> None:
    found = of(view("p0"), view("d0"), pairs={("p0", "d0"): CANNOT})
    assert found.fail
    assert found.line() == f"hand-overs fail: decode nodes compute the prompts themselves; {CANNOT}"
    assert not of(view("p0", State.DOWN), view("d0"), pairs={("p0", "d0"): CANNOT}).why, "its node is out"


def test_what_to_change_is_known_where_a_node_told_why() -> None:
    assert of(view("p0"), view("d0"), pairs={("p0", "d0"): CANNOT}).changes == {CANNOT: "set NODE_ADDRESS"}
    assert of(view("p0"), view("d0"), pairs={("p0", "d0"): "other tokens: 2 of 4"}).changes == {}
    assert of(view("p0", State.DOWN), view("d0"), pairs={("p0", "d0"): CANNOT}).changes == {}


def test_some_pairs_hand_over() -> None:
    found = of(view("p0"), view("p1"), view("d0"), pairs={("p0", "d0"): CANNOT}, used=Used(10, 5))
    assert not found.fail
    assert found.line().startswith(f"some hand-overs fail: {CANNOT}. Computed twice: the prompts of 5 of 10 tickets")


def test_what_does_not_name_the_nodes_is_said_of_them() -> None:
    assert of(view("p0"), view("d0"), pairs={("p0", "d0"): "far apart"}).why == (
        "p0 and d0 exchange no tickets: far apart",
    )
    assert (
        of(view("p0"), view("d0"), nodes={"d0": "far apart"}).why[0].startswith("d0 exchanges no tickets with any node")
    )


def test_a_prefill_node_that_is_refused() -> None:
    refused = view("p0", State.REFUSED, "side_channel: …", model="")
    assert of(refused, view("d0")).line().endswith("p0 is refused: side_channel: …")
    assert of(refused, view("d0")).fail
    assert not of(refused, view("p1"), view("d0")).fail


def test_nodes_that_differ() -> None:
    """A mistake, or the middle of an upgrade; as long as one pair of a cohort serves, nothing is missing."""
    old = [
        view("p0", fingerprint={"dtype": "a", "all": "1"}),
        view("d0", fingerprint={"dtype": "b", "all": "2"}, cohort="b"),
    ]
    assert of(*old).why == ("p0 and d0 differ in dtype: pdproxy check says what to align",)
    assert of(*old).fail
    assert not of(*old, view("p1", cohort="b")).why
    assert (
        of(view("p0", model="big"), view("d0"))
        .why[0]
        .startswith("p0 serves big, and d0 m: give nodes of one model one")
    )


def test_where_a_role_is_missing_nothing_is_said_of_hand_overs() -> None:
    for views in ([], [view("p0")], [view("d0")], [view("p0", State.DOWN), view("d0")]):
        assert (of(*views).why, of(*views).fail) == ((), False)


def test_the_line_names_a_role_of_which_no_node_serves() -> None:
    dead = of(view("p0", State.DOWN), view("d0"), used=Used(10, 5))
    told = "Computed twice: the prompts of 5 of 10 tickets in 5 minutes (50%)"
    assert dead.line() == f"nothing is handed over: no prefill node serves. {told}"
    assert not dead.fail, "the node is out, and what is wrong is said of it"
    assert (
        of(view("p0"), view("d0", State.DRAINING)).line().startswith("nothing is handed over: no decode node serves.")
    )
    assert of(view("p0", State.DOWN), view("p1"), view("d0")).line().startswith("nothing keeps")


def test_many_tickets_in_vain() -> None:
    pair = view("p0"), view("d0")
    assert not of(*pair, used=Used(19, 19)).why
    assert not of(*pair, used=Used(100, 49)).why
    found = of(*pair, used=Used(100, 50))
    assert not found.fail
    assert found.why == ("50 of the last 100 tickets were of no use: their prompts were computed twice",)
