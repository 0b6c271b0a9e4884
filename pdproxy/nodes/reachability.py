"""What an operator reads of a node that cannot be asked: why, in plain words, at once and then ever more rarely."""

import dataclasses
import logging
from collections.abc import Collection

from pdproxy.clock import Clock
from pdproxy.errors import Fault, NodeFault
from pdproxy.nodes.node import Node

_LOG = logging.getLogger(__name__)

REMINDERS = (60.0, 300.0, 1800.0)
"""Seconds after which a node that still cannot be asked is logged again; after the last, each time as much later."""
_NO_ANSWER = frozenset({Fault.REFUSED, Fault.RESET, Fault.HEADERS_TIMEOUT})
_DENIED = (401, 403)


def reason(fault: NodeFault) -> str:
    """Why a node cannot be asked, with the setting to look at where there is one."""
    if fault.status in _DENIED:
        return (
            f"{fault.detail}: the proxy's own requests need a credential that the node accepts: name the "
            "file with it in upstream.credential_file (upstream.credential says what clients' requests carry)"
        )
    return fault.detail


def is_out_of_reach(fault: NodeFault) -> bool:
    """Whether the node gave no answer at all."""
    return fault.fault in _NO_ANSWER


def what(fault: NodeFault) -> str:
    """The beginning of the sentence that `reason` ends."""
    return "cannot be reached" if is_out_of_reach(fault) else "cannot be used"


@dataclasses.dataclass(slots=True)
class _Outage:
    """Since when, how many lines were written, and when the next one is due."""

    since: float
    lines: int = 0
    due: float = 0.0

    def written(self) -> None:
        """A line is out."""
        after = REMINDERS[self.lines] if self.lines < len(REMINDERS) else (self.lines - 1) * REMINDERS[-1]
        self.lines += 1
        self.due = self.since + after


class OutageLog:
    """One line when a node is found to be out of reach, few while it is, and one when it is back."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._outages: dict[str, _Outage] = {}

    def failed(self, node: Node, fault: NodeFault) -> None:
        """The node could not be asked, once more."""
        now = self._clock.now()
        outage = self._outages.setdefault(node.name, _Outage(now, due=now))
        if now < outage.due:
            return
        if outage.lines == 0:
            text = "node %s %s: %s. It gets no requests until it answers; every health check tries again"
            _LOG.warning(text, node.name, what(fault), reason(fault))
        else:
            text = "node %s still %s, for %s now: %s"
            _LOG.warning(text, node.name, what(fault), _length(now - outage.since), reason(fault))
        outage.written()

    def answered(self, node: Node) -> None:
        """The node could be asked."""
        outage = self._outages.pop(node.name, None)
        if outage is not None:
            _LOG.info("node %s answers again, after %s", node.name, _length(self._clock.now() - outage.since))

    def keep(self, names: Collection[str]) -> None:
        """Forget all other nodes: they have left."""
        self._outages = {name: outage for name, outage in self._outages.items() if name in names}


def _length(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 60 else f"{seconds / 60:.0f} min"
