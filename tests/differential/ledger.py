"""The differences from a single vLLM engine that have a reason. Pure."""

import fnmatch
import tomllib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tests.differential.grid import Case


@dataclass(frozen=True, slots=True)
class Row:
    """Cases whose answers differ for one reason. Each pattern is as in `fnmatch`; several are alternatives.

    Attributes:
        aspects: what may differ; see `answers.aspects`.
        page: the sentence for "What differs from vLLM", for a difference that we want; empty for one that no user sees.
    """

    endpoints: tuple[str, ...]
    fields: tuple[str, ...]
    values: tuple[str, ...]
    aspects: tuple[str, ...]
    reason: str
    page: str

    def explains(self, case: Case, aspects: Iterable[str]) -> bool:
        """Whether this row is the reason of a difference."""
        return (
            _fits(case.endpoint, self.endpoints)
            and _fits(case.field, self.fields)
            and _fits(case.value, self.values)
            and all(_fits(aspect, self.aspects) for aspect in aspects)
        )


def _fits(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def read(text: str) -> tuple[Row, ...]:
    """Out of TOML: `[[differences]]`, patterns one or in a list. Raises ValueError for a row without a reason."""
    return tuple(_row(part) for part in tomllib.loads(text).get("differences", []))


def _row(part: dict[str, object]) -> Row:
    def texts(name: str) -> tuple[str, ...]:
        value = part.get(name, ["*"])
        return tuple(map(str, value)) if isinstance(value, list) else (str(value),)

    reason = " ".join(str(part.get("reason", "")).split())
    if not reason:
        raise ValueError(f"a row needs a reason: {part}")
    page = " ".join(str(part.get("page", "")).split())
    return Row(texts("endpoints"), texts("fields"), texts("values"), texts("aspects"), reason, page)


@dataclass(frozen=True, slots=True)
class Difference:
    """One case whose answers differ, in which aspects, and what both said."""

    case: Case
    aspects: tuple[str, ...]
    told: str


def unexplained(found: Sequence[Difference], rows: Sequence[Row]) -> list[Difference]:
    """The differences without a row."""
    return [each for each in found if not any(row.explains(each.case, each.aspects) for row in rows)]


def unused(found: Sequence[Difference], rows: Sequence[Row]) -> list[Row]:
    """Rows that explain nothing any more: to be taken out."""
    used = Counter(row for each in found for row in rows if row.explains(each.case, each.aspects))
    return [row for row in rows if not used[row]]


def page(rows: Sequence[Row]) -> list[str]:
    """The sentences for users, each once, in the ledger's order."""
    return list(dict.fromkeys(row.page for row in rows if row.page))
