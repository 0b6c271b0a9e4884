"""Plans for one prompt's request, knowing which nodes have failed it."""

from pdproxy.drive.conduct import Conduct
from pdproxy.drive.job import Job
from pdproxy.drive.length import most_tokens
from pdproxy.drive.means import Means
from pdproxy.drive.why import Why
from pdproxy.nodes.node import Node, Role
from pdproxy.planning.plan import Needs, NoNode, Plan, UnknownModel, choose, plan

NOWHERE = (NoNode, UnknownModel)
"""Why there is no other node: none can take it now, or the last that served the model was removed meanwhile."""


class Planner:
    """Asks `planning` with a fresh snapshot each time; does no I/O."""

    def __init__(self, means: Means, job: Job, conduct: Conduct) -> None:
        self._means = means
        self._job = job
        self._conduct = conduct
        self._local = _why(job)
        short = means.terms.local_below_tokens > 0
        self._tokens = most_tokens(job.endpoint, job.body) if short else None

    def plan(self) -> Plan:
        """Which nodes now.

        Raises:
            UnknownModel: no node serves the model.
            NoNode: none can take it now.
        """
        means = self._means
        return plan(means.pool.snapshot(), self._needs(), means.terms.plan_policy(), next(means.turns))

    def possible(self) -> bool:
        """Whether a plan could be made now."""
        try:
            self.plan()
        except NOWHERE:
            return False
        return True

    def other_decode(self, prefill: Node) -> Node | None:
        """Another decode node that can use a ticket of ``prefill``, None where there is none."""
        try:
            return self._choose_decode(self._needs(prefill))
        except NOWHERE:
            return None

    def elsewhere(self) -> bool:
        """Whether a decode node is there that has not failed the request."""
        try:
            self._choose_decode(self._needs())
        except NOWHERE:
            return False
        return True

    def without_prefill(self, why: Why) -> None:
        """From now on the decode node computes the prompt."""
        self._local = why

    def anew(self) -> None:
        """A new leg begins: what was decided for the last one is forgotten."""
        self._local = _why(self._job)

    def _choose_decode(self, needs: Needs) -> Node:
        return choose(self._means.pool.snapshot(), Role.DECODE, needs, next(self._means.turns))

    def _needs(self, ticket_of: Node | None = None) -> Needs:
        """``ticket_of``: the prefill node whose ticket is at hand."""
        return Needs(
            self._job.request.model,
            self._local,
            self._conduct.avoided,
            cohort=ticket_of.cohort if ticket_of else "",
            prefill=ticket_of.name if ticket_of else "",
            prompt_tokens=self._tokens,
        )


def _why(job: Job) -> Why | None:
    because = job.shape.local_because
    return None if because is None else Why.of(because)
