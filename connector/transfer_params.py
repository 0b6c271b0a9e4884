"""The meaning of a request's `kv_transfer_params` on this node: validated once, before vLLM acts on them. Pure.

Runs in the scheduler's process, when vLLM announces a request. The fields are described in `nixl_connector`.

    neither flag     ──► ComputeLocally; ReleaseHandOver for `pdproxy_release`
    do_remote_decode ──► IssueTicket
    do_remote_prefill ─► ReadTicket, if the ticket is valid and is for this very prompt
    anything else    ──► Refusal, with a reason; the request is computed locally
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .config import Role
from .ticket import Expected, Ticket, parse
from .ticket_fields import Refusal, RefusalReason

HAND_OVER = "pdproxy_hand_over"
READERS = "pdproxy_readers"
RELEASE = "pdproxy_release"
MOST_READERS = 1024

_ID = re.compile(r"[A-Za-z0-9_-]{16,128}")


@dataclass(frozen=True, slots=True)
class ComputeLocally:
    """No hand-over: this node computes the prompt."""


@dataclass(frozen=True, slots=True)
class IssueTicket:
    """Compute the prompt and answer with a ticket for `readers` reads."""

    hand_over: str | None
    readers: int

    def params(self) -> dict[str, Any]:
        """The clean params for vLLM's prefill side."""
        return {"do_remote_decode": True, "do_remote_prefill": False}


@dataclass(frozen=True, slots=True)
class ReadTicket:
    """Read the blocks that the ticket names."""

    ticket: Ticket


@dataclass(frozen=True, slots=True)
class ReleaseHandOver:
    """End the leases that the hand-over id names."""

    hand_over: str


class ValidatedParams(dict[str, Any]):
    """`kv_transfer_params` that this module has validated; a sender cannot make one.

    vLLM may announce a request twice, and marks in its params what it has done to it (`_p_side_truncated`: the
    prompt's last tokens are off). A request that is announced again keeps them.
    """


Action = ComputeLocally | IssueTicket | ReadTicket | ReleaseHandOver | Refusal


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """Facts of the request itself that the rules need.

    `unsuitable`: why its KV cannot be handed over (embeddings, a session, prompt log-probabilities), or None.
    `expected_tokens`: how many tokens a ticket for it must cover; None for a request that vLLM's API server makes
    only to end it at once, so that its ticket is given back: its prompt is a stand-in. `digest`: of its first n tokens.
    """

    unsuitable: str | None
    expected_tokens: int | None
    digest: Callable[[int], str]


@dataclass(frozen=True, slots=True)
class ParamsValidator:
    """The rules of one node. `expected`: which tickets it accepts."""

    role: Role
    expected: Expected

    def validate(self, raw: Any, facts: RequestFacts) -> Action:
        """The action for a request that carries `raw`. Never raises, whatever `raw` is."""
        if raw is None or raw == {}:
            return ComputeLocally()
        if not isinstance(raw, dict):
            return Refusal(RefusalReason.NOT_AN_OBJECT, "kv_transfer_params is not an object")
        flags = [raw.get(name) for name in ("do_remote_decode", "do_remote_prefill")]
        if not all(flag is None or isinstance(flag, bool) for flag in flags):
            return Refusal(RefusalReason.BAD_FIELD, "a flag is neither true nor false")
        match [bool(flag) for flag in flags]:
            case [True, True]:
                return Refusal(RefusalReason.CONTRADICTORY, "both flags are set")
            case [True, False]:
                return self._prefill(raw, facts)
            case [False, True]:
                return self._decode(raw, facts)
            case _:
                return self._neither(raw)

    def _prefill(self, raw: dict[Any, Any], facts: RequestFacts) -> Action:
        if not self.role.prefills:
            return Refusal(RefusalReason.WRONG_ROLE, "this node does not prefill for others")
        if _names_remote(raw):
            return Refusal(RefusalReason.REMOTE_FIELDS, "a prefill leg names remote blocks")
        if facts.unsuitable is not None:
            return Refusal(RefusalReason.UNSUITABLE_REQUEST, facts.unsuitable)
        hand_over, readers = raw.get(HAND_OVER), raw.get(READERS, 1)
        if hand_over is not None and not is_id(hand_over):
            return Refusal(RefusalReason.BAD_FIELD, f"{HAND_OVER} is not 16 to 128 letters, digits, - or _")
        if type(readers) is not int or not 1 <= readers <= MOST_READERS:
            return Refusal(RefusalReason.BAD_FIELD, f"{READERS} is not a whole number from 1 to {MOST_READERS}")
        return IssueTicket(hand_over, readers)

    def _decode(self, raw: dict[Any, Any], facts: RequestFacts) -> Action:
        if not self.role.decodes:
            return Refusal(RefusalReason.WRONG_ROLE, "this node does not decode for others")
        if facts.unsuitable is not None:
            return Refusal(RefusalReason.UNSUITABLE_REQUEST, facts.unsuitable)
        ticket = parse(raw, self.expected)
        if isinstance(ticket, Refusal):
            return ticket
        if facts.expected_tokens is None:
            return ReadTicket(ticket)
        if ticket.num_tokens != facts.expected_tokens:
            return Refusal(RefusalReason.NUMBER, "the ticket covers another number of tokens than this prompt needs")
        if ticket.digest != facts.digest(ticket.num_tokens):
            return Refusal(RefusalReason.DIGEST, "the ticket is for another prompt")
        return ReadTicket(ticket)

    def _neither(self, raw: dict[Any, Any]) -> Action:
        if RELEASE in raw:
            return self._release(raw[RELEASE])
        if _names_remote(raw):
            return Refusal(RefusalReason.NO_FLAG, "remote fields without do_remote_prefill")
        return ComputeLocally()

    def _release(self, hand_over: Any) -> Action:
        if not self.role.prefills:
            return Refusal(RefusalReason.WRONG_ROLE, "this node holds no hand-overs")
        if not is_id(hand_over):
            return Refusal(RefusalReason.BAD_FIELD, f"{RELEASE} is not a hand-over id")
        return ReleaseHandOver(hand_over)


def is_id(value: Any) -> bool:
    """Whether a value can be a hand-over id."""
    return isinstance(value, str) and _ID.fullmatch(value) is not None


def _names_remote(raw: dict[Any, Any]) -> bool:
    return any(
        isinstance(name, str) and name.startswith("remote_") and value is not None for name, value in raw.items()
    )
