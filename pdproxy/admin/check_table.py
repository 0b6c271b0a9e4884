"""`pdproxy check` for a person: which nodes were found, what their caches hold, and whether they can work together.

TOKENS is attention capacity, SEQUENCES how many the state groups allow, LONGEST how many of the greatest length run
together, BINDS which of the first two runs out with these. A node without partner serves alone: it is named in what it
differs from the nearest node of the other role.
"""

from collections.abc import Iterable, Sequence

from pdproxy.errors import NodeFault
from pdproxy.nodes.node import Capacity
from pdproxy.nodes.preflight import CheckRow, cause, is_unreachable, symptom

_HEAD = ("NODE", "ROLE", "MODEL", "COHORT", "TOKENS", "SEQUENCES", "LONGEST", "BINDS", "VERDICT")


def table(rows: Sequence[CheckRow]) -> str:
    """One line per node, then what there is to say about each, by the name of the setting."""
    cells = [_HEAD, *(_cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(_HEAD))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]
    return "\n".join([*lines, *(note for row in rows for note in _notes(row))])


def passed(rows: Iterable[CheckRow]) -> bool:
    """Whether every node would be admitted, and has a partner where any node of the other role is there."""
    return all(row.good() and not row.unpaired for row in rows)


def _cells(row: CheckRow) -> tuple[str, ...]:
    if isinstance(row.info, NodeFault):
        verdict = "unreachable" if is_unreachable(row.info) else "unusable"
        return row.node.name, row.node.role, row.node.model or "?", "?", *_capacity(None), verdict
    node = row.info.joined()
    return node.name, node.role, node.model or "?", node.cohort or "?", *_capacity(node.capacity), _verdict(row)


def _capacity(told: Capacity | None) -> tuple[str, str, str, str]:
    if told is None:
        return "?", "?", "?", "?"
    by_state = "any" if told.sequences is None else f"{told.sequences:,}"
    return f"{told.tokens:,}", by_state, f"{told.longest:,}", told.binding


def _verdict(row: CheckRow) -> str:
    if row.compatibility.refusals:
        return "refused"
    if row.unpaired:
        return "no partner"
    return "ok, with warnings" if row.compatibility.warnings else "ok"


def _notes(row: CheckRow) -> list[str]:
    if isinstance(row.info, NodeFault):
        return [f"{row.node.name}: {symptom(row.info)}: {cause(row.info)}"]
    kinds = {
        "refused": row.compatibility.refusals,
        "exchanges no tickets": row.unpaired,
        "warning": row.compatibility.warnings,
    }
    return [f"{row.node.name}: {kind}: {finding}" for kind, findings in kinds.items() for finding in findings]
