"""The metrics of plans: why they are as they are, and whether nodes had cached what plans took them to have."""

import enum
from functools import partial
from typing import NamedTuple

from prometheus_client import CollectorRegistry

from pdproxy.observe.families import Counter, CounterSeries
from pdproxy.observe.labels import Affinity, Prediction
from pdproxy.observe.node_metrics import ROLES
from pdproxy.observe.request_metrics import Made
from pdproxy.reasons import RouteReason


class _HitSeries(NamedTuple):
    """The series of what a node of one role was taken to have cached, where that was right, or wrong in one way."""

    prompts: CounterSeries
    planned: CounterSeries
    real: CounterSeries


class PlanMetrics:
    """Counts plans and their hits; `Metrics` has one."""

    def __init__(self, registry: CollectorRegistry) -> None:
        counter = partial(Counter, registry=registry)
        self._local = counter("pdproxy_local_total", "Requests computed on the decode node alone.", ["reason"])
        self._sessions = counter(
            "pdproxy_session_routes_total", "Legs planned by session: for its own node or not.", ["role", "outcome"]
        )
        self._plans = counter("pdproxy_plans_total", "Plans by what is cached, and why they are so.", ["reason"])
        self._planned_hits = counter(
            "pdproxy_planned_hit_tokens_total", "Prompt tokens that plans took to be cached.", ["role"]
        )
        self._real_hits = counter(
            "pdproxy_real_hit_tokens_total", "Of the same prompts, tokens that nodes had cached.", ["role"]
        )
        self._predictions = counter(
            "pdproxy_hit_predictions_total", "Of the same prompts, whether the plan was right.", ["role", "outcome"]
        )
        self._planned: Made[RouteReason, CounterSeries] = Made(self._plans.labels)
        self._hits_by_outcome: Made[tuple[enum.StrEnum, Prediction], _HitSeries] = Made(self._hit_series)
        self._plans.export_zeros(RouteReason)
        self._sessions.export_zeros(ROLES, Affinity)
        self._planned_hits.export_zeros(ROLES)
        self._real_hits.export_zeros(ROLES)
        self._predictions.export_zeros(ROLES, Prediction)

    def planned_local(self, reason: enum.StrEnum) -> None:
        """Count a request that one node computes alone."""
        self._local.labels(reason).inc()

    def session_routed(self, role: enum.StrEnum, outcome: Affinity) -> None:
        """Count a leg that was planned by its request's session."""
        self._sessions.labels(role, outcome).inc()

    def planned(self, reason: RouteReason) -> None:
        """Count a plan by what is cached."""
        self._planned[reason].inc()

    def hit(self, role: enum.StrEnum, planned: int, real: int, outcome: Prediction) -> None:
        """Count what a node of a role was taken to have cached of a prompt that it computed, and what it had."""
        series = self._hits_by_outcome[role, outcome]
        series.prompts.inc()
        series.planned.inc(planned)
        series.real.inc(real)

    def _hit_series(self, of: tuple[enum.StrEnum, Prediction]) -> _HitSeries:
        role, outcome = of
        prompts, planned, real = self._predictions.labels(role, outcome), self._planned_hits, self._real_hits
        return _HitSeries(prompts, planned.labels(role), real.labels(role))
