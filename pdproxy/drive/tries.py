"""What was tried for one leg-opening, and what the failure table says comes next."""

from pdproxy.drive.handover import HandOver
from pdproxy.drive.means import Means
from pdproxy.drive.verdict import no_node, verdict
from pdproxy.errors import NodeFault, PdproxyError
from pdproxy.failures import FREE, Chances, Moment, Step, decide, last_resort
from pdproxy.observe.labels import Leg
from pdproxy.planning.plan import NoNode


class Tries:
    """Counts down; a new one is made for every opening."""

    def __init__(self, means: Means) -> None:
        self._means = means
        self._left = dict.fromkeys((Leg.PREFILL, Leg.DECODE), means.terms.retries)
        self._last: tuple[Leg, NodeFault] | None = None

    def judge(self, leg: Leg, fault: NodeFault, hand_over: HandOver | None) -> Step:
        """The next step after a failed leg."""
        self._last = (leg, fault)
        step = decide(leg, Moment.OPENING, fault.fault, self._chances(leg, hand_over))
        self._left[leg] -= fault.fault not in FREE
        self._means.metrics.step_taken(leg, fault.fault, step)
        return step

    def nobody(self, error: NoNode) -> PdproxyError:
        """No node is left: the last fault tells why, if there was one."""
        if self._last is None:
            return no_node(error)
        leg, fault = self._last
        return verdict(leg, Moment.OPENING, last_resort(leg, Moment.OPENING, fault.fault), fault)

    def _chances(self, leg: Leg, hand_over: HandOver | None) -> Chances:
        terms = self._means.terms
        works = hand_over is not None and self._means.clock.now() - hand_over.born < terms.ticket_life
        return Chances(terms.on_prefill_failure, self._left[leg], works, migrations=0, continuable=False)
