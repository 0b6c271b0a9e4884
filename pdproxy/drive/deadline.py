"""The deadline of a client's request as a whole."""

from pdproxy.clock import Clock
from pdproxy.drive.verdict import too_late

EARLY = 0.01
"""Seconds that a timer may fire before its time: event loops count in milliseconds."""


def over(clock: Clock, deadline: float) -> bool:
    """Whether it has come."""
    return clock.now() >= deadline - EARLY


def remaining(clock: Clock, deadline: float) -> float:
    """Seconds that are left.

    Raises:
        ClientError: 504 where none are.
    """
    if over(clock, deadline):
        raise too_late()
    return deadline - clock.now()
