"""The Python functions that a step calls: a count that no other work on the machine changes."""

import sys
from collections.abc import Callable
from types import FrameType


def calls(step: Callable[[], object]) -> int:
    """How many Python functions a step enters."""
    entered = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal entered
        entered += event == "call"

    sys.setprofile(count)
    try:
        step()
    finally:
        sys.setprofile(None)
    return entered
