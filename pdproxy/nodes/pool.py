"""The nodes that this proxy knows: which serve, what runs on each, and how they behave.

No I/O: `health_check` and `join` do that and report here. Everything is synchronous and runs on one event loop.
"""

import asyncio
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry

from pdproxy.clock import Clock
from pdproxy.errors import Fault, NodeFault, PdproxyError
from pdproxy.failures import PROBE_BLAME, Blame
from pdproxy.nodes.circuit_breaker import CircuitBreaker, CircuitBreakerConfig, CircuitState
from pdproxy.nodes.hand_overs import HandOverResults
from pdproxy.nodes.load import Load
from pdproxy.nodes.node import SERVING, Bars, Node, NodeView, Outage, PoolState, Role, Roles, State
from pdproxy.nodes.node_log import NodeLog
from pdproxy.nodes.outlier import FailureEvidence, LegOrigin
from pdproxy.nodes.pool_entry import NO_LOAD, CohortTraffic, LegLoad, PoolEntry, Slot
from pdproxy.observe.labels import Leg
from pdproxy.observe.metrics import Metrics

ALL_NODES = "*"
"""Stands for all nodes of a role in the metric of barred pairs; no node can have this name."""


BY_OPERATOR = "drained by the operator"
"""The usual reason of a drain."""
_OUTAGE = {State.DOWN, State.PROBING}
"""The states of one outage: while trials fail, a node changes from one to the other, and its outage goes on."""


class UnknownNode(PdproxyError):
    """No node of this name is in the pool (any more)."""

    def __init__(self, name: str) -> None:
        super().__init__(f"no node named {name!r}")
        self.name = name


class DuplicateNode(PdproxyError):
    """The name is taken."""

    def __init__(self, name: str) -> None:
        super().__init__(f"a node named {name!r} is already there")


class Pool:
    """All nodes by name, in the order of joining.

    A node's `State` comes of two facts of its `PoolEntry`: its membership, and while that is UP its circuit
    (`circuit_breaker`). While a node is TERMINATING, its circuit tells only whether it is DOWN.

        membership   circuit    state        requests       usual ways on
        JOINING      any        JOINING      none           `bring_up` → UP, `refuse` → REFUSED
        UP           CLOSED     UP           yes            circuit opens → DOWN; `drain`, `terminate`
        UP           OPEN       DOWN         none           cool-down → PROBING; after it was given up: `bring_up` → UP
        UP           HALF_OPEN  PROBING      one on trial   trial goes well → UP, fails → DOWN
        DRAINING     any        DRAINING     none           `remove`; `rejoin` → JOINING
        TERMINATING  CLOSED     TERMINATING  last resort    `remove`; `drain` → DRAINING
        TERMINATING  other      DOWN         none           `remove`
        REFUSED      any        REFUSED      none           `bring_up` → UP, once its settings are mended

    A circuit opens, and a node goes DOWN, in three ways:

        legs fail        `leg_failed`, by `outlier`    legs that run stay; a trial brings the node back
        probes fail      `probed`, by `HealthCheck`    given up: it must join anew; legs leave if they are silent, too
        legs are silent  `give_up`, by `SilenceWatch`  given up: it must join anew; legs leave

    *Given up* (`is_given_up`): active health has taken the node out, and no cool-down brings it back.
    *Leaving* (`leaving`): an event, set when streams that run on the node should move: it was given up, its drain's
    deadline came, or it was removed.
    *Joins anew* (`joins_anew`): a node that serves got a role that it had not; its preflight and tests are made again.

    Methods that look a node up by its name raise `UnknownNode` where it is not there, unless they say otherwise.

    Attributes:
        clock: by which everything here goes.
        bars: which nodes exchange no tickets though they are of one cohort; changed by `bar` alone.
        load: the book of what waits and runs at all places, and how fast they were.
        hand_overs: what became of tickets; `proof` bars pairs by it.
        traffic: requests that were sent to the decode nodes of each cohort.
        changed: set when a node was added or fell back to JOINING; `HealthCheck` clears it.
    """

    def __init__(
        self, clock: Clock, config: CircuitBreakerConfig | None = None, metrics: Metrics | None = None
    ) -> None:
        self.clock = clock
        self._config = config or CircuitBreakerConfig()
        self._metrics = metrics or Metrics(CollectorRegistry())
        self._entries: dict[str, PoolEntry] = {}
        self._latest: PoolState | None = None
        self._next_change = math.inf
        """Until then, in monotonic seconds, the passing of time changes nothing."""
        self._log = NodeLog(clock)
        self._room_watchers: list[Callable[[], None]] = []
        self.bars = Bars()
        self.load = Load()
        self.hand_overs = HandOverResults()
        self.traffic = CohortTraffic(clock)
        self.changed = asyncio.Event()

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    # -- planning and legs

    def state(self) -> PoolState:
        """All nodes as they stand now."""
        self._let_time_pass()
        if self._latest is None:
            self._latest = PoolState(tuple(entry.view for entry in self._entries.values()), self.bars, self.load)
        return self._latest

    def view(self, name: str) -> NodeView:
        """One node as it stands now."""
        entry = self._entry(name)
        self._let_time_pass()
        return entry.view

    def node(self, name: str) -> Node | None:
        """One node, in whatever state; None where it has left."""
        entry = self._entries.get(name)
        return None if entry is None else entry.view.node

    def acquire(self, name: str, load: LegLoad = NO_LOAD) -> Slot:
        """Count a leg on the node, and what it adds there, until its slot is released."""
        entry = self._entry(name)
        slot = Slot(entry, self.clock, self.load, load, self._release)
        if slot.takes_room and load.leg is Leg.DECODE:
            cohort = entry.view.node.cohort
            self.traffic.record(cohort)
            self._metrics.nodes.cohort_requested(cohort)
        if slot.trial:
            entry.view.trials += 1
            self._latest = None  # a trial decides whether a node that is on trial takes requests
        if entry.view.active == 1:
            entry.idle.clear()
            entry.busy_since = self.clock.now()
        return slot

    def leg_began(self, name: str, leg: Leg) -> None:
        """The first event of a leg's stream is here; ignored for a node that has left."""
        entry = self._entries.get(name)
        if entry is not None:
            entry.progressed_at = self.clock.now()
            if (record := entry.records[leg]).row:
                record.began()
            circuit = entry.circuit
            if circuit.openings or circuit.state is not CircuitState.CLOSED:
                self._succeeded(entry)

    def leg_ended(self, name: str, leg: Leg, client: str) -> None:
        """The stream of a leg of this client's ended well; ignored for a node that has left."""
        entry = self._entries.get(name)
        if entry is not None:
            entry.records[leg].ended_well(client, self.clock.now())

    def leg_served(self, name: str, leg: Leg, client: str) -> None:
        """A leg whose answer comes in one piece has ended well: `leg_began` and `leg_ended` together."""
        entry = self._entries.get(name)
        if entry is not None:
            now = entry.progressed_at = self.clock.now()
            entry.records[leg].ended_well(client, now)
            circuit = entry.circuit
            if circuit.openings or circuit.state is not CircuitState.CLOSED:
                self._succeeded(entry)

    def _succeeded(self, entry: PoolEntry) -> None:
        """A leg goes well on a node whose circuit has been open."""
        now = self.clock.now()
        before = self._refresh(entry, now).circuit
        if (circuit := before.succeeded(now)) is not before:
            self._set(entry, circuit)

    def leg_failed(
        self,
        name: str,
        leg: Leg,
        fault: Fault,
        origin: LegOrigin,
        evidence: FailureEvidence,
        *,
        streaming: bool = False,
    ) -> None:
        """A leg failed with a fault that `failures.blame` counts, or may count. `outlier` says what follows.

        Of no effect on a circuit that is open: the leg began before. One failure of a trial opens it again, unless the
        request may have caused it. Ignored for a node that has left.

        Args:
            streaming: after its first event.
        """
        entry = self._entries.get(name)
        if entry is None:
            return
        record = entry.records[leg]
        record.failed(origin, evidence, streaming=streaming)
        if evidence is not FailureEvidence.UNSERVED:
            entry.view.reason = f"last fault: {fault}"
        now, peers = self.clock.now(), [peer.records[leg] for peer in self._peers(entry)]
        circuit = self._refresh(entry, now).circuit
        tried = circuit.state is CircuitState.HALF_OPEN and evidence is not FailureEvidence.UNSERVED
        if circuit.state is not CircuitState.OPEN and (tried or record.is_outlier(peers, self._config.failures, now)):
            self._take_out(entry, origin.request, f"last fault: {fault}; legs failed in a row: {len(record.row)}")

    def _take_out(self, entry: PoolEntry, request: str, reason: str) -> None:
        """Open a circuit because a leg of this request failed. The rule stands here, whatever the fault: no request
        takes out more than one node of a role."""
        kin = (each for each in self._entries.values() if each is not entry and each.node.shares_role(entry.node))
        if any(other.out_by == request and other.circuit.state is not CircuitState.CLOSED for other in kin):
            return
        entry.view.reason, entry.out_by = reason, request
        self._set(entry, entry.circuit.opened(self.clock.now()))

    def _peers(self, entry: PoolEntry) -> list[PoolEntry]:
        """Nodes that serve the same model in the same role now."""
        node = entry.node
        return [
            other
            for other in self._entries.values()
            if other is not entry
            and other.node.shares_role(node)
            and other.node.model == node.model
            and other.state() in SERVING
        ]

    def watch_room(self, changed: Callable[[], None]) -> None:
        """Call ``changed`` whenever a decode leg has ended, or other nodes than before take requests. It must be cheap,
        and must not use the pool: more may be changing."""
        self._room_watchers.append(changed)

    def leaving(self, name: str) -> asyncio.Event:
        """Set when streams on the node should move: its drain's deadline came, or it was removed or given up."""
        return self._entry(name).leaving

    # -- membership

    def add(self, node: Node) -> None:
        """Take a node in as JOINING; `HealthCheck` then has it join. Raises `DuplicateNode` if the name is taken."""
        if node.name in self._entries:
            raise DuplicateNode(node.name)
        view = NodeView(node, since=self.clock.now())
        self._entries[node.name] = entry = PoolEntry(view, CircuitBreaker(self._config), node)
        self._latest = None
        self._watch(view, node.roles)
        self._log.joined(node)
        self._count_models(node)
        self._count_state(entry)
        self.changed.set()

    def _watch(self, view: NodeView, roles: Roles) -> None:
        for role in roles:
            self._metrics.nodes.watch_node(view.name, role, functools.partial(view.legs, role))

    def configured(self, name: str) -> Node:
        """The node as it was given to `add` or `amend`, without what a preflight found."""
        return self._entry(name).configured

    def bring_up(self, node: Node) -> None:
        """Let the node of this name serve, with what the preflight found out about it; it starts slowly."""
        entry = self._entry(node.name)
        if not entry.is_going():
            before, entry.joins_anew = entry.node, False
            entry.records.clear()
            entry.view.become(node, entry.view.share)
            if before.roles != node.roles:
                self._roles_changed(entry, before)
            self._count_models(node)
            self._count_cohort(before)
            entry.misses, entry.view.reason, entry.view.joined_at = 0, "", self.clock.now()
            entry.stay()
            self._set(entry, CircuitBreaker(self._config, changed_at=entry.view.joined_at), State.UP)
            for each in (before, node):  # its model may be another one
                self._count_serving(each)
            self._room_changed()  # also where it was UP: its capacity may be another one

    def serve_models(self, node: Node) -> None:
        """The node of this name serves other models than before; all else of it is as it was."""
        entry = self._entry(node.name)
        entry.view.become(node, entry.view.share)
        self._latest = None
        self._count_models(node)

    def refuse(self, name: str, reason: str) -> None:
        """The node's preflight found a setting that cannot work: no requests. Streams that run on it go on."""
        entry = self._entry(name)
        if not entry.is_going():
            again = entry.state() is State.REFUSED and entry.view.reason != reason
            entry.view.reason = reason
            self._set(entry, entry.circuit, State.REFUSED)
            if again:
                self._announce(entry, State.REFUSED)

    def set_join_reason(self, name: str, reason: str) -> None:
        """Why the node does not join yet, for operators; ignored for one that is not JOINING."""
        entry = self._entries.get(name)
        if entry is not None and entry.membership is State.JOINING:
            entry.view.reason = reason

    def rejoin(self, name: str) -> None:
        """Set the node back to JOINING: a drain was taken back, or its preflight must be made again."""
        entry = self._entry(name)
        entry.view.reason = ""
        entry.stay()
        self._set(entry, entry.circuit, State.JOINING)
        self.changed.set()

    def amend(self, node: Node) -> None:
        """Other settings for the node of this name; it joins again with them, and running requests go on.

        Where its roles alone are others, see `change_roles`.
        """
        entry = self._entry(node.name)
        if entry.membership is State.UP and dataclasses.replace(entry.configured, roles=node.roles) == node:
            self.change_roles(node.name, node.roles)
            return
        entry.configured = node
        self._take_roles(entry, node.roles)
        self.rejoin(node.name)

    def change_roles(self, name: str, roles: Roles) -> None:
        """The node is asked for other things than before. Legs of a role that it has not any more go on to their ends.

        A node that serves goes on to serve in the roles that it keeps. For a new role, its preflight and its tests are
        made first; where it keeps none, it serves as before until then.
        """
        entry = self._entry(name)
        entry.configured = dataclasses.replace(entry.configured, roles=roles)
        kept = tuple(role for role in entry.node.roles if role in roles)
        if entry.membership is not State.UP:
            kept = roles
        if kept:
            self._take_roles(entry, kept)
        entry.joins_anew = kept != roles
        self.changed.set()

    def _take_roles(self, entry: PoolEntry, roles: Roles) -> None:
        before = entry.node
        if before.roles != roles:
            entry.view.become(dataclasses.replace(before, roles=roles), entry.view.share)
            self._roles_changed(entry, before)

    def _roles_changed(self, entry: PoolEntry, before: Node) -> None:
        node, self._latest = entry.node, None
        gone = tuple(role for role in before.roles if role not in node.roles)
        new = tuple(role for role in node.roles if role not in before.roles)
        self._metrics.nodes.roles_forgotten(node.name, gone, State)
        self._watch(entry.view, node.roles)
        if node.name in self.bars.nodes:
            for pair in _with_all(node.name, gone):
                self._metrics.nodes.pair_allowed(*pair)
            for pair in _with_all(node.name, new):
                self._metrics.nodes.pair_barred(*pair)
        self._log.roles(node)
        self._count_models(node)
        self._count_state(entry)
        self._count_serving(before)
        self._room_changed()

    def joins_anew(self, name: str) -> bool:
        """Whether a node that serves is to be looked at as if it joined: it got a role that it had not."""
        return self._entry(name).joins_anew

    def drain(self, name: str, reason: str = BY_OPERATOR) -> None:
        """No new requests from now on. `Drainer` watches over the deadline."""
        entry = self._entry(name)
        entry.view.reason = reason
        self._set(entry, entry.circuit, State.DRAINING)

    def terminate(self, name: str) -> None:
        """The node's endpoint goes away and still serves: it is the last resort. `Drainer` has the deadline.

        A node that has not served, or that the operator drains, gets no requests at all.
        """
        entry = self._entry(name)
        serves = entry.membership in (State.UP, State.TERMINATING)
        if entry.membership is not State.DRAINING:
            entry.view.reason = "its endpoint terminates"
        self._set(entry, entry.circuit, State.TERMINATING if serves else State.DRAINING)

    def is_going(self, name: str) -> bool:
        """Whether a node goes away, or has left."""
        entry = self._entries.get(name)
        return entry is None or entry.is_going()

    def idle(self, name: str) -> asyncio.Event:
        """Set while no leg is on the node."""
        return self._entry(name).idle

    def remove(self, name: str) -> None:
        """Forget the node; streams that still run on it should move elsewhere. Idempotent."""
        self._bar(_without(self.bars, name))
        entry = self._entries.pop(name, None)
        if entry is not None:
            self._log.left(entry.node)
            self._latest, entry.left = None, True
            for place in entry.view.places:
                self.load.drop_place(place)
            entry.leaving.set()
            self._room_changed()
            self._metrics.nodes.node_forgotten(name, entry.node.roles, State, CircuitState)
            self._count_cohort(entry.node)
            self._count_serving(entry.node)

    def bar(self, bars: Bars) -> None:
        """From now on these pairs and nodes, and no others, exchange no tickets; earlier plans stay as they are."""
        self._log.barred(self.bars, bars)
        self._bar(bars)

    def _bar(self, bars: Bars) -> None:
        before, after = set(self._pairs(self.bars)), set(self._pairs(bars))
        self.bars, self._latest = bars.following(self.bars, self.clock.now()), None
        for pair in before - after:
            self._metrics.nodes.pair_allowed(*pair)
        for pair in after - before:
            self._metrics.nodes.pair_barred(*pair)

    # -- active health

    def probed(self, name: str, fault: Fault | None, began: float, why: str = "") -> None:
        """A health probe that ``began`` at that monotonic second ended, None for well. What counts: `PROBE_BLAME`.

        ``why``: the fault as a sentence, for operators.

        ``failures`` misses in a row open the circuit; legs are made to leave once they are silent too. Ignored for a
        node that has left.
        """
        entry = self._entries.get(name)
        if entry is None:
            return
        progressed = entry.progressed_at >= began
        if fault is None or (progressed and PROBE_BLAME[fault] is Blame.IF_SILENT):
            entry.misses, entry.well_at = 0, began
            self._show_circuit(entry, self.clock.now())
            return
        entry.misses += 1
        if entry.is_given_up():
            self._open(entry, f"health: {why or fault}")
            if not progressed:
                entry.send_legs_away()

    def note_silence(self, name: str, fault: NodeFault | None) -> None:
        """Record whether anything came back to a probe that ended so, None for well. That tells a dead process from a
        broken network. Ignored for a node that has left."""
        entry = self._entries.get(name)
        if entry is not None:
            entry.view.silent = fault is not None and fault.silent

    def give_up(self, name: str, reason: str) -> None:
        """As if ``failures`` probes in a row had failed: no requests until it has joined anew, and its legs leave."""
        entry = self._entry(name)
        entry.view.silent = True
        entry.misses = max(entry.misses, self._config.failures)
        self._open(entry, reason)
        entry.send_legs_away()

    def _open(self, entry: PoolEntry, reason: str) -> None:
        if entry.circuit.state is not CircuitState.OPEN:
            entry.view.reason, entry.out_by = reason, ""
            self._set(entry, entry.circuit.opened(self.clock.now()))

    def is_given_up(self, name: str) -> bool:
        """Whether active health has given the node up (it must join anew before it serves); False where it has left."""
        entry = self._entries.get(name)
        return entry is not None and entry.is_given_up()

    def unserved_since(self, role: Role) -> float:
        """When the last node of a role that served went, in monotonic seconds; -inf where none did."""
        return self._log.unserved_since(role)

    def joined_since(self, name: str, since: float) -> bool:
        """Whether a node has joined after that monotonic second: it may be another process than before."""
        entry = self._entries.get(name)
        return entry is not None and entry.view.joined_at > since

    def serves_on(self, name: str, since: float) -> bool:
        """Whether a health probe that began after that monotonic second found a node well, which so has not gone out:
        it will not join anew."""
        entry = self._entries.get(name)
        return entry is not None and entry.membership is State.UP and entry.well_at > since

    def silent_since(self, name: str) -> float:
        """Monotonic seconds when something last came from it; inf while no leg runs on it, and where it has left."""
        entry = self._entries.get(name)
        return math.inf if entry is None else entry.silent_since()

    def silent(self, since: float) -> list[NodeView]:
        """The nodes that have had legs since then at least, and from which nothing has come for any since. Cheap: all
        nodes are looked at many times a second."""
        entries = self._entries.values()
        return [each.view for each in entries if each.progressed_at <= since and each.busy_since <= since]

    def _release(self, entry: PoolEntry, slot: Slot) -> None:
        view = entry.view
        if slot.trial and view.trials:
            view.trials -= 1
            self._latest = None
        if view.active == 0:
            entry.idle.set()
            entry.busy_since = math.inf
        if slot.takes_room:
            self._room_changed()

    def _room_changed(self) -> None:
        for changed in self._room_watchers:
            changed()

    def _entry(self, name: str) -> PoolEntry:
        entry = self._entries.get(name)
        if entry is None:
            raise UnknownNode(name)
        return entry

    def _let_time_pass(self) -> None:
        """Circuits that are open become half open, and nodes that came back get more of their shares."""
        now = self.clock.now()
        if now < self._next_change:
            return
        for entry in self._entries.values():
            if now >= entry.constant_until:
                self._refresh(entry, now)
                self._show_circuit(entry, now)
        self._next_change = min((entry.constant_until for entry in self._entries.values()), default=math.inf)

    def _refresh(self, entry: PoolEntry, now: float) -> PoolEntry:
        """Apply the passing of time; a node that active health gave up stays down after its cool-down."""
        if entry.circuit.state is CircuitState.OPEN and not entry.is_given_up():
            circuit = entry.circuit.at(now)
            if circuit is not entry.circuit:
                self._set(entry, circuit)
        return entry

    def _show_circuit(self, entry: PoolEntry, now: float) -> None:
        view, share = entry.view, entry.circuit.share(now)
        if share != view.share:
            view.become(view.node, share)
        entry.constant_until = math.inf if entry.is_given_up() else entry.circuit.constant_until(now)
        self._next_change = min(self._next_change, entry.constant_until)

    def _set(self, entry: PoolEntry, circuit: CircuitBreaker, membership: State | None = None) -> None:
        before, view, now = entry.circuit.state, entry.view, self.clock.now()
        entry.circuit, entry.membership = circuit, membership or entry.membership
        self._latest = None
        if circuit.state is not before:
            view.trials = 0
            self._metrics.nodes.circuit_moved(entry.node.name, circuit.state)
        self._show_circuit(entry, now)
        state, view.state = view.state, entry.state()
        if view.state is not state:
            self._announce(entry, state)
            if {state, view.state} != _OUTAGE:
                if state in _OUTAGE:
                    view.outage = Outage(view.since, now, entry.out_for)
                entry.out_for = view.reason
                view.since = now
            self._count_state(entry)
            self._room_changed()

    def _announce(self, entry: PoolEntry, before: State) -> None:
        self._log.moved(entry.node, before, entry.view.state, entry.view.reason, self.clock.now() - entry.view.since)

    def _count_state(self, entry: PoolEntry) -> None:
        node = entry.node
        for role in node.roles:
            self._metrics.nodes.node_state(node.name, role, entry.state())
        self._count_cohort(node)
        self._count_serving(node)
        if Role.PREFILL in node.roles and node.model:
            self._metrics.nodes.watch_prefill(node.model, functools.partial(self._to_prefill, node.model))

    def _to_prefill(self, model: str) -> int:
        """Tokens that the prefill nodes of a model still have to compute."""
        nodes = (each.view for each in self._entries.values() if Role.PREFILL in each.node.roles)
        return sum(place.queued for view in nodes if view.node.model == model for place in view.places)

    def _count_models(self, node: Node) -> None:
        """Clients may ask decode nodes for these; what a prefill node alone serves they cannot have."""
        if Role.DECODE in node.roles:
            for name in (node.model, *node.aliases):
                self._metrics.model_served(name)

    def _count_serving(self, of: Node) -> None:
        """The nodes of its model that serve, for each of its roles."""
        serving = [
            each.node for each in self._entries.values() if each.state() in SERVING and each.node.model == of.model
        ]
        for role in of.roles:
            self._log.serving(role, of.model, sum(role in node.roles for node in serving))

    def _count_cohort(self, of: Node) -> None:
        """Its nodes by role that serve; of a cohort without nodes nothing is kept."""
        here = [entry for entry in self._entries.values() if entry.node.cohort == of.cohort]
        if not here:
            self.traffic.drop_cohort(of.cohort)
            self._metrics.nodes.cohort_forgotten(of.cohort, Role)
            return
        for role in Role:
            serving = sum(role in entry.node.roles and entry.state() in SERVING for entry in here)
            self._metrics.nodes.cohort_nodes(of.cohort, role, serving)

    def _pairs(self, bars: Bars) -> Iterator[tuple[str, str]]:
        """The barred pairs, by prefill and decode node; a node that is barred from all has ALL_NODES beside it."""
        yield from bars.pairs
        for name in bars.nodes:
            entry = self._entries.get(name)
            if entry is not None:
                yield from _with_all(name, entry.node.roles)


def _with_all(name: str, roles: Roles) -> Iterator[tuple[str, str]]:
    for role in roles:
        yield (name, ALL_NODES) if role is Role.PREFILL else (ALL_NODES, name)


def _without(bars: Bars, name: str) -> Bars:
    pairs = {pair: why for pair, why in bars.pairs.items() if name not in pair}
    nodes = {barred: why for barred, why in bars.nodes.items() if barred != name}
    return Bars(pairs, nodes)
