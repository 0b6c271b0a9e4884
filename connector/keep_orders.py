"""Orders about what a node keeps for a conversation's next turn, in a request's `kv_transfer_params`. Pure.

    "pdproxy_keep": {"id": ID, "seconds": S}    this request is a turn of conversation ID; keep for the next one what it
                                                leaves in the prefix cache, for S seconds from its end; S = 0, or none:
                                                keep nothing more
    "pdproxy_forget": [ID, ...]                 end what is kept for these conversations

Both may stand beside anything else. ID is opaque here: 16 to 128 letters, digits, - or _, which nobody else can guess.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .ticket_fields import Refusal, RefusalReason
from .transfer_params import is_id

KEEP = "pdproxy_keep"
FORGET = "pdproxy_forget"
LONGEST_KEEP = 86_400.0
"""Seconds."""
MOST_FORGOTTEN = 1024


@dataclass(frozen=True, slots=True)
class KeepOrder:
    """A turn of a conversation, and for how many seconds after its end the node keeps what the next one needs."""

    conversation: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Orders:
    """The orders of one request."""

    keep: KeepOrder | None = None
    forget: Sequence[str] = ()


NO_ORDERS = Orders()


def orders_in(params: Any) -> Orders | Refusal:
    """The orders in a request's `kv_transfer_params`, whatever those are. A refusal is of the orders alone."""
    if not isinstance(params, dict) or (KEEP not in params and FORGET not in params):
        return NO_ORDERS
    keep = _keep(params[KEEP]) if KEEP in params else None
    if isinstance(keep, Refusal):
        return keep
    forget = params.get(FORGET, [])
    if not isinstance(forget, list) or len(forget) > MOST_FORGOTTEN or not all(map(is_id, forget)):
        return Refusal(RefusalReason.BAD_FIELD, f"{FORGET} is not a list of {MOST_FORGOTTEN} conversation ids at most")
    return Orders(keep, tuple(forget))


def _keep(raw: Any) -> KeepOrder | Refusal:
    conversation = raw.get("id") if isinstance(raw, dict) else None
    if not isinstance(conversation, str) or not is_id(conversation):
        return Refusal(RefusalReason.BAD_FIELD, f"{KEEP} has no id of 16 to 128 letters, digits, - or _")
    seconds = raw.get("seconds", 0)
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds <= LONGEST_KEEP:
        return Refusal(RefusalReason.BAD_FIELD, f"{KEEP} is not for 0 to {LONGEST_KEEP:.0f} seconds")
    return KeepOrder(conversation, float(seconds))
