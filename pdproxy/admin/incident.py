"""The three questions of an incident: is it this proxy or a node, since when, and who is hit. Pure: the time is given.

It goes by what this proxy alone has seen: the states of nodes, legs that failed, requests that ended without an answer.
"""

import collections
import dataclasses
import enum
import itertools
import math
from collections.abc import Iterable, Sequence

from pdproxy.nodes.hand_over_verdict import HandOverVerdict
from pdproxy.nodes.node import Bars, NodeView, Role, State
from pdproxy.observe.labels import Outcome
from pdproxy.orchestration.in_flight import BadEnd, LegFault, RecentEnds

WINDOW = 300.0
"""Seconds for which something that went wrong counts as going on."""
MOST_NAMES = 3
_OUT = (State.DOWN, State.REFUSED, State.PROBING)
_SERVING = (State.UP, State.TERMINATING)


class Cause(enum.StrEnum):
    """Where to look first."""

    NOTHING = "nothing"
    NODE = "node"
    PROXY = "proxy"
    """This proxy, its network, or its settings."""
    HAND_OVERS = "hand_overs"
    """Nodes serve, and hand nothing over: their settings, or the network between them."""
    LOAD = "load"
    """More is asked than there is room for."""


@dataclasses.dataclass(frozen=True, slots=True)
class Hit:
    """Whom it hits, in the last `WINDOW`.

    Attributes:
        requests: that ended, however.
        failed, rejected: of them, without an answer; turned away.
        legs: on nodes that failed. Most requests survive that.
        keys, models, endpoints: of requests that failed or were turned away, the names with the most, and how many.
    """

    requests: int = 0
    failed: int = 0
    rejected: int = 0
    legs: int = 0
    keys: Sequence[tuple[str, int]] = ()
    models: Sequence[tuple[str, int]] = ()
    endpoints: Sequence[tuple[str, int]] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Incident:
    """The answers.

    Attributes:
        nodes: names of those that are out, or on which legs failed.
        what: a sentence for each thing that is wrong.
        since: seconds ago; None while nothing is wrong, and where nobody knows.
        hand_overs: one line about them, whether something is wrong or not.
    """

    cause: Cause
    nodes: Sequence[str]
    what: Sequence[str]
    since: float | None
    hit: Hit
    hand_overs: str = ""


def incident(
    now: float,
    nodes: Sequence[NodeView],
    bars: Bars,
    not_ready: str,
    recent: RecentEnds,
    hand_overs: HandOverVerdict,
) -> Incident:
    """The incident of this moment.

    Args:
        now: monotonic seconds.
        not_ready: why this proxy serves nothing; "" where it does.
    """
    faults = [fault for fault in recent.faults if now - fault.at <= WINDOW]
    bad = [end for end in recent.bad if now - end.at <= WINDOW]
    hit = _hit(recent.counts(now - WINDOW), faults, bad, dropped=len(recent.bad) == recent.bad.maxlen)
    out = [view for view in nodes if view.state in _OUT]
    failing = collections.Counter(fault.node for fault in faults)
    sentences = [*_of_proxy(nodes, out, not_ready), *_of_nodes(now, nodes, out, failing)]
    began = [view.since for view in out if view.since > -math.inf]
    began += [_first(recent.faults, now), _first(recent.bad, now)]
    since = min(began, default=math.inf)
    cause = _cause(nodes, out, failing, hand_overs, not_ready, bad)
    sentences += [f"{why}." for why in hand_overs.why if not any(view.reason and view.reason in why for view in out)]
    if cause is Cause.LOAD:
        sentences.append("Requests were turned away, for too many run or wait: nodes are too few, or limits.* too low.")
    elif cause is Cause.PROXY and not sentences:
        sentences.append("Requests failed, and no leg on a node did: the log names each of them.")
    names = list(dict.fromkeys([*(view.name for view in out), *failing, *bars.nodes, *itertools.chain(*bars.pairs)]))
    since_when = None if since == math.inf or cause is Cause.NOTHING else now - since
    return Incident(cause, names, sentences, since_when, hit, hand_overs.line())


def _cause(
    nodes: Sequence[NodeView],
    out: Sequence[NodeView],
    failing: collections.Counter[str],
    hand_overs: HandOverVerdict,
    not_ready: str,
    bad: Sequence[BadEnd],
) -> Cause:
    if _all_gone(nodes, out) or (not_ready and not out):
        return Cause.PROXY
    if hand_overs.fail:
        return Cause.HAND_OVERS
    if out or failing:
        return Cause.NODE
    if hand_overs.why:
        return Cause.HAND_OVERS
    if any(end.outcome is Outcome.FAILED for end in bad):
        return Cause.PROXY
    return Cause.LOAD if bad else Cause.NOTHING


def _all_gone(nodes: Sequence[NodeView], out: Sequence[NodeView]) -> list[Role]:
    """Roles of several nodes, none of which answers. One broken network is likelier than so many that died at once."""
    return [
        role
        for role in Role
        if len(of_role := [view for view in nodes if role in view.node.roles]) > 1
        and all(view in out and view.state is not State.REFUSED for view in of_role)
    ]


def _of_proxy(nodes: Sequence[NodeView], out: Sequence[NodeView], not_ready: str) -> list[str]:
    said = [f"This proxy serves nothing: {not_ready}."] if not_ready else []
    return said + [
        f"No {role} node answers, though there are several: look at this proxy's own network first."
        for role in _all_gone(nodes, out)
    ]


def _of_nodes(
    now: float, nodes: Sequence[NodeView], out: Sequence[NodeView], failing: collections.Counter[str]
) -> list[str]:
    there = {view.name for view in out}
    said = [f"{view.name} has been {view.state}{_ago(now, view.since)}{_because(view.reason)}." for view in out]
    known = {view.name: view.state for view in nodes}
    for name, count in failing.most_common():
        if name not in there:
            state = known.get(name)
            now_it = "has left" if state is None else "serves" if state in _SERVING else f"is {state}"
            said.append(f"On {name} {count} {'leg' if count == 1 else 'legs'} failed; it {now_it} now.")
    return said


def _ago(now: float, since: float) -> str:
    if since == -math.inf:
        return ""
    seconds = now - since
    return f" for {seconds:.0f} s" if seconds < 100 else f" for {seconds / 60:.0f} min"


def _because(reason: str) -> str:
    return f" ({reason})" if reason else ""


def _first(events: Iterable[LegFault | BadEnd], now: float) -> float:
    """When the last row of events began, between which there was never `WINDOW` of quiet; inf where it is over."""
    began, last = math.inf, -math.inf
    for event in events:
        began = event.at if event.at - last > WINDOW else began
        last = event.at
    return began if now - last <= WINDOW else math.inf


def _hit(
    counts: collections.Counter[Outcome], faults: Sequence[LegFault], bad: Sequence[BadEnd], *, dropped: bool
) -> Hit:
    """``counts`` are those of whole minutes: exact enough where of a flood not every end is kept (``dropped``)."""
    outcomes = counts if dropped else collections.Counter(end.outcome for end in bad)
    return Hit(
        requests=max(counts.total(), len(bad)),
        failed=outcomes[Outcome.FAILED],
        rejected=outcomes[Outcome.REJECTED],
        legs=len(faults),
        keys=_most(end.key for end in bad if end.key),
        models=_most(end.model for end in bad if end.model),
        endpoints=_most(end.endpoint for end in bad if end.endpoint),
    )


def _most(names: Iterable[str]) -> Sequence[tuple[str, int]]:
    return collections.Counter(names).most_common(MOST_NAMES)
