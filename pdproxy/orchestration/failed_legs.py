"""The legs that failed under one prompt: what they say about their nodes, and which retries are left."""

from collections.abc import Callable
from typing import NamedTuple

from pdproxy.errors import Fault, NodeFault, PdproxyError, untraced
from pdproxy.failures import NO_RETRY_USED, Blame, Moment, RetryOptions, Step, blame, decide, final_step
from pdproxy.nodes.outlier import FailureEvidence, LegOrigin
from pdproxy.nodes.pool import Pool
from pdproxy.observe.labels import Leg
from pdproxy.observe.metrics import Metrics
from pdproxy.orchestration.client_errors import final_error, no_node_error
from pdproxy.orchestration.context import OrchestrationConfig
from pdproxy.planning.plan_types import NoNode

_NO_NAMES = frozenset[str]()


class _InDoubt(NamedTuple):
    """A leg whose request may have caused its fault."""

    leg: Leg
    node: str
    fault: Fault
    moment: Moment


class FailedLegs:
    """Records each leg of one prompt that fails; while none does, it costs a comparison.

    A fault that the prompt may have caused is told to the pool once another node has served the prompt, or at the end,
    when none has; never where the same node has served it after all.

    Attributes:
        on_going_node: the last leg that failed did so on a node that goes away.
    """

    __slots__ = (
        "_broken",
        "_config",
        "_in_doubt",
        "_last",
        "_metrics",
        "_moment",
        "_origin",
        "_out",
        "_pool",
        "_used",
        "on_going_node",
    )  # fmt: skip

    def __init__(self, pool: Pool, config: OrchestrationConfig, metrics: Metrics, origin: LegOrigin) -> None:
        self._pool = pool
        self._config = config
        self._metrics = metrics
        self._origin = origin
        self._out: dict[str, float] = {}
        """Nodes that failed the prompt, and one that its stream has left, and when (monotonic seconds)."""
        self.on_going_node = False
        self._in_doubt: tuple[_InDoubt, ...] = ()
        self._broken: dict[Leg, int] = {}
        """Nodes that broke off, one after another."""
        self._moment = Moment.OPENING
        """The moment of decode legs that fail now."""
        self._used: dict[Leg, int] = {}
        """Retries."""
        self._last: tuple[Leg, NodeFault] | None = None

    def moved(self, moment: Moment, left: str) -> None:
        """The stream goes on elsewhere: all retries are left, and only the node that it has ``left`` is excluded."""
        self._out = {left: self._pool.clock.now()}
        self.on_going_node = False
        self._moment, self._used, self._last = moment, {}, None

    @property
    def excluded(self) -> frozenset[str]:
        """Names of nodes that are not planned for this prompt: those that failed it, and one that its stream has left,
        until they have joined anew."""
        if not self._out:
            return _NO_NAMES
        return frozenset(name for name, since in self._out.items() if not self._pool.joined_since(name, since))

    def may_come_back(self) -> bool:
        """Whether one of these may be out: then it joins anew, or another one in its place."""
        return not all(self._pool.serves_on(name, since) for name, since in self._out.items())

    # -- what the pool is told

    def leg_failed(self, leg: Leg, name: str, fault: Fault, moment: Moment = Moment.OPENING) -> None:
        """A leg failed on a node: it counts against the node now, later, or not at all."""
        self._out[name] = self._pool.clock.now()
        failed = _InDoubt(leg, name, fault, moment)
        match blame(leg, fault):
            case Blame.IN_DOUBT:
                self._in_doubt += (failed,)
            case Blame.YES:
                self._tell(failed, FailureEvidence.NODE)

    def leg_began(self, leg: Leg, name: str) -> None:
        """A leg goes well: legs of its kind that did not get so far elsewhere failed by their nodes' fault; after a
        decode leg, prefill legs too."""
        self._pool.leg_began(name, leg)
        if self._in_doubt:
            self._served(name, lambda failed: failed.moment is not Moment.STREAMING and leg in (Leg.DECODE, failed.leg))

    def leg_ended(self, leg: Leg, name: str) -> None:
        """A leg has ended well."""
        self._pool.leg_ended(name, leg, self._origin.client)
        if self._in_doubt:
            self._served(name, lambda failed: leg in (Leg.DECODE, failed.leg))

    def leg_served(self, leg: Leg, name: str) -> None:
        """A leg whose answer comes in one piece went well."""
        self._pool.leg_served(name, leg, self._origin.client)
        if self._in_doubt:
            self._served(name, lambda failed: leg in (Leg.DECODE, failed.leg))

    def close(self) -> None:
        """The prompt is at its end: no node has served what failed until now. Idempotent."""
        if self._in_doubt:
            in_doubt, self._in_doubt = self._in_doubt, ()
            for failed in in_doubt:
                self._tell(failed, FailureEvidence.UNSERVED)

    # -- what follows

    def next_step(self, leg: Leg, fault: NodeFault, *, ticket_works: bool = False) -> Step:
        """The next step after a leg that failed before its first event, by the failure table."""
        self._last = (leg, untraced(fault))
        used, config = self._used.get(leg, 0), self._config
        broken, retries = self.broke_off(leg, fault), config.retries - used
        options = RetryOptions(config.on_prefill_failure, retries, ticket_works=ticket_works, broken=broken)
        step = decide(leg, self._moment if leg is Leg.DECODE else Moment.OPENING, fault.fault, options)
        self._used[leg] = used + (fault.fault not in NO_RETRY_USED)
        self._metrics.step_taken(leg, fault.fault, step)
        return step

    def broke_off(self, leg: Leg, fault: NodeFault) -> int:
        """How many nodes broke off under the prompt, one after another, with the one of this fault, if it did: the
        prompt may be what ends their processes."""
        self._broken[leg] = broken = self._broken.get(leg, 0) + (fault.fault is Fault.RESET or fault.resent)
        return broken

    def went_on(self, leg: Leg) -> None:
        """A leg got further than those of its kind that broke off."""
        if self._broken:
            self._broken.pop(leg, None)

    def no_node_left(self, error: NoNode) -> PdproxyError:
        """The error where a next step finds no node: that of the last fault, if there was one that says something.

        How a node fails that is ending says nothing: vLLM answers 500 then. There is no node, for now.
        """
        if self._last is None or self.on_going_node:
            return no_node_error(error)
        leg, fault = self._last
        return final_error(leg, Moment.OPENING, final_step(leg, Moment.OPENING, fault.fault), fault)

    def _served(self, name: str, tells_of: Callable[[_InDoubt], bool]) -> None:
        served = [failed for failed in self._in_doubt if tells_of(failed)]
        self._in_doubt = tuple(failed for failed in self._in_doubt if failed not in served)
        for failed in served:
            if failed.node != name:
                self._tell(failed, FailureEvidence.SERVED)

    def _tell(self, failed: _InDoubt, evidence: FailureEvidence) -> None:
        streaming = failed.moment is Moment.STREAMING
        self._pool.leg_failed(failed.node, failed.leg, failed.fault, self._origin, evidence, streaming=streaming)
