"""The proxy's metrics, on an injected registry, by typed methods: no label string is written at a call site."""

import enum
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

from prometheus_client import CollectorRegistry

from pdproxy.errors import Fault
from pdproxy.observe.event_metrics import EventMetrics
from pdproxy.observe.families import Counter, CounterSeries, Gauge, Histogram, HistogramSeries
from pdproxy.observe.keep_metrics import KeepMetrics
from pdproxy.observe.labels import (
    Affinity,
    Attempt,
    FileChange,
    Leg,
    Move,
    OperatorRefusal,
    Phase,
    Prediction,
    Proof,
    Rejection,
    SilenceOutcome,
    SpanOutcome,
    Task,
    WatchedSetting,
)
from pdproxy.observe.request_metrics import SECONDS, KeyMetrics, Made, RequestMetrics
from pdproxy.reasons import RouteReason


class _HitSeries(NamedTuple):
    """The series of what a node of one role was taken to have cached, where that was right, or wrong in one way."""

    prompts: CounterSeries
    planned: CounterSeries
    real: CounterSeries


class Metrics:
    """Every series of the proxy. Counting never raises and never waits.

    Attributes:
        events: those of KV events and token ids.
        phases: seconds spent in each phase of a request.
        requests: those of requests as their clients see them, latency in the names of OpenTelemetry's conventions.
        keys: those of each API key.
        keeps: those of conversations that nodes keep.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.events, self.requests = EventMetrics(registry), RequestMetrics(registry)
        self.keys, self.keeps = KeyMetrics(registry), KeepMetrics(registry)
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
        self._prefill_tokens = gauge(
            "pdproxy_prefill_pending_tokens_estimate",
            "Prompt tokens, estimated, that prefill nodes still have to compute.",
            ["model"],
        )
        self._node_active = gauge("pdproxy_node_active", "Legs in flight on a node.", ["node", "role"])
        self._node_up = gauge("pdproxy_node_up", "1 for the state a node is in, else 0.", ["node", "role", "state"])
        self._needed = gauge("pdproxy_nodes_needed", "Nodes that the last hour needed, unrounded.", ["role"])
        self._cohort_nodes = gauge(
            "pdproxy_cohort_nodes", "Nodes that serve, by what they exchange tickets in.", ["cohort", "role"]
        )
        self._cohort_requests = counter(
            "pdproxy_cohort_requests_total", "Requests sent to decode nodes of a cohort.", ["cohort"]
        )
        self._hand_overs_fail = gauge(
            "pdproxy_hand_overs_failing", "1 while nodes of both roles are there and hand nothing over, else 0."
        )
        self._barred = gauge("pdproxy_pair_barred", "1 for nodes that exchange no tickets.", ["prefill", "decode"])
        self._proofs = counter("pdproxy_known_answer_tests_total", "Known-answer tests of pairs of nodes.", ["result"])
        self._circuit = counter("pdproxy_circuit_moves_total", "Moves of a node's circuit.", ["node", "to"])
        self._silences = counter(
            "pdproxy_silence_probes_total", "Probes of nodes from whose legs nothing came.", ["role", "outcome"]
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
        self._begin_at_zero()

    def _begin_at_zero(self) -> None:
        for counter, words in (
            (self._migrations, Attempt), (self._releases, Attempt), (self._tasks, Task),
            (self._proofs, Proof), (self._rejected, Rejection),
            (self._plans, RouteReason), (self._spans, SpanOutcome), (self._operator_refusals, OperatorRefusal),
        ):  # fmt: skip
            counter.export_zeros(words)
        self._stalls.export_zeros(Move)
        roles = ("prefill", "decode")
        self._sessions.export_zeros(roles, Affinity)
        self._planned_hits.export_zeros(roles)
        self._real_hits.export_zeros(roles)
        self._silences.export_zeros(roles, SilenceOutcome)
        self._predictions.export_zeros(roles, Prediction)

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

    def watch_prefill(self, model: str, tokens: Callable[[], float]) -> None:
        """Ask for the tokens that prefill nodes of a model still have to compute whenever metrics are scraped.
        ``model`` is the nodes' own, no client's word."""
        self._prefill_tokens.labels(model).set_function(tokens)

    def watch_node(self, node: str, role: enum.StrEnum, legs: Callable[[], float]) -> None:
        """Ask for the number of legs on a node whenever metrics are scraped."""
        self._node_active.labels(node, role).set_function(legs)

    def node_state(self, node: str, role: enum.StrEnum, state: enum.StrEnum) -> None:
        """Set the one state that a node is in; the other states of the same enumeration become 0."""
        for each in type(state):
            self._node_up.labels(node, role, each).set(1 if each is state else 0)

    def roles_forgotten(self, node: str, roles: Iterable[enum.StrEnum], states: type[enum.StrEnum]) -> None:
        """Drop the series of a node in roles that it has not any more: those of its states too."""
        for role in roles:
            self._node_active.remove(node, role)
            for each in states:
                self._node_up.remove(node, role, each)

    def node_forgotten(
        self, node: str, roles: Iterable[enum.StrEnum], states: type[enum.StrEnum], phases: type[enum.StrEnum]
    ) -> None:
        """Drop the series of a node that was removed: those of its states and of its circuit's phases too."""
        self.roles_forgotten(node, roles, states)
        for phase in phases:
            self._circuit.remove(node, phase)

    def nodes_needed(self, role: enum.StrEnum, nodes: float) -> None:
        """Set how many nodes of a role the last hour needed, for what went through this proxy."""
        self._needed.labels(role).set(nodes)

    def cohort_nodes(self, cohort: str, role: enum.StrEnum, nodes: int) -> None:
        """Set how many nodes of a cohort serve in a role; "" is the cohort of nodes that publish nothing."""
        self._cohort_nodes.labels(cohort, role).set(nodes)
        self._cohort_requests.labels(cohort)

    def cohort_requested(self, cohort: str) -> None:
        """Count a request that goes to a decode node of a cohort."""
        self._cohort_requests.labels(cohort).inc()

    def cohort_forgotten(self, cohort: str, roles: type[enum.StrEnum]) -> None:
        """Drop the series of a cohort whose last node has left; where there are none, nothing happens."""
        for role in roles:
            self._cohort_nodes.remove(cohort, role)
        self._cohort_requests.remove(cohort)

    def watch_hand_overs(self, fail: Callable[[], bool]) -> None:
        """Ask at each scrape whether nothing is handed over."""
        self._hand_overs_fail.labels().set_function(fail)

    def pair_barred(self, prefill: str, decode: str) -> None:
        """Two nodes exchange no tickets: they failed the known-answer test, or their tickets were of no use."""
        self._barred.labels(prefill, decode).set(1)

    def pair_allowed(self, prefill: str, decode: str) -> None:
        """They may again, or one of them has left: the series goes."""
        self._barred.remove(prefill, decode)

    def proof_ended(self, result: Proof) -> None:
        """Count a known-answer test."""
        self._proofs.labels(result).inc()

    def circuit_moved(self, node: str, to: enum.StrEnum) -> None:
        """Count a move of a node's circuit."""
        self._circuit.labels(node, to).inc()

    def silence_probed(self, role: enum.StrEnum, outcome: SilenceOutcome) -> None:
        """Count a probe of a node from whose legs nothing came."""
        self._silences.labels(role, outcome).inc()

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
