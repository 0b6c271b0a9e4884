"""The next command in an incident, and where the documentation goes on. Pure."""

import dataclasses
import shlex

from pdproxy.admin.incident import Cause, Incident, silent_roles
from pdproxy.admin.seen import Seen
from pdproxy.nodes.node import NodeView, State

DOCS = "https://github.com/pdproxy/pdproxy/tree/main/docs"
"""As in `pyproject.toml`; a test compares."""
HERE = "{here}"
"""Stands in commands for the address of the operators' port, which the browser knows."""


@dataclasses.dataclass(frozen=True, slots=True)
class NextStep:
    """The first thing to do.

    Attributes:
        what: a sentence.
        command: to be pasted into a shell on the proxy's host; `HERE` stands for this port's address.
        page: of the documentation, with a section.
    """

    what: str
    command: str
    page: str

    @property
    def docs(self) -> str:
        """The address of the page."""
        return f"{DOCS}/{self.page}"


def next_step(seen: Seen, incident: Incident) -> NextStep | None:
    """The first thing to do; None while nothing is wrong."""
    match incident.cause:
        case Cause.NOTHING:
            return None
        case Cause.HAND_OVERS:
            text = "Ask every node why it hands nothing over:"
            return NextStep(text, "pdproxy check", "node-failures.md#when-nothing-is-handed-over")
        case Cause.LOAD:
            text = "See what waits, and for how long:"
            return NextStep(text, f"curl -sS {HERE}/nodes", "queue.md#what-waits-in-the-proxy")
        case Cause.PROXY:
            return _of_proxy(seen)
        case Cause.NODE:
            return _of_node(seen, incident)


def _of_proxy(seen: Seen) -> NextStep:
    if silent_roles(seen):
        view = next(view for view in seen.nodes if view.silent)
        text = "Ask a node from the proxy's host, then from another host. If only the other host is answered, it is us:"
        return NextStep(text, _ask(view), "node-failures.md#a-node-that-freezes")
    if seen.not_ready and not seen.nodes:
        return NextStep("This proxy knows no node. See which it was given:", f"curl -sS {HERE}/nodes", "install.md")
    text = "Search the proxy's log (here as pdproxy.log) for the requests that failed:"
    return NextStep(text, "grep 'level=warning' pdproxy.log", "watching.md#the-log")


def _of_node(seen: Seen, incident: Incident) -> NextStep:
    first = incident.nodes[0] if incident.nodes else ""
    view = next((view for view in seen.nodes if view.name == first), None)
    if view is None:
        text = f"{first} has left. See which nodes are here:"
        return NextStep(text, f"curl -sS {HERE}/nodes", "node-failures.md#when-something-dies")
    match view.state:
        case State.REFUSED:
            text = f"{first} has a setting that cannot work with the others. See which:"
            return NextStep(text, "pdproxy check", "compatibility.md#what-must-be-equal-and-what-may-differ")
        case State.DRAINING | State.TERMINATING:
            text = f"{first} takes no new requests. If it is to serve again:"
            command = f"curl -sS -X POST {HERE}/nodes/{shlex.quote(first)}/rejoin"
            return NextStep(text, command, "upgrading.md#upgrading-nodes")
        case State.UP:
            text = f"{first} still gets requests. See whether its engine works:"
            return NextStep(text, f"{_ask(view, '/metrics')} | grep vllm:num_requests", "failures.md")
        case _ if view.silent:
            text = (
                f"Ask {first} from the proxy's host. If nothing comes back, it is frozen, or its host or network gone:"
            )
            return NextStep(text, _ask(view), "node-failures.md#a-node-that-freezes")
        case _:
            text = (
                f"Ask {first} from the proxy's host. If the connection is refused, no process listens there: start it."
            )
            return NextStep(text, _ask(view), "node-failures.md#when-something-dies")


def _ask(view: NodeView, path: str = "/health") -> str:
    return f"curl -sS -i -m 5 {shlex.quote(view.node.url + path)}"
