"""What is known of an answer when it ends: where it was computed, its tokens, how its stream moved, why it ended."""

import dataclasses
import enum
from collections.abc import Sequence

from pdproxy.errors import NodeFault
from pdproxy.finish_reasons import whole_reasons
from pdproxy.observe import gen_ai
from pdproxy.observe.labels import Leg, Move
from pdproxy.orchestration.failure_record import FailureRecord, FinalError
from pdproxy.request import Json, LocalReason
from pdproxy.usage import Usage


class Route(enum.StrEnum):
    """Which node computed a prompt, and so whose cache its cached tokens were in."""

    DISAGGREGATED = "disaggregated"
    """A prefill node."""
    LOCAL = "local"
    """The decode node, without a ticket."""
    RECOMPUTED = "recomputed"
    """The decode node, though it had a ticket."""


@dataclasses.dataclass(frozen=True, slots=True)
class StreamMove:
    """A stream went on at another node; ``stall``: seconds between its last bytes from the one and its first from the
    other, as they were passed on to the client."""

    move: Move
    stall: float


@dataclasses.dataclass(slots=True)
class AnswerRecord:
    """Of one request's answer; that of a list of prompts is about all of them, but for its routes and its cohort.

    Attributes:
        traced: a span is kept, for which more is looked at than the log line tells.
        prompts: how many there are.
        choices: how many answers are asked for to each.
        route, local_reason, cohort: of the first prompt; None and "" until known.
        moves: of its streams.
        response_id, model: as the answer says; "" until known, and where nobody asks.
        failure: None while nothing has failed.
    """

    traced: bool = False
    prompts: int = 1
    choices: int = 1
    route: Route | None = None
    local_reason: LocalReason | None = None
    cohort: str = ""
    moves: tuple[StreamMove, ...] = ()
    response_id: str = ""
    model: str = ""
    failure: FailureRecord | None = None
    _usages: dict[int, Usage] = dataclasses.field(default_factory=dict)
    _finish_reasons: dict[int, Sequence[str]] = dataclasses.field(default_factory=dict)

    def began(self, route: Route, cohort: str) -> None:
        """The first event of the first prompt's answer is here; what happens when its stream moves, its moves tell."""
        if self.route is None:
            self.route, self.cohort = route, cohort

    def leg_failed(self, leg: Leg, node: str, fault: NodeFault) -> None:
        """A leg of a prompt failed on a node; the request may go well all the same."""
        self.failure = self.failure or FailureRecord()
        self.failure.leg_failed(leg, node, fault)

    def ended_with(self, error: FinalError, node: str = "") -> None:
        """The request ends with an error; of several prompts the first one's tells why. ``node``: that worked on it."""
        self.failure = self.failure or FailureRecord()
        self.failure.error = self.failure.error or error
        self.failure.node = self.failure.node or node

    def used(self, prompt: int, usage: Usage) -> None:
        """What the client is told of the tokens of a prompt's answer; a later word counts."""
        self._usages[prompt] = usage

    def finished(self, prompt: int, reasons: Sequence[str]) -> None:
        """Why the choices of a prompt's answer ended."""
        self._finish_reasons[prompt] = reasons

    def was_whole(self, prompt: int, answer: Json) -> None:
        """A prompt's answer came in one piece."""
        if self.traced:
            self.finished(prompt, whole_reasons(answer))
            self._named(str(answer.get("id", "")), str(answer.get("model", "")))

    def began_with(self, first_events: bytes) -> None:
        """A stream of the answer begins with these bytes."""
        if self.traced:
            self._named(*gen_ai.id_and_model(first_events))

    def _named(self, response_id: str, model: str) -> None:
        self.response_id, self.model = self.response_id or response_id, self.model or model

    def usage(self) -> Usage | None:
        """The tokens of all prompts together; None unless they are known of each."""
        usages = list(self._usages.values())
        if len(usages) < self.prompts:
            return None
        if len(usages) == 1:
            return usages[0]
        return Usage(
            *(_sum([getattr(usage, field) for usage in usages]) for field in ("prompt", "completion", "cached"))
        )

    def output_tokens(self) -> float:
        """Tokens of each choice, on the mean; 0 where they are not known, and for a list of prompts, which do not begin
        together."""
        usage = self.usage() if self.prompts == 1 else None
        return 0.0 if usage is None else (usage.completion or 0) / self.choices

    def facts(self) -> dict[str, str | int | float]:
        """For a log line and a span: flat, and by names that say what they are."""
        facts = _move_facts(self.moves)
        if self.route is not None:
            facts["route"] = f"{self.route}"
        if self.local_reason is not None:
            facts["local_reason"] = f"{self.local_reason}"
        if self.failure is not None:
            facts |= self.failure.facts()
        return facts

    def attributes(self) -> gen_ai.Attributes:
        """What a span has beside the facts, by the names of the conventions."""
        found: gen_ai.Attributes = {"pdproxy.cohort": self.cohort} if self.cohort else {}
        if self.response_id:
            found[gen_ai.RESPONSE_ID] = self.response_id
        if self.model:
            found[gen_ai.RESPONSE_MODEL] = self.model
        if reasons := [reason for prompt in sorted(self._finish_reasons) for reason in self._finish_reasons[prompt]]:
            found[gen_ai.FINISH_REASONS] = reasons
        usage = self.usage()
        return found if usage is None else found | gen_ai.usage_attributes(usage)


def _move_facts(moves: Sequence[StreamMove]) -> dict[str, str | int | float]:
    """Of a stream that went on at other nodes: how often, how, and its longest stall; empty for any other."""
    if not moves:
        return {}
    ways = "+".join(dict.fromkeys(each.move.value for each in moves))
    stall = max(each.stall for each in moves)
    return {"moves": len(moves), "moved": ways, "stall_ms": round(stall * 1000, 1)}


def _sum(counts: Sequence[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None
