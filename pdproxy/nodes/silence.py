"""Finds frozen nodes within two seconds: by the silence of their legs, and a probe that goes unanswered.

    nothing came from a node that has legs for `silence` s ──► probe it
        answered, or refused: it runs, or active health sees to it ──► probe it again after `AGAIN` s of silence
        both of two probes unanswered ──► give it up, as `HealthCheck` does after `failures` of its own; unless
            something came from it meanwhile                    `progressed`
            this process itself did not run in time             `late`
            too many nodes of its kind would be out at once, and no node of the other role could do their work, or it
            is silent too                                       `too_many`

Silence proves nothing: a long prefill is silent, and so is a decode leg that waits for its ticket. What is asked is
whether the node's processes run at all (`ALIVE`), which needs no step of an engine. A node that hangs and answers, such
as one whose GPU does, is left to the legs' deadlines and to `HealthCheck`.

A decode node computes a prompt by itself, so that the last prefill node is given up as any other: its legs would wait
for a dead node otherwise. The last decode node is, too, where `on_no_decode` lets prefill nodes serve whole requests.
Where it does not, nothing can take its legs over: they wait for it to come back, until their own deadlines.

How long an answer may take depends on what is known: `timeout` s where streams ran and stopped all at once, `PATIENT`
times as long where there were none, for then the silence says nothing and the API server may be busy with what has just
come, or where the node's last answers were slow (`SLOWER`).
"""

import asyncio
import dataclasses
import logging
import math

from pdproxy.clock import Clock, first_of
from pdproxy.credential import OwnHeaders, no_headers
from pdproxy.errors import Fault, NodeFault
from pdproxy.nodes.health_check import ALIVE
from pdproxy.nodes.join import OutageLog
from pdproxy.nodes.node import Node, NodeView, PoolState, Role, State
from pdproxy.nodes.pool import Pool
from pdproxy.nodes.preflight import exchange
from pdproxy.observe.labels import SilenceOutcome
from pdproxy.observe.metrics import Metrics
from pdproxy.settings.types import OnNoDecode
from pdproxy.transport.port import HttpRequest, Timeouts, Transport

_LOG = logging.getLogger(__name__)

TICK = 0.1
"""Seconds between two looks at all nodes."""
LATE = 0.25
"""Seconds by which a look may be late. If it is later, this process was stopped or starved, and nodes may have sent
what it has not read: all that was silent is taken to be so from then on."""
AGAIN = 0.5
"""Seconds after an answer until a node that is still silent is probed again."""
PATIENT = {Role.DECODE: 1.5, Role.PREFILL: 3.0}
"""Times that an answer may take longer than `SilenceConfig.timeout` at most, by what is known of the node."""
SLOWER = 4.0
"""An answer may take this many times as long as the slowest of the node's last ones did."""
DECAY = 0.5
"""The part of the slowest answer's time that each further answer leaves."""
_SERVING = frozenset({State.UP, State.PROBING, State.DRAINING, State.TERMINATING})
_UNANSWERED = frozenset({Fault.HEADERS_TIMEOUT, Fault.STALL})


@dataclasses.dataclass(frozen=True, slots=True)
class SilenceConfig:
    """Times in seconds.

    Attributes:
        silence: after which a node is probed.
        timeout: for the answer to a probe of a node whose streams ran until just now.
        share: of the nodes of a role and model, the most that may be out for their silence at once; one always may.
            It limits no role whose work nodes of the other one can do, while any of them is not silent.
        on_no_decode: whether prefill nodes can do decode nodes' work.
    """

    silence: float = 0.4
    timeout: float = 1.4
    share: float = 0.5
    on_no_decode: OnNoDecode = OnNoDecode.FAIL


@dataclasses.dataclass(slots=True)
class _WatchedNode:
    """The state of one watched node.

    Attributes:
        quiet_until: monotonic seconds until which it is not probed, whatever its silence.
        probing: a probe is under way.
        suspect: the probe under way has gone unanswered for half of its time.
        spared: its last probe went unanswered, but too many were out.
        given_up: by this watch, and not back yet.
        slowest: seconds that its slowest answer lately took.
        has_route: False for one that answered `ALIVE` with a 404: /health is asked instead.
    """

    quiet_until: float = 0.0
    probing: bool = False
    suspect: bool = False
    spared: bool = False
    given_up: bool = False
    slowest: float = 0.0
    has_route: bool = True


class SilenceWatch:
    """Probes nodes that are silent, and gives up those that do not answer.

    Args:
        headers: of each probe, such as a credential.
        outages: shared with `HealthCheck`, which takes the nodes back.
    """

    def __init__(
        self,
        pool: Pool,
        transport: Transport,
        clock: Clock,
        outages: OutageLog,
        metrics: Metrics,
        config: SilenceConfig,
        headers: OwnHeaders = no_headers,
    ) -> None:
        self._pool = pool
        self._transport = transport
        self._clock = clock
        self._outages = outages
        self._metrics = metrics
        self._config = config
        self._headers = headers
        longest = 2 * config.timeout * max(PATIENT.values())  # the wait for an answer ends before
        self._timeouts = Timeouts(longest, longest, longest, whole=longest)
        self._punctual_since = math.inf
        self._looked_at = math.inf
        self._watched: dict[str, _WatchedNode] = {}
        self._state: PoolState | None = None
        """The pool's, whose nodes are watched."""
        self._doubted: set[str] = set()
        """Names of nodes that are spared, or given up."""

    async def run(self) -> None:
        """Look at all nodes every `TICK`, until cancelled."""
        self._punctual_since = self._looked_at = self._clock.now()
        async with asyncio.TaskGroup() as group:
            while True:
                await self._clock.sleep(TICK)
                for node in self._look(self._clock.now()):
                    group.create_task(self._examine(node, self._watched[node.name]))

    def _look(self, now: float) -> list[Node]:
        """The nodes to probe now."""
        if self._is_late(now):
            self._punctual_since = now
        self._looked_at = now
        state = self._pool.state()
        if state is not self._state:
            self._state = state
            self._watched = {view.name: self._watched.get(view.name) or _WatchedNode() for view in state.nodes}
        if self._doubted:
            self._doubted = {name for name in self._doubted if self._stays_doubted(name)}
        silent = now - self._config.silence
        if self._punctual_since > silent:
            return []
        return [view.node for view in self._pool.silent(silent) if self._is_due(view, now)]

    def _stays_doubted(self, name: str) -> bool:
        """Whether it is still spared, or given up: a node that has nothing to do, or is back, is neither."""
        watched = self._watched.get(name)
        if watched is None:
            return False
        watched.given_up &= self._pool.is_given_up(name)
        watched.spared &= self._pool.silent_since(name) < math.inf
        return watched.given_up or watched.spared

    def _is_late(self, now: float) -> bool:
        return now - self._looked_at > TICK + LATE

    def _is_due(self, view: NodeView, now: float) -> bool:
        watched = self._watched[view.name]
        idle = view.state not in _SERVING or self._pool.is_given_up(view.name) or not view.active
        return not (idle or watched.probing or now < watched.quiet_until)

    async def _examine(self, node: Node, watched: _WatchedNode) -> None:
        began, watched.probing = self._clock.now(), True
        try:
            answered = await self._probe(node, watched, self._patience(node, watched, began))
            if answered:
                watched.slowest = max(self._clock.now() - began, DECAY * watched.slowest)
            if node.name in self._pool:
                self._conclude(node, watched, self._outcome(node, began, answered=answered))
        finally:
            watched.probing = watched.suspect = False

    def _patience(self, node: Node, watched: _WatchedNode, now: float) -> float:
        """Seconds for an answer."""
        silent = now - self._pool.silent_since(node.name)
        streamed = Role.DECODE in node.roles and silent < self._config.silence + AGAIN
        least, most = self._config.timeout, self._config.timeout * max(PATIENT[role] for role in node.roles)
        return min(max(least, SLOWER * watched.slowest), most) if streamed else most

    async def _probe(self, node: Node, watched: _WatchedNode, seconds: float) -> bool:
        """Whether one of two probes is answered in time. The second goes out when half of it is over, on another
        connection: of the first a packet may have been lost."""
        answered = asyncio.Event()

        async def ask_again() -> None:
            await self._clock.sleep(seconds / 2)
            watched.suspect = True
            await self._ask(node, watched, answered)

        async with asyncio.TaskGroup() as group:
            asking = [group.create_task(self._ask(node, watched, answered)), group.create_task(ask_again())]
            await first_of(answered.wait(), self._clock.sleep(seconds))
            for each in asking:
                each.cancel()
        return answered.is_set()

    async def _ask(self, node: Node, watched: _WatchedNode, answered: asyncio.Event) -> None:
        """Any status is an answer, and so is a refusal: that is no silence, and active health knows what to do."""
        request = HttpRequest("GET", node.url + (ALIVE if watched.has_route else "/health"), self._headers())
        try:
            status, _ = await exchange(self._transport, request, self._timeouts)
        except NodeFault as fault:
            if fault.fault in _UNANSWERED:
                return
        else:
            watched.has_route &= status != 404
        answered.set()

    def _outcome(self, node: Node, began: float, *, answered: bool) -> SilenceOutcome:
        if answered:
            return SilenceOutcome.ANSWERED
        if self._pool.is_given_up(node.name) or self._pool.silent_since(node.name) >= began:
            return SilenceOutcome.PROGRESSED
        if self._is_late(self._clock.now()) or self._punctual_since > began:
            return SilenceOutcome.LATE
        return SilenceOutcome.GIVEN_UP if self._may_give_up(node) else SilenceOutcome.TOO_MANY

    def _may_give_up(self, node: Node) -> bool:
        """Whether others of its role and model remain, and few are out, or others can do its work. Where many fall
        silent at once, the network of this proxy is the likely cause."""
        if self._has_stand_in(node):
            return True
        kin = [view for view in self._pool.state().nodes if _are_kin(view.node, node)]
        out = {view.node.name for view in kin if self._is_out(view.node.name)} | {node.name}
        left = {view.node.name for view in kin if view.takes_requests()} - out
        return bool(left) and len(out) <= max(1, int(self._config.share * len(left | out)))

    def _has_stand_in(self, node: Node) -> bool:
        """Whether a node of the other role could serve whole requests in its place, as far as is known."""
        if Role.DECODE in node.roles and self._config.on_no_decode is OnNoDecode.FAIL:
            return False
        decodes = Role.DECODE in node.roles
        others = (view for view in self._pool.state().nodes if (Role.DECODE in view.node.roles) is not decodes)
        return any(
            view.node.model == node.model and view.takes_requests() and not self._is_out(view.node.name)
            for view in others
        )

    def _is_out(self, name: str) -> bool:
        watched = self._watched.get(name)
        return watched is not None and (watched.suspect or watched.spared or watched.given_up)

    def _conclude(self, node: Node, watched: _WatchedNode, outcome: SilenceOutcome) -> None:
        for role in node.roles:
            self._metrics.nodes.silence_probed(role, outcome)
        pause = AGAIN if outcome in (SilenceOutcome.ANSWERED, SilenceOutcome.TOO_MANY) else 0.0
        watched.quiet_until = self._clock.now() + pause
        if outcome is SilenceOutcome.TOO_MANY and not watched.spared:
            _LOG.warning(
                "node %s is silent and answers no probe, but others are too: health.failures decide", node.name
            )
        watched.spared = outcome is SilenceOutcome.TOO_MANY
        if outcome in (SilenceOutcome.TOO_MANY, SilenceOutcome.GIVEN_UP):
            self._doubted.add(node.name)
        if outcome is SilenceOutcome.GIVEN_UP:
            watched.given_up = True
            evidence = self._evidence(node)
            self._pool.give_up(node.name, f"health: {evidence}")
            self._outages.down(node, NodeFault(Fault.HEADERS_TIMEOUT, evidence))

    def _evidence(self, node: Node) -> str:
        silent = self._clock.now() - max(self._pool.silent_since(node.name), self._punctual_since)
        return f"nothing came for its requests for {silent:.1f} s, and two probes got no answer"


def _are_kin(node: Node, other: Node) -> bool:
    """Whether both do one thing, for one model."""
    return node.model == other.model and node.shares_role(other)
