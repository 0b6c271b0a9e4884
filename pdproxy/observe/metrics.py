"""The proxy's metrics, on an injected registry, by typed methods: no label string is written at a call site."""

import enum
from collections.abc import Callable
from functools import partial

from prometheus_client import CollectorRegistry

from pdproxy.errors import Fault
from pdproxy.observe.event_metrics import EventMetrics
from pdproxy.observe.families import Counter, Gauge, Histogram, HistogramSeries
from pdproxy.observe.keep_metrics import KeepMetrics
from pdproxy.observe.labels import (
    Attempt,
    FileChange,
    Leg,
    Move,
    OperatorRefusal,
    Phase,
    Rejection,
    SpanOutcome,
    Task,
    WatchedSetting,
)
from pdproxy.observe.node_metrics import NodeMetrics
from pdproxy.observe.plan_metrics import PlanMetrics
from pdproxy.observe.request_metrics import SECONDS, KeyMetrics, Made, RequestMetrics


class Metrics:
    """Every series of the proxy. Counting never raises and never waits.

    Attributes:
        events: those of KV events and token ids.
        phases: seconds spent in each phase of a request.
        requests: those of requests as their clients see them, latency in the names of OpenTelemetry's conventions.
        keys: those of each API key.
        plans: those of plans, and of whether they were right.
        nodes: those of nodes, of their pairs and cohorts.
        keeps: those of conversations that nodes keep.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.events, self.requests, self.keys = EventMetrics(registry), RequestMetrics(registry), KeyMetrics(registry)
        self.plans, self.nodes, self.keeps = PlanMetrics(registry), NodeMetrics(registry), KeepMetrics(registry)
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        phases = Histogram(
            "pdproxy_phase_seconds", "Time spent in a phase.", ["phase"], buckets=SECONDS, registry=registry
        )
        self.phases: Made[Phase, HistogramSeries] = Made(phases.labels)
        self._faults = counter("pdproxy_leg_faults_total", "Legs that failed.", ["leg", "fault"])
        self._resends = counter(
            "pdproxy_resends_total", "Requests sent again because a node closed their kept-alive connection."
        )
        self._steps = counter("pdproxy_steps_total", "What followed a failed leg.", ["leg", "fault", "step"])
        self._migrations = counter("pdproxy_migrations_total", "Streams that had to continue elsewhere.", ["outcome"])
        self._stalls = Histogram(
            "pdproxy_stream_stall_seconds",
            "Time without bytes for the client while a stream moved to another node.",
            ["move"],
            buckets=SECONDS,
            registry=registry,
        )
        self._continuable = counter(
            "pdproxy_continuable_total",
            "Requests that another node could continue, or not, and why.",
            ["answer", "reason"],
        )
        self._recomputed = counter(
            "pdproxy_recomputed_total", "Disaggregated requests whose decode node prefilled again."
        )
        self._releases = counter("pdproxy_releases_total", "Hand-overs that the proxy released.", ["outcome"])
        self._active = gauge("pdproxy_requests_active", "Prompts that run now.")
        self._queued = gauge("pdproxy_requests_queued", "Prompts that wait in the queue now.")
        self._bodies = gauge("pdproxy_body_bytes", "Bytes of request bodies that are held now.")
        self._rejected = counter("pdproxy_rejected_total", "Requests rejected before they ran.", ["reason"])
        self._operator_refusals = counter(
            "pdproxy_operator_refusals_total", "Requests that the operators' port refused.", ["reason"]
        )
        self._tasks = counter("pdproxy_task_failures_total", "Background tasks that had to be begun again.", ["task"])
        self._file_changes = counter(
            "pdproxy_file_changes_total", "Files of settings that changed while the proxy ran.", ["setting", "outcome"]
        )
        self._file_unusable = gauge(
            "pdproxy_file_unusable",
            "1 while what a file holds cannot be used, and what it held before is.",
            ["setting"],
        )
        self._spans = counter("pdproxy_spans_total", "Spans that were recorded.", ["outcome"])
        for each, words in (
            (self._migrations, Attempt), (self._stalls, Move), (self._releases, Attempt), (self._rejected, Rejection),
            (self._operator_refusals, OperatorRefusal), (self._tasks, Task), (self._spans, SpanOutcome),
        ):  # fmt: skip
            each.export_zeros(words)

    def model_served(self, name: str) -> None:
        """A node serves a model, or an adapter, by this name: its series are there from now on."""
        if self.requests.models.add(name):
            self.requests.begin_model(name)

    def leg_failed(self, leg: Leg, fault: Fault) -> None:
        """Count a leg that failed on a node."""
        self._faults.labels(leg, fault).inc()

    def resent(self) -> None:
        """Count a request that is sent to its node a second time, for the connection that was kept broke."""
        self._resends.labels().inc()

    def step_taken(self, leg: Leg, fault: Fault, step: enum.StrEnum) -> None:
        """Count what the failure table made of a fault."""
        self._steps.labels(leg, fault, step).inc()

    def migrated(self, outcome: Attempt) -> None:
        """Count the attempt to continue a stream on another node."""
        self._migrations.labels(outcome).inc()

    def stalled(self, move: Move, seconds: float) -> None:
        """Record that a stream went on at another node, and the time that it stood still."""
        self._stalls.labels(move).observe(seconds)

    def continuable(self, reason: enum.StrEnum | None) -> None:
        """Count whether a stream could be continued on another node, or the reason why not."""
        self._continuable.labels("yes" if reason is None else "no", reason or "none").inc()

    def recomputed(self) -> None:
        """Count a disaggregated request whose decode node computed the prompt itself after all."""
        self._recomputed.labels().inc()

    def released(self, outcome: Attempt) -> None:
        """Count a hand-over that the proxy released."""
        self._releases.labels(outcome).inc()

    def watch_requests(self, active: Callable[[], float], queued: Callable[[], float]) -> None:
        """Ask for the numbers of running and of waiting prompts whenever metrics are scraped."""
        self._active.labels().set_function(active)
        self._queued.labels().set_function(queued)

    def watch_bodies(self, held: Callable[[], float]) -> None:
        """Ask for the bytes of request bodies that are held whenever metrics are scraped."""
        self._bodies.labels().set_function(held)

    def rejected(self, reason: enum.StrEnum, key: str) -> None:
        """Count a request that was turned away; ``key``: the name of its API key."""
        self._rejected.labels(reason).inc()
        self.keys.rejected(key, reason)

    def operator_refused(self, reason: OperatorRefusal) -> None:
        """Count a request that the operators' port refused."""
        self._operator_refusals.labels(reason).inc()

    def task_failed(self, task: str) -> None:
        """Count a background task that ended unexpectedly."""
        self._tasks.labels(task).inc()

    def file_watched(self, setting: WatchedSetting) -> None:
        """The files of a setting were read at the start, and are looked at from now on."""
        self._file_unusable.labels(setting).set(0)
        for change in FileChange:
            self._file_changes.labels(setting, change)

    def file_changed(self, setting: WatchedSetting, outcome: FileChange) -> None:
        """The files of a setting hold something else than before, which is used or not."""
        self._file_unusable.labels(setting).set(outcome is FileChange.REFUSED)
        self._file_changes.labels(setting, outcome).inc()

    def spans(self, outcome: SpanOutcome, number: int) -> None:
        """Count what became of spans; from whichever thread sends them."""
        self._spans.labels(outcome).inc(number)
