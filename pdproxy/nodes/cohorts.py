"""Cohorts of nodes as an upgrade goes on: which are complete, what goes to each, and whether an old node may go yet.

An upgrade of vLLM, connector, model or weights makes a second cohort, which exchanges no tickets with the first. The
first can be spared once the second is complete: both roles serve, and passed the known-answer test with each other.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence

from pdproxy.nodes.node import SERVING, Bars, Node, NodeView, PoolState, Role, State
from pdproxy.nodes.pool import Pool

UNKNOWN_NODE = "this proxy knows no such node"


@dataclasses.dataclass(frozen=True, slots=True)
class RoleCount:
    """Nodes of one role in a cohort: those that take requests, of these those that go away, and the others."""

    serving: int
    terminating: int
    others: int


@dataclasses.dataclass(frozen=True, slots=True)
class CohortStatus:
    """One cohort.

    Attributes:
        name: "" for nodes of which nothing is known (yet).
        models: what its nodes serve, sorted.
        complete: a prefill and a decode node that stay take requests, exchange tickets, and are proved.
        requests: that were sent to its decode nodes in the last five minutes.
        share: of all such requests.
    """

    name: str
    models: tuple[str, ...]
    prefill: RoleCount
    decode: RoleCount
    complete: bool
    requests: int
    share: float


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """Whether a node may go; ``why`` in a sentence."""

    leave: bool
    why: str


class Cohorts:
    """Reads the pool. ``proved``: whether a node, by its name, passed a known-answer test; all, where none are made."""

    def __init__(self, pool: Pool, proved: Callable[[str], bool] = lambda _: True) -> None:
        self._pool = pool
        self._proved = proved

    def report(self) -> tuple[CohortStatus, ...]:
        """All of them, in the order of joining of their first nodes."""
        now, recent = self._pool.state(), self._pool.traffic.recent()
        everything = recent.total()
        groups: dict[str, list[NodeView]] = {}
        for view in now.nodes:
            groups.setdefault(view.node.cohort, []).append(view)
        return tuple(
            CohortStatus(
                name,
                tuple(sorted({view.node.model for view in views if view.node.model})),
                _count(views, Role.PREFILL),
                _count(views, Role.DECODE),
                self._makes_pair(_staying(views), now.bars),
                recent[name],
                recent[name] / everything if everything else 0.0,
            )
            for name, views in groups.items()
        )

    def is_needed(self, name: str) -> bool:
        """Whether a node that goes away had better wait; False for one that is not there."""
        now = self._pool.state()
        return any(view.name == name and not self._may_leave(view, now).leave for view in now.nodes)

    def may_leave(self, host: str, port: int) -> Answer:
        """Whether the node at this address may go: nothing that serves would be missing then, or nothing that could
        follow it is on its way."""
        address, now = f"//{_bracketed(host)}:{port}", self._pool.state()
        answers = [self._may_leave(view, now) for view in now.nodes if view.node.url.endswith(address)]
        return min(answers, key=lambda answer: answer.leave, default=self._may_stranger_leave(now))

    def _may_stranger_leave(self, now: PoolState) -> Answer:
        """A proxy that has just started does not know yet who stays, nor nodes that were going away by then."""
        joining = any(view.state is State.JOINING for view in now.nodes)
        if joining and not self._makes_pair(_staying(now.nodes), now.bars):
            return Answer(False, f"{UNKNOWN_NODE}, and no pair yet")
        return Answer(True, UNKNOWN_NODE)

    def _may_leave(self, leaving: NodeView, now: PoolState) -> Answer:
        node = leaving.node
        if leaving.state not in SERVING:
            return Answer(True, f"it serves nothing: {leaving.state}")
        others = [view for view in now.nodes if view is not leaving and _serve_one_model(view.node, node)]
        staying = _staying(others)
        if self._makes_pair(staying, now.bars):
            return Answer(True, "nodes of both roles that exchange tickets stay")
        if any(node.replaces(view.node) for view in staying):
            return Answer(True, f"another {_word(node)} of its cohort stays")
        going = [view for view in others if view.state is State.TERMINATING]
        if not any(node.is_partner(view.node) for view in (*staying, *going)) and _has_roles(staying, node):
            return Answer(True, f"it makes no pair, and another {_word(node)} stays")
        coming = [view for view in others if view.state is State.JOINING or (view in staying and _unlike(view, node))]
        if not coming:
            return Answer(True, "no node that could follow it is on its way")
        return Answer(False, f"the nodes that follow it make no pair yet: {_names(coming)}")

    def _makes_pair(self, views: Sequence[NodeView], bars: Bars) -> bool:
        """Whether a ticket can pass between two of them, and both are proved."""
        proved = [view.node for view in views if self._proved(view.name)]
        prefills, decodes = ([node for node in proved if role in node.roles] for role in Role)
        return any(
            prefill.may_hand_to(decode) and bars.allow(prefill.name, decode.name)
            for prefill in prefills
            for decode in decodes
        )


def _staying(views: Iterable[NodeView]) -> list[NodeView]:
    return [view for view in views if view.state in (State.UP, State.PROBING)]


def _has_roles(views: Iterable[NodeView], node: Node) -> bool:
    """Whether one of these does all that the node does."""
    return any(set(view.node.roles).issuperset(node.roles) for view in views)


def _word(node: Node) -> str:
    return f"{node.kind} node" if len(node.roles) == 1 else "node of both roles"


def _unlike(view: NodeView, node: Node) -> bool:
    return not view.node.pairs_with(node.cohort)


def _serve_one_model(node: Node, other: Node) -> bool:
    return node.serves(other.model) or other.serves(node.model)


def _count(views: Iterable[NodeView], role: Role) -> RoleCount:
    states = [view.state for view in views if role in view.node.roles]
    serving = sum(state in SERVING for state in states)
    return RoleCount(serving, states.count(State.TERMINATING), len(states) - serving)


def _names(views: Iterable[NodeView]) -> str:
    return ", ".join(f"{view.name} ({view.state})" for view in views)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
