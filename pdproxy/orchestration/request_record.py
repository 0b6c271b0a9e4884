"""The record of one request: its phases and nodes, its tokens, what failed, how it ended.

Whoever works on a request writes to its record. `recorder.Recorder` writes the log line, the metrics, the span and
`Server-Timing` from it; the operator's page reads the records of requests in flight.
"""

import enum
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

import msgspec
from opentelemetry import trace

from pdproxy.errors import NodeFault
from pdproxy.finish_reasons import whole_reasons
from pdproxy.nodes.node import Role
from pdproxy.observe import gen_ai
from pdproxy.observe.labels import Affinity, Leg, Move, Outcome, Phase, Rejection
from pdproxy.orchestration.keep_facts import KeepFacts
from pdproxy.planning.plan_types import Plan
from pdproxy.reasons import LocalReason
from pdproxy.request import ClientRequest, Endpoint, Json
from pdproxy.usage import Usage

Facts: TypeAlias = dict[str, str | int | float]
"""For a log line and a span: flat, by names that say what they are. Never a body, a ticket or a key, of a client's or
of its session."""
MOST_TOLD = 8
"""Failed legs that a line names; further ones are counted."""
_NODES = (("prefill_node", Phase.PREFILL), ("decode_node", Phase.HANDOVER))
_AFTER_FIRST_BYTE = frozenset({Phase.DECODE, Phase.TOTAL})
_TIMINGS = {phase: f"{phase};dur=%.1f" for phase in Phase}
_MILLISECONDS = {phase: f"{phase}_ms" for phase in Phase}
_NO_AFFINITIES: Mapping[Role, Affinity] = MappingProxyType({})


class Route(enum.StrEnum):
    """Which node computed a prompt, and so whose cache its cached tokens were in."""

    DISAGGREGATED = "disaggregated"
    """A prefill node."""
    LOCAL = "local"
    """The decode node, without a ticket."""
    RECOMPUTED = "recomputed"
    """The decode node, though it had a ticket."""


class StreamMove(NamedTuple):
    """A stream went on at another node; ``stall``: seconds between its last bytes from the one and its first from the
    other, as they were passed on to the client."""

    move: Move
    stall: float


class LegUsage(msgspec.Struct, frozen=True):
    """The tokens that a decode leg reported; ``cached`` is that of the node that computed the prompt.

    ``route``: which node that was; None of a leg that resumed a stream, for its usage does not tell.
    """

    usage: Usage
    route: Route | None


class FinalError(NamedTuple):
    """The error that a request ended with.

    Attributes:
        status: that the client got, or was to get; 200 for a stream that ended in an error event.
        code: of the error, or its type where it has none.
        reason: a sentence; never a node's own words, which may repeat the client's.
        limit: by which the request was turned away; None where it was not.
    """

    status: int
    code: str
    reason: str
    limit: Rejection | None = None


class FailureRecord(msgspec.Struct, eq=False):
    """Which legs of a request failed, and how the request ended; all its prompts write to the same one.

    It holds words alone: the operator's page keeps it for long after the request, whose body must not stay for that.

    Attributes:
        node: the one that failed last; "" where none did.
        error: what the request ended with; None where it went well after all.
        outcome: None while the request runs.
    """

    node: str = ""
    error: FinalError | None = None
    outcome: Outcome | None = None
    _fault: str = ""
    _detail: str = ""
    _tried: tuple[str, ...] = ()
    _more: int = 0

    def leg_failed(self, leg: Leg, node: str, fault: NodeFault) -> None:
        """A leg failed on a node; the request may go well all the same."""
        # Words, and not the fault: its traceback would keep the request and its body alive.
        self.node, self._fault, self._detail = node, fault.fault.value, fault.detail
        if len(self._tried) < MOST_TOLD:
            self._tried += (f"{leg}:{node}:{fault.fault}",)
        else:
            self._more += 1

    def ended_with(self, error: FinalError, node: str = "") -> None:
        """The request ends with an error; of several prompts the first one's tells why. ``node``: that worked on it."""
        self.error = self.error or error
        self.node = self.node or node

    def facts(self) -> Facts:
        """The final error, the last fault, and all legs that were tried and failed."""
        facts: Facts = {}
        if self.error is not None:
            facts |= {"status": self.error.status, "code": self.error.code, "reason": self.error.reason}
        if self.node:
            facts["node"] = self.node
        if self._fault:
            facts |= {"fault": self._fault, "detail": self._detail}
        if self._tried:
            facts["tried"] = ",".join(self._tried) + (f",+{self._more}" if self._more else "")
        return facts


class PromptRecord(msgspec.Struct, eq=False):
    """The record of one prompt of a request.

    Its phases follow one another, from the plan on; one that is entered again adds to its time.

    Attributes:
        clock: monotonic seconds.
        failure: of the request.
        began: when its plan began; it was queued until then.
        entered: when it entered its phase.
        phase: the one that it is in.
        took: seconds spent in each phase that it has left.
        traced: a span is kept, for which more is looked at than the log line tells.
        nodes: name of the node that works in a phase, where one does.
        affinities: whether the nodes of the last plan are its session's own, by role; of policies that know sessions.
        decision: of the last plan, where the policy goes by what is cached.
        route, cohort: of the first decode leg that answered; None and "" until then.
        local_reason: why it was not disaggregated.
        keep: of its turn in a conversation that nodes may keep; None where there is none.
        moves: of its stream.
        usages: of its decode legs.
        finish_reasons: why its choices ended.
        response_id, model: as the answer says; "" until known, and where nobody asks.
    """

    clock: Callable[[], float]
    failure: FailureRecord
    began: float
    entered: float
    traced: bool = False
    phase: Phase = Phase.PLAN
    took: dict[Phase, float] = {}
    nodes: dict[Phase, str] = {}
    affinities: Mapping[Role, Affinity] = _NO_AFFINITIES
    decision: Plan | None = None
    route: Route | None = None
    cohort: str = ""
    local_reason: LocalReason | None = None
    keep: KeepFacts | None = None
    moves: tuple[StreamMove, ...] = ()
    usages: tuple[LegUsage, ...] = ()
    finish_reasons: Sequence[str] = ()
    response_id: str = ""
    model: str = ""

    def enter(self, phase: Phase, node: str = "") -> None:
        """The next phase begins."""
        moment, took, left = self.clock(), self.took, self.phase
        took[left] = took.get(left, 0.0) + moment - self.entered
        self.phase, self.entered = phase, moment
        if node:
            self.nodes[phase] = node

    def in_phase(self) -> float:
        """Seconds since it entered its phase."""
        return self.clock() - self.entered

    def so_far(self, phase: Phase) -> float:
        """Seconds spent in a phase until now."""
        return self.took.get(phase, 0.0) + (self.in_phase() if phase is self.phase else 0.0)

    def answer_began(self, route: Route, cohort: str) -> None:
        """The first event of the answer is here; what happens when its stream moves, its moves tell."""
        if self.route is None:
            self.route, self.cohort = route, cohort

    def began_with(self, first_events: bytes) -> None:
        """The stream of the answer begins with these bytes."""
        if self.traced:
            self.response_id, self.model = gen_ai.id_and_model(first_events)

    def was_whole(self, answer: Json) -> None:
        """The answer came in one piece."""
        if self.traced:
            self.finish_reasons = whole_reasons(answer)
            self.response_id, self.model = str(answer.get("id", "")), str(answer.get("model", ""))

    def moved(self, move: Move, stall: float) -> None:
        """The stream went on at another node, after so many seconds without bytes for the client."""
        self.moves += (StreamMove(move, stall),)

    def leg_used(self, usage: Usage, route: Route | None) -> None:
        """A decode leg reported its tokens: see `LegUsage`."""
        self.usages += (LegUsage(usage, route),)
        if route is Route.RECOMPUTED:
            self.route = route

    @property
    def usage(self) -> Usage | None:
        """The usage that the client is told: the last leg's."""
        return self.usages[-1].usage if self.usages else None


class RequestRecord(msgspec.Struct, eq=False):
    """Any request: who asked for what, and how it ended.

    Attributes:
        name: the request id.
        path: for the log line, without a query.
        endpoint: None for a path that is not a generating endpoint.
        model: as the client named it; "" where that is not known.
        key: the name of its API key, "" for none.
    """

    name: str
    path: str
    endpoint: Endpoint | None
    model: str
    key: str
    failure: FailureRecord = msgspec.field(default_factory=FailureRecord)


class AnswerRecord(RequestRecord, kw_only=True):
    """A request to a generating endpoint.

    Attributes:
        first: its first prompt, whose phases, nodes and plan stand for the request's; the time to the first token, and
            the total, are added to its phases.
        further: its other prompts.
        choices: how many answers are asked for to each prompt.
        span: of the request; None where none is kept.
    """

    request: ClientRequest
    first: PromptRecord
    further: list[PromptRecord] = []
    choices: int = 1
    span: trace.Span | None = None

    @classmethod
    def of(cls, request: ClientRequest, clock: Callable[[], float], span: trace.Span | None = None) -> "AnswerRecord":
        """The record of a request whose plan begins now; ``clock`` as in `PromptRecord`."""
        failure, endpoint, now = FailureRecord(), request.endpoint, clock()
        first = PromptRecord(clock, failure, now, now, span is not None)
        name, path, model, key = request.request_id, str(endpoint), request.model, request.api_key
        return cls(name, path, endpoint, model, key, failure, request=request, first=first, span=span)

    def further_prompt(self) -> PromptRecord:
        """The record of one prompt more."""
        first = self.first
        self.further.append(PromptRecord(first.clock, self.failure, first.began, first.began, first.traced))
        return self.further[-1]

    @property
    def prompts(self) -> Sequence[PromptRecord]:
        """All of them."""
        return (self.first, *self.further)

    def working_node(self) -> str:
        """The node that works on the request, as far as it has come; "" for none."""
        return self.first.nodes.get(self.first.phase, "")

    def usage(self) -> Usage | None:
        """The tokens of all prompts together; None unless they are known of each."""
        if not self.further:
            return self.first.usage
        usages = [usage for prompt in self.prompts if (usage := prompt.usage) is not None]
        if len(usages) <= len(self.further):
            return None
        fields = ("prompt", "completion", "cached")
        return Usage(*(_sum([getattr(usage, field) for usage in usages]) for field in fields))

    def output_tokens(self) -> float:
        """Tokens of each choice, on the mean; 0 where they are not known, and for a list of prompts, which do not begin
        together."""
        usage = None if self.further else self.first.usage
        return 0.0 if usage is None else (usage.completion or 0) / self.choices

    def server_timing(self) -> str:
        """The value of `Server-Timing`, in milliseconds, of the phases up to the first byte."""
        took = self.first.took.items()
        return ", ".join([_TIMINGS[phase] % (spent * 1000) for phase, spent in took if phase not in _AFTER_FIRST_BYTE])

    def facts(self, outcome: Outcome) -> Facts:
        """Outcome, nodes, plan, keeps, moves, failures, and milliseconds in each phase."""
        first = self.first
        facts: Facts = {"outcome": str(outcome)}  # a word's `value` takes three times as long
        for field, phase in _NODES:
            if phase in first.nodes:
                facts[field] = first.nodes[phase]
        for role, affinity in first.affinities.items():
            facts[f"{role}_session"] = affinity.value
        if first.decision is not None:
            facts |= first.decision.facts()
        if first.keep is not None:
            facts |= first.keep.facts()
        moves = [move for prompt in self.prompts for move in prompt.moves] if self.further else first.moves
        if moves:
            facts |= _move_facts(moves)
        if first.route is not None:
            facts["route"] = str(first.route)
        if first.local_reason is not None:
            facts["local_reason"] = str(first.local_reason)
        facts |= self.failure.facts()
        for phase, seconds in first.took.items():
            # To tenths; with a number of digits `round` takes five times as long.
            facts[_MILLISECONDS[phase]] = round(seconds * 10_000) / 10
        return facts

    def attributes(self) -> gen_ai.Attributes:
        """The span's attributes beside the facts, by the names of the conventions; routes and cohort are the first
        prompt's."""
        found: gen_ai.Attributes = {"pdproxy.cohort": self.first.cohort} if self.first.cohort else {}
        for name, values in (
            (gen_ai.RESPONSE_ID, [prompt.response_id for prompt in self.prompts]),
            (gen_ai.RESPONSE_MODEL, [prompt.model for prompt in self.prompts]),
        ):
            if told := next(filter(None, values), ""):
                found[name] = told
        if reasons := [reason for prompt in self.prompts for reason in prompt.finish_reasons]:
            found[gen_ai.FINISH_REASONS] = reasons
        usage = self.usage()
        return found if usage is None else found | gen_ai.usage_attributes(usage)


def _move_facts(moves: Sequence[StreamMove]) -> Facts:
    """Facts of streams that went on at other nodes: how often, how, and the longest stall."""
    ways = "+".join(dict.fromkeys(each.move.value for each in moves))
    stall = max(each.stall for each in moves)
    return {"moves": len(moves), "moved": ways, "stall_ms": round(stall * 1000, 1)}


def _sum(counts: Sequence[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None
