"""The questions of an incident: is it this proxy or a node, since when, who is hit, what do clients lose, what next.

Pure. It goes by what this proxy alone has seen: `seen.Seen`. What goes on now and what is over are told apart.
"""

import collections
import dataclasses
import enum
import itertools
import math
import urllib.parse
from collections.abc import Iterable, Iterator, Sequence

from pdproxy.admin.losses import loss
from pdproxy.admin.seen import JUST_NOW, WINDOW, Seen, duration, of_role
from pdproxy.failures import Step
from pdproxy.nodes.node import SERVING, NodeView, Outage, Role, State
from pdproxy.observe.labels import Outcome, Rejection
from pdproxy.orchestration.in_flight import BadEnd, LegFailure
from pdproxy.orchestration.request_queue import QueueLimits, QueueStatus

MOST_NAMES = 3
_GOING = (State.DRAINING, State.TERMINATING)
_OUT_WORDS = {State.PROBING: "out", State.JOINING: "trying to join"}
"""Words for states whose own names say too little to an operator."""
_LIMITS = {
    Rejection.KEY_LIMIT: "an API key has as many open as it may (its concurrency, or limits.key_concurrency)",
    Rejection.REQUEST_RATE: "an API key has had its requests of a minute (its requests_per_minute)",
    Rejection.INPUT_RATE: "an API key has had its input tokens of a minute (its input_tokens_per_minute)",
    Rejection.OUTPUT_RATE: "an API key has had its output tokens of a minute (its output_tokens_per_minute)",
    Rejection.QUEUE_FULL: "all nodes are full, and so is the queue, which all keys share (limits.queue)",
    Rejection.QUEUE_TIMEOUT: "all nodes are full, and none had room in time (limits.queue_seconds)",
    Rejection.BODIES_FULL: "requests hold as many bytes as they may, of all keys together (limits.held_bytes)",
}
"""Why requests are turned away, with the setting to look at."""


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
class Impact:
    """Whom it hits, in the last `WINDOW`.

    Attributes:
        requests: that ended, however.
        failed, rejected: of them, without an answer; turned away.
        legs: on nodes that failed. Most requests survive that.
        steps: what was done about these legs, and how often.
        keys, models, endpoints: of requests that failed or were turned away, the names with the most, and how many.
    """

    requests: int = 0
    failed: int = 0
    rejected: int = 0
    legs: int = 0
    steps: Sequence[tuple[Step, int]] = ()
    keys: Sequence[tuple[str, int]] = ()
    models: Sequence[tuple[str, int]] = ()
    endpoints: Sequence[tuple[str, int]] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """One sentence; ``began``: so many seconds ago, None where nobody knows."""

    what: str
    began: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Incident:
    """The answers.

    Attributes:
        nodes: names of those that are out, or on which legs fail, or that exchange no tickets: now.
        loss: what clients lose now; "" for nothing.
        now, earlier: what is wrong now, and what was in the last `WINDOW` and is over.
        since: seconds ago, where nothing is wrong of a node that goes away; None where there is none, or nobody knows.
        hand_overs: one line about them, whether something is wrong or not.
        change: what to change so that prompts are handed over; "" where nothing is wrong with that, or nobody knows.
    """

    cause: Cause
    nodes: Sequence[str]
    loss: str
    now: Sequence[Finding]
    earlier: Sequence[Finding]
    since: float | None
    hit: Impact
    hand_overs: str = ""
    change: str = ""


def incident(seen: Seen) -> Incident:
    """The incident of this moment: what is wrong now, and what was."""
    cause, out, failing = _cause(seen), seen.out(), seen.failing()
    now = [*_of_proxy(seen), *_of_nodes(seen), *_of_hand_overs(seen), *_of_ends(seen, cause), *_of_going(seen)]
    names = [*(view.name for view in out), *(fault.node for fault in failing)]
    names += [view.name for view in _kept_out(seen) if seen.not_ready]
    names += [*seen.bars.nodes, *itertools.chain(*seen.bars.pairs)]
    since = _gone_since(seen) if cause is Cause.NOTHING else _since(seen, cause)
    nodes = [] if cause is Cause.NOTHING else list(dict.fromkeys(names))
    told, change = seen.hand_overs.line(), next(iter(seen.hand_overs.changes.values()), "")
    return Incident(cause, nodes, loss(seen), now, list(_earlier(seen)), since, _hit(seen), told, change)


def _cause(seen: Seen) -> Cause:
    out, bad = seen.out(), seen.bad_now()
    if silent_roles(seen) or (seen.not_ready and not out and not _kept_out(seen)):
        return Cause.PROXY
    if seen.hand_overs.fail:
        return Cause.HAND_OVERS
    if out or seen.failing() or seen.not_ready:
        return Cause.NODE
    if seen.hand_overs.why:
        return Cause.HAND_OVERS
    if any(end.outcome is Outcome.FAILED for end in bad):
        return Cause.PROXY
    return Cause.LOAD if bad else Cause.NOTHING


def _kept_out(seen: Seen) -> list[NodeView]:
    """Nodes that go away or join: where none serves, they are why."""
    return [view for view in seen.nodes if view.state in (*_GOING, State.JOINING)]


def silent_roles(seen: Seen) -> list[Role]:
    """Roles of which no node gives any sign, on several hosts: one broken network is likelier than so many hosts that
    died at once. A connection that is refused is a sign: the network works, and the node's process has ended."""
    silent = [role for role in Role if _all_silent(of_role(seen.nodes, role))]
    hosts = {urllib.parse.urlsplit(view.node.url).hostname for role in silent for view in of_role(seen.nodes, role)}
    everywhere = all(view.silent for view in seen.nodes)
    several = [role for role in silent if len(of_role(seen.nodes, role)) > 1]
    return (silent if everywhere else several) if len(hosts) > 1 else []


def _all_silent(nodes: Sequence[NodeView]) -> bool:
    return bool(nodes) and all(view.silent for view in nodes)


def _of_proxy(seen: Seen) -> Iterator[Finding]:
    if seen.not_ready:
        yield Finding(f"This proxy serves nothing: {seen.not_ready}.")
    if seen.not_ready and seen.stream_moves and _none_decodes(seen):
        wait = f"up to {duration(seen.limits.queue_seconds)} (limits.queue_seconds)"
        yield Finding(f"Streams that ran wait for a decode node, {wait}, and go on there.")
    if roles := silent_roles(seen):
        yield Finding(
            f"Nothing comes back from any {' or '.join(roles)} node, on several hosts: look at this proxy's own network"
            " first."
        )


def _none_decodes(seen: Seen) -> bool:
    decodes = of_role(seen.nodes, Role.DECODE)
    return bool(decodes) and not any(view.state in SERVING for view in decodes)


def _of_out(seen: Seen, view: NodeView) -> Finding:
    ago = None if view.since == -math.inf else seen.now - view.since
    lasting = "" if ago is None else f" for {duration(ago)}"
    sign = " Nothing comes back from it." if view.silent else ""
    if view.state is State.JOINING and view.joined_at == -math.inf:
        sign += " It has not served here yet."
    what = f"{view.name} has been {_OUT_WORDS.get(view.state, view.state)}{lasting}{_because(view)}.{sign}"
    return Finding(what, ago)


def _of_nodes(seen: Seen) -> Iterator[Finding]:
    for view in seen.out():
        yield _of_out(seen, view)
    states = {view.name: view.state for view in seen.nodes}
    faults = seen.failing()
    for name, count in collections.Counter(fault.node for fault in faults).most_common():
        kinds = ", ".join(dict.fromkeys(fault.fault.replace("_", " ") for fault in faults if fault.node == name))
        state = states.get(name)
        then = "has left" if state is None else "still gets requests" if state is State.UP else f"is {state}"
        ago = seen.now - _first([fault for fault in seen.recent.faults if fault.node == name], seen.now)
        yield Finding(f"On {name} {_legs(count)} failed in the last {JUST_NOW:.0f} s ({kinds}); it {then}.", ago)


def _of_hand_overs(seen: Seen) -> Iterator[Finding]:
    reasons = [view.reason for view in seen.out() if view.reason]
    for why in seen.hand_overs.why:
        if not any(reason in why for reason in reasons):
            began = seen.hand_overs.began.get(why)
            yield Finding(f"{why}.", None if began is None else seen.now - began)


def _of_ends(seen: Seen, cause: Cause) -> Iterator[Finding]:
    began = seen.now - _first(seen.recent.bad, seen.now)
    for limit, count in seen.turned_away_now().most_common():
        first = _first([end for end in seen.recent.bad if end.limit is limit], seen.now)
        text = f"Requests were turned away: {_LIMITS[limit]}. {count:,} in the last {JUST_NOW:.0f} s."
        yield Finding(text, seen.now - first)
    if seen.is_full_now():
        yield Finding(_room(seen.queue, seen.limits))
    if cause is Cause.PROXY and not seen.not_ready and not silent_roles(seen):
        yield Finding("Requests failed, and no leg on a node did: the log names each of them.", began)


def _room(queue: QueueStatus, limits: QueueLimits) -> str:
    """How much of the room for prompts is taken, and who waits."""
    most = sorted(queue.by_key.items(), key=lambda each: -each[1])[:MOST_NAMES]
    keys = ", ".join(f"{key or 'no key'}: {count:,}" for key, count in most)
    taken = f"{queue.running:,} run (limits.concurrency is {limits.concurrency:,})"
    waiting = f"{queue.waiting:,} wait (limits.queue is {limits.queue:,})"
    return f"Of prompts, {taken}, and {waiting}" + (f"; these wait by key: {keys}." if keys else ".")


def _of_going(seen: Seen) -> Iterator[Finding]:
    for view in seen.going():
        ago = seen.now - view.since
        runs = f"{_legs(view.active)} still {'runs' if view.active == 1 else 'run'} on it"
        left = runs if view.active else "No leg runs on it any more"
        yield Finding(f"{view.name} has been {view.state} for {duration(ago)}{_because(view)}. {left}.", ago)


def _gone_since(seen: Seen) -> float | None:
    return max((seen.now - view.since for view in seen.going()), default=None)


def _earlier(seen: Seen) -> Iterator[Finding]:
    """Nodes that are back, or failed and serve now, and requests that failed before."""
    wrong = _wrong(seen)
    failed = collections.Counter(fault.node for fault in seen.faults() if fault.node not in wrong)
    for view in seen.nodes:
        if view.outage and seen.now - view.outage.ended <= WINDOW and view.name not in wrong:
            yield _came_back(seen, view, view.outage, failed.pop(view.name, 0))
    here = {view.name for view in seen.nodes}
    for name, count in failed.most_common():
        began = next(seen.now - fault.at for fault in seen.faults() if fault.node == name)
        yield Finding(f"On {name} {_legs(count)} failed; it {'serves now' if name in here else 'has left'}.", began)
    yield from _ended_before(seen)


def _came_back(seen: Seen, view: NodeView, outage: Outage, legs: int) -> Finding:
    lasted, back = duration(outage.ended - outage.began), duration(seen.now - outage.ended)
    told = f", and {_legs(legs)} failed" if legs else ""
    why = f" ({outage.reason})" if outage.reason else ""
    return Finding(f"{view.name} was out for {lasted}{why}{told}; it came back {back} ago.", seen.now - outage.began)


def _ended_before(seen: Seen) -> Iterator[Finding]:
    """One finding for each kind of bad end, unless it goes on."""
    going_on = {end.outcome for end in seen.bad_now()}
    for outcome, how in ((Outcome.FAILED, "failed"), (Outcome.REJECTED, "turned away")):
        ends = [end for end in seen.bad() if end.outcome is outcome]
        if ends and outcome not in going_on:
            last = duration(seen.now - ends[-1].at)
            yield Finding(f"Requests {how}: {len(ends)}, the last one {last} ago.", seen.now - ends[0].at)


def _wrong(seen: Seen) -> set[str]:
    """Names of nodes with which something is wrong now."""
    return {*(view.name for view in seen.out()), *(fault.node for fault in seen.failing())}


def _since(seen: Seen, cause: Cause) -> float | None:
    """Seconds ago when the first thing began that is wrong now and of this cause; None where nobody knows.

    Where nothing is served, the last node's end counts: that is when clients began to get errors.
    """
    if seen.not_ready and seen.unserved_since > -math.inf:
        return seen.now - seen.unserved_since
    began = list(seen.hand_overs.began.values()) if cause is Cause.HAND_OVERS else _of_ends_and_nodes(seen)
    since = min(began, default=math.inf)
    return None if since == math.inf else seen.now - since


def _of_ends_and_nodes(seen: Seen) -> list[float]:
    """When nodes went away that are out, or without which nothing serves, and when legs and requests began to fail."""
    wrong = _wrong(seen)
    away = [*seen.out(), *(_kept_out(seen) if seen.not_ready else ())]
    back = {view.name: view.outage.ended for view in seen.nodes if view.outage is not None}
    began = [view.since for view in away if view.since > -math.inf]
    faults = [each for each in seen.recent.faults if each.node in wrong and each.at > back.get(each.node, -math.inf)]
    began.append(_first(faults, seen.now))
    if seen.bad_now():
        began.append(_first(seen.recent.bad, seen.now))
    return began


def _legs(count: int) -> str:
    return f"{count} {'leg' if count == 1 else 'legs'}"


def _because(view: NodeView) -> str:
    return f" ({view.reason})" if view.reason else ""


def _first(events: Iterable[LegFailure | BadEnd], now: float) -> float:
    """When the last row of events began, between which there was never `WINDOW` of quiet; inf where it is over."""
    began, last = math.inf, -math.inf
    for event in events:
        began = event.at if event.at - last > WINDOW else began
        last = event.at
    return began if now - last <= WINDOW else math.inf


def _hit(seen: Seen) -> Impact:
    bad = seen.bad()
    return Impact(
        requests=seen.requests(),
        failed=seen.ended_badly(Outcome.FAILED),
        rejected=seen.ended_badly(Outcome.REJECTED),
        legs=len(seen.faults()),
        steps=collections.Counter(fault.step for fault in seen.faults()).most_common(),
        keys=_most(end.key for end in bad if end.key),
        models=_most(end.model for end in bad if end.model),
        endpoints=_most(end.endpoint for end in bad if end.endpoint),
    )


def _most(names: Iterable[str]) -> Sequence[tuple[str, int]]:
    return collections.Counter(names).most_common(MOST_NAMES)
