"""The next command in an incident, and where the documentation goes on. Pure."""

import dataclasses
import enum
import shlex

from pdproxy.admin.incident import Cause, Incident, silent_roles
from pdproxy.admin.seen import Seen
from pdproxy.nodes.node import NodeView, State

DOCS = "https://github.com/pdproxy/pdproxy/tree/main/docs"
"""As in `pyproject.toml`; a test compares."""
PAGE = "troubleshooting.md"
"""Below `DOCS`: symptoms, what they mean and what to do."""
_GOING = (State.DRAINING, State.TERMINATING)
HERE = "{here}"
"""Stands in commands for the address of the operators' port, which the browser knows."""


class PageSection(enum.StrEnum):
    """Sections of `PAGE`: its headings, as links name them."""

    A_NODE_IS_DOWN = "a-node-is-down"
    A_NODE_IS_SILENT = "a-node-is-silent"
    A_NODE_DOES_NOT_JOIN = "a-node-does-not-join"
    LEGS_FAIL_ON_A_NODE = "legs-fail-on-a-node"
    A_NODE_IS_REFUSED = "a-node-is-refused"
    A_NODE_GOES_AWAY = "a-node-goes-away"
    A_NODE_HAS_LEFT = "a-node-has-left"
    NOTHING_IS_HANDED_OVER = "nothing-is-handed-over"
    NOTHING_COMES_BACK_FROM_ANY_NODE = "nothing-comes-back-from-any-node"
    REQUESTS_FAIL_THOUGH_NO_NODE_DID = "requests-fail-though-no-node-did"
    THIS_PROXY_KNOWS_NO_NODE = "this-proxy-knows-no-node"
    REQUESTS_ARE_TURNED_AWAY = "requests-are-turned-away"


@dataclasses.dataclass(frozen=True, slots=True)
class NextStep:
    """The first thing to do.

    Attributes:
        what: a sentence.
        command: to be pasted into a shell on the proxy's host; `HERE` stands for this port's address.
        section: where the documentation goes on.
    """

    what: str
    command: str
    section: PageSection

    @property
    def docs(self) -> str:
        """The address of the section."""
        return f"{DOCS}/{PAGE}#{self.section}"


def next_step(seen: Seen, incident: Incident) -> NextStep | None:
    """The first thing to do; None while nothing is wrong, and no node goes away."""
    match incident.cause:
        case Cause.NOTHING:
            going = next((view for view in seen.nodes if view.state in _GOING), None)
            return None if going is None else _of_view(going)
        case Cause.HAND_OVERS:
            text = "Ask every node why it hands nothing over:"
            return NextStep(text, "pdproxy check", PageSection.NOTHING_IS_HANDED_OVER)
        case Cause.LOAD:
            text = "See which limit turns requests away, and whose:"
            command = f"curl -sS {HERE}/metrics | grep '^pdproxy.*rejected_total.* [1-9]'"
            return NextStep(text, command, PageSection.REQUESTS_ARE_TURNED_AWAY)
        case Cause.PROXY:
            return _of_proxy(seen)
        case Cause.NODE:
            return _of_node(seen, incident)


def _of_proxy(seen: Seen) -> NextStep:
    if silent_roles(seen):
        view = next(view for view in seen.nodes if view.silent)
        text = "Ask a node from the proxy's host, then from another host. If only the other host is answered, it is us:"
        return NextStep(text, _ask(view), PageSection.NOTHING_COMES_BACK_FROM_ANY_NODE)
    if seen.not_ready and not seen.nodes:
        text = "This proxy knows no node. See which it was given:"
        return NextStep(text, f"curl -sS {HERE}/nodes", PageSection.THIS_PROXY_KNOWS_NO_NODE)
    text = "Search the proxy's log (here as pdproxy.log) for the requests that failed:"
    return NextStep(text, "grep 'level=warning' pdproxy.log", PageSection.REQUESTS_FAIL_THOUGH_NO_NODE_DID)


def _of_node(seen: Seen, incident: Incident) -> NextStep:
    first = incident.nodes[0] if incident.nodes else ""
    view = next((view for view in seen.nodes if view.name == first), None)
    if view is None:
        text = f"{first} has left. See which nodes are here:"
        return NextStep(text, f"curl -sS {HERE}/nodes", PageSection.A_NODE_HAS_LEFT)
    return _of_view(view)


def _of_view(view: NodeView) -> NextStep:
    name = view.name
    match view.state:
        case State.REFUSED:
            text = f"{name} has a setting that cannot work with the others. See which:"
            return NextStep(text, "pdproxy check", PageSection.A_NODE_IS_REFUSED)
        case State.DRAINING:
            text = f"{name} takes no new requests. If it is to serve again:"
            command = f"curl -sS -X POST {HERE}/nodes/{shlex.quote(name)}/rejoin"
            return NextStep(text, command, PageSection.A_NODE_GOES_AWAY)
        case State.TERMINATING:
            text = f"{name} goes away with its pod. See whether the node that follows it joins:"
            return NextStep(text, f"curl -sS {HERE}/nodes", PageSection.A_NODE_GOES_AWAY)
        case State.UP:
            text = f"{name} still gets requests. See whether its engine works:"
            command = f"{_ask(view, '/metrics')} | grep vllm:num_requests"
            return NextStep(text, command, PageSection.LEGS_FAIL_ON_A_NODE)
        case _ if view.silent:
            text = (
                f"Ask {name} from the proxy's host. If nothing comes back, it is frozen, or its host or network gone:"
            )
            return NextStep(text, _ask(view), PageSection.A_NODE_IS_SILENT)
        case State.JOINING:
            text = (
                f"Ask {name} from the proxy's host. If the connection is refused, no process listens there: start it,"
                " or correct its address:"
            )
            return NextStep(text, _ask(view), PageSection.A_NODE_DOES_NOT_JOIN)
        case _:
            text = (
                f"Ask {name} from the proxy's host. If the connection is refused, no process listens there: start it."
            )
            return NextStep(text, _ask(view), PageSection.A_NODE_IS_DOWN)


def _ask(view: NodeView, path: str = "/health") -> str:
    return f"curl -sS -i -m 5 {shlex.quote(view.node.url + path)}"
