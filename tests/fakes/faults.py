"""What a fake node can do wrong, and when."""

import dataclasses
import enum


class FaultKind(enum.StrEnum):
    """How a leg goes wrong."""

    REFUSE = "refuse"
    """No connection."""
    RESET = "reset"
    """The connection breaks: before the head, or after `at` events."""
    HANG = "hang"
    """No head, ever."""
    STALL = "stall"
    """Nothing more after `at` events (0: after the head)."""
    STATUS = "status"
    """An error answer with `status`."""
    GARBAGE = "garbage"
    """A 200 whose body is not what it should be, from event `at` on."""
    NO_TICKET = "no_ticket"
    """A prefill answer without kv_transfer_params."""
    ERROR_EVENT = "error_event"
    """An error inside a 200 stream after `at` events."""
    SHORT = "short"
    """The body ends properly after `at` events, without its last ones."""


@dataclasses.dataclass(frozen=True, slots=True)
class InjectedFault:
    """One fault.

    Attributes:
        at: events of the body that still arrive; -1: not even the head.
        status: for STATUS.
        headers: for STATUS.
        byte: where the body is cut, in the place of `at`; -1: nowhere.
        times: how many legs it affects.
    """

    kind: FaultKind
    at: int = -1
    status: int = 500
    headers: tuple[tuple[str, str], ...] = ()
    times: int = 1 << 30
    byte: int = -1
