"""PromQL as a syntax tree: as much of it as our rules, panels and scalers use."""

import dataclasses
import re
from typing import TypeAlias


class Unsupported(ValueError):
    """PromQL that this evaluator does not know, or no PromQL."""


@dataclasses.dataclass(frozen=True, slots=True)
class Matcher:
    """One condition on a label; a label that is not there is the empty string."""

    label: str
    sign: str
    value: str

    def holds(self, labels: dict[str, str]) -> bool:
        """Whether a series with these labels meets it."""
        there = labels.get(self.label, "")
        same = re.fullmatch(self.value, there) is not None if "~" in self.sign else there == self.value
        return same is not self.sign.startswith("!")


@dataclasses.dataclass(frozen=True, slots=True)
class Number:
    """A scalar."""

    value: float


@dataclasses.dataclass(frozen=True, slots=True)
class Selector:
    """Series by name and labels; with a window in seconds, all their samples in it."""

    name: str
    matchers: tuple[Matcher, ...] = ()
    window: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """A function."""

    function: str
    arguments: tuple["Expression", ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Aggregation:
    """Series put together; those alike in the labels ``by`` make one."""

    how: str
    by: tuple[str, ...]
    of: "Expression"


@dataclasses.dataclass(frozen=True, slots=True)
class Binary:
    """Two operands."""

    sign: str
    left: "Expression"
    right: "Expression"


Expression: TypeAlias = Number | Selector | Call | Aggregation | Binary
