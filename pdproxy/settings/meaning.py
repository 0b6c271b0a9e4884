"""What a setting means, said beside its type: ``connect: Annotated[float, Meaning("…", least=0)] = 5.0``.

The reference page, the flags' help and the error messages are all made from these.
"""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Meaning:
    """One setting in words, and its bounds.

    Attributes:
        text: what it does; starts with a capital letter, ends with a full stop.
        unit: "seconds", "bytes", "tokens", or "" for a plain number.
        least: the smallest number allowed, or None.
        most: the largest number allowed, or None.
        above: a number that the value must exceed, or None.
    """

    text: str
    unit: str = ""
    least: float | None = None
    most: float | None = None
    above: float | None = None
