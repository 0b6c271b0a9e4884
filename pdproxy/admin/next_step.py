"""The next commands in an incident, and where the documentation goes on. Pure."""

import dataclasses
import enum
from collections.abc import Sequence

from pdproxy.admin.commands import HERE, Commands, ask, processes
from pdproxy.admin.incident import Cause, Incident, silent_roles
from pdproxy.admin.seen import WINDOW, Seen, of_role
from pdproxy.nodes.node import SERVING, NodeView, Role, State
from pdproxy.settings.types import OnNoDecode

DOCS = "https://github.com/pdproxy/pdproxy/tree/main/docs"
"""As in `pyproject.toml`; a test compares."""
PAGE = "troubleshooting.md"
"""Below `DOCS`: symptoms, what they mean and what to do."""
MOST_COMMANDS = 3
"""Nodes that are out, each with a command of its own."""
MOST_CHECKED = 8
"""Nodes that one command checks; of more, those that the incident is about, and a node of each role."""


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
        commands: to be pasted into a shell on the proxy's host; `HERE` stands for this port's address.
        section: where the documentation goes on.
        then: what to do by what the commands print; "" where nothing need be said.
    """

    what: str
    commands: Sequence[str]
    section: PageSection
    then: str = ""

    @property
    def docs(self) -> str:
        """The address of the section."""
        return f"{DOCS}/{PAGE}#{self.section}"


def next_step(seen: Seen, incident: Incident, commands: Commands) -> NextStep | None:
    """The first thing to do; None while nothing is wrong, no node goes away, and none came back."""
    match incident.cause:
        case Cause.NOTHING:
            return _of_nothing(seen, commands)
        case Cause.HAND_OVERS:
            return _of_hand_overs(seen, incident, commands)
        case Cause.LOAD:
            return _of_load(seen, commands)
        case Cause.PROXY:
            return _of_proxy(seen, commands)
        case Cause.NODE:
            return _of_node(seen, incident, commands)


def _of_nothing(seen: Seen, commands: Commands) -> NextStep | None:
    if going := seen.going():
        return _of_view(seen, going[0], commands)
    for view in seen.nodes:
        if view.outage is not None and seen.now - view.outage.ended <= WINDOW:
            text = "Nothing need be done. Why it went, the proxy's log (here pdproxy.log) and its own log say:"
            return NextStep(text, [f"grep 'node {view.name} is' pdproxy.log"], PageSection.A_NODE_IS_DOWN)
    return None


def _of_hand_overs(seen: Seen, incident: Incident, commands: Commands) -> NextStep:
    check = [commands.check(_checked(seen, incident.nodes))]
    refused = [view for view in of_role(seen.nodes, Role.PREFILL) if view.state is State.REFUSED]
    if refused and not incident.change:
        return _of_view(seen, refused[0], commands)
    if not incident.change:
        return NextStep("Ask every node why it hands nothing over:", check, PageSection.NOTHING_IS_HANDED_OVER)
    text = f"{incident.change[0].upper()}{incident.change[1:]}. Then see whether it works:"
    then = "The proxy tests the pair by itself: when the node joins again, and every two minutes at least."
    return NextStep(text, check, PageSection.NOTHING_IS_HANDED_OVER, then)


def _checked(seen: Seen, names: Sequence[str]) -> list[NodeView]:
    """The nodes that are checked together: all, or those of these names and some to compare them with."""
    if len(seen.nodes) <= MOST_CHECKED:
        return list(seen.nodes)
    named = [view for view in seen.nodes if view.name in names][: MOST_CHECKED - len(Role)]
    partners = [view for role in Role for view in of_role(seen.nodes, role)[:1]]
    return [*named, *(view for view in partners if view not in named)]


def _of_load(seen: Seen, commands: Commands) -> NextStep:
    rejected = f"curl -sS {HERE}/metrics | grep '^pdproxy_key_rejected_total.* [1-9]'"
    if not seen.is_full_now():
        text = "See which limit turned requests away since the start, and whose they were:"
        return NextStep(text, [rejected], PageSection.REQUESTS_ARE_TURNED_AWAY)
    text = "See what runs and waits now, by key and model, and whose requests were turned away since the start:"
    then = "Add decode nodes. Or raise limits.queue or limits.concurrency, and restart the proxy."
    queue = f"{commands.operators('/nodes')} | jq -c .queue"
    return NextStep(text, [queue, rejected], PageSection.REQUESTS_ARE_TURNED_AWAY, then)


def _of_proxy(seen: Seen, commands: Commands) -> NextStep:
    if silent_roles(seen):
        view = next(view for view in seen.nodes if view.silent)
        text = "Ask a node from the proxy's host, then from another host. If only the other host is answered, it is us:"
        return NextStep(text, [ask(view)], PageSection.NOTHING_COMES_BACK_FROM_ANY_NODE)
    if seen.not_ready and not seen.nodes:
        text = "This proxy knows no node. See which it was given:"
        return NextStep(text, [commands.operators("/nodes")], PageSection.THIS_PROXY_KNOWS_NO_NODE)
    text = "Search the proxy's log (here as pdproxy.log) for the requests that failed:"
    return NextStep(text, ["grep 'level=warning' pdproxy.log"], PageSection.REQUESTS_FAIL_THOUGH_NO_NODE_DID)


def _of_node(seen: Seen, incident: Incident, commands: Commands) -> NextStep:
    first = incident.nodes[0] if incident.nodes else ""
    view = next((view for view in seen.nodes if view.name == first), None)
    if view is None:
        text = f"{first} has left. See which nodes are here:"
        return NextStep(text, [commands.operators("/nodes")], PageSection.A_NODE_HAS_LEFT)
    step = _of_view(seen, view, commands)
    return dataclasses.replace(step, then=f"{step.then} {_stopgap(seen)}".strip())


def _stopgap(seen: Seen) -> str:
    """How prefill nodes can serve meanwhile; "" where they need not, or cannot."""
    decodes, prefills = (of_role(seen.nodes, role) for role in (Role.DECODE, Role.PREFILL))
    lone = [view for view in prefills if view not in decodes and view.state in SERVING]
    if not (seen.not_ready and lone) or seen.on_no_decode is OnNoDecode.PREFILL:
        return ""
    if any(view.state in SERVING for view in decodes):
        return ""
    return (
        "Should that take long, let prefill nodes serve whole requests: restart the proxy with policy.on_no_decode:"
        " prefill. Streams that wait end with it."
    )


def _of_view(seen: Seen, view: NodeView, commands: Commands) -> NextStep:
    name = view.name
    match view.state:
        case State.REFUSED:
            text = (
                f"{name} has a setting that cannot work with the others. Change what the reason below names, and"
                f" restart {name}: it joins by itself. To compare the nodes:"
            )
            return NextStep(text, [commands.check(_checked(seen, [name]))], PageSection.A_NODE_IS_REFUSED)
        case State.DRAINING:
            text = f"{name} takes no new requests. If it is to serve again:"
            return NextStep(text, [commands.rejoin(view)], PageSection.A_NODE_GOES_AWAY)
        case State.TERMINATING:
            text = f"{name} goes away with its pod. See whether the node that follows it joins:"
            return NextStep(text, [commands.operators("/nodes")], PageSection.A_NODE_GOES_AWAY)
        case State.UP:
            return _of_failing(view)
        case _ if view.silent:
            return _of_silent(view)
        case _ if all(map(_refuses, _with_others(seen, view))):
            return _of_closed(seen, view)
        case State.JOINING:
            text = f"{name} does not join, and its reason stands below. Ask it from the proxy's host:"
            return NextStep(text, [ask(view)], PageSection.A_NODE_DOES_NOT_JOIN, _wrong_address([view]))
        case _:
            return _of_broken(seen, view)


def _of_failing(view: NodeView) -> NextStep:
    text = f"{view.name} still gets requests. See whether it answers, and whether its engine works:"
    then = (
        "If /health does not answer, the node is silent: look at its host. If it answers and legs go on to fail, its"
        " engine makes no step (stall) or fails (its log has the traceback): restart it."
    )
    metrics = f"{ask(view, '/metrics')} | grep vllm:num_requests"
    return NextStep(text, [ask(view), metrics], PageSection.LEGS_FAIL_ON_A_NODE, then)


def _of_silent(view: NodeView) -> NextStep:
    text = f"{view.name} is frozen, or its host or network is gone. Look at its processes, and ask it:"
    then = (
        "STAT begins with T: it is stopped, kill -CONT PID wakes it. D: it waits for a disk or a driver. Anything else:"
        " restart it. If ssh does not answer either, the host or its network is gone."
    )
    asked = [processes(view), ask(view)]
    if view.state is State.JOINING:
        return NextStep(text, asked, PageSection.A_NODE_IS_SILENT, f"{then} {_wrong_address([view])}")
    return NextStep(text, asked, PageSection.A_NODE_IS_SILENT, then)


def _refuses(view: NodeView) -> bool:
    return "refused" in view.reason


def _with_others(seen: Seen, first: NodeView) -> list[NodeView]:
    """A node that is out, and others that are and are not silent: as many as have commands of their own."""
    others = [view for view in seen.out() if view.state in (State.DOWN, State.PROBING, State.JOINING)]
    return [first, *(view for view in others if view is not first and not view.silent)][:MOST_COMMANDS]


def _of_broken(seen: Seen, first: NodeView) -> NextStep:
    """For nodes that are down, and it is not known whether their processes have ended."""
    shown = [view for view in _with_others(seen, first) if view.state is not State.JOINING]
    names, them = " and ".join(view.name for view in shown), "its" if len(shown) == 1 else "their"
    text = f"Ask {names} from the proxy's host, and look at {them} processes:"
    then = (
        "If the connection is refused, no process listens there: start it. If nothing comes back, the node is silent:"
        " look at its host. If it answers 200, it joins by itself within seconds."
    )
    commands = [command for view in shown for command in (ask(view), processes(view))]
    return NextStep(text, commands, PageSection.A_NODE_IS_DOWN, then)


def _of_closed(seen: Seen, first: NodeView) -> NextStep:
    """For nodes whose ports are closed: as many as have a command each."""
    shown = _with_others(seen, first)
    names = " and ".join(view.name for view in shown)
    text = (
        f"Connections to {names} are refused: vLLM is loading its model (wait: minutes for a large one), or no process"
        " runs: start it as it was started before. It joins by itself. See which:"
    )
    joining = [view for view in shown if view.state is State.JOINING]
    section = PageSection.A_NODE_DOES_NOT_JOIN if joining else PageSection.A_NODE_IS_DOWN
    return NextStep(text, [processes(view) for view in shown], section, _wrong_address(joining))


def _wrong_address(joining: Sequence[NodeView]) -> str:
    if not joining:
        return ""
    return (
        f"If {joining[0].node.url} is not its address, correct it where discovery reads it, or in nodes (--decode URL,"
        " --prefill URL) and restart the proxy."
    )
