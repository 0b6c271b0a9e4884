"""The metrics and their names."""

import enum

import pytest
from prometheus_client import CollectorRegistry

from pdproxy.errors import Fault
from pdproxy.nodes.node import Role
from pdproxy.observe.labels import (
    Attempt,
    Delivery,
    Leg,
    Outcome,
    Phase,
    Proof,
    Rejection,
    SilenceOutcome,
    Task,
    Tokens,
)
from pdproxy.observe.metrics import Metrics
from pdproxy.request import Endpoint


class Word(enum.StrEnum):
    ONE = "one"
    TWO = "two"


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def metrics(registry: CollectorRegistry) -> Metrics:
    return Metrics(registry)


def test_everything_is_counted_under_its_name(metrics: Metrics, registry: CollectorRegistry) -> None:
    metrics.request_ended(Endpoint.CHAT, Outcome.OK)
    metrics.request_ended(None, Outcome.FAILED)
    metrics.phase_took(Phase.PREFILL, 0.5)
    metrics.leg_failed(Leg.PREFILL, Fault.STALL)
    metrics.step_taken(Leg.DECODE, Fault.RESET, Word.ONE)
    metrics.planned_local(Word.TWO)
    metrics.migrated(Attempt.SUCCEEDED)
    metrics.continuable(Word.ONE)
    metrics.recomputed()
    metrics.released(Attempt.FAILED)
    metrics.delivered(Delivery.TICKET)
    active = [1.0]
    metrics.watch_requests(lambda: active[0], lambda: 3)
    metrics.watch_bodies(lambda: 700)
    metrics.rejected(Word.ONE, "k")
    metrics.tokens(Tokens.CACHED, 512)
    metrics.prefill_expected("idle")
    metrics.prefill_began("m", 700)
    metrics.prefill_began("m", 300)
    metrics.prefill_ended("m", 700)
    metrics.node_active("n", Word.ONE, 2)
    metrics.circuit_moved("n", Word.TWO)
    metrics.task_failed(Task.HEALTH)
    metrics.silence_probed(Role.DECODE, SilenceOutcome.GIVEN_UP)
    metrics.pair_barred("p", "n")
    metrics.pair_barred("p", "other")
    metrics.pair_allowed("p", "other")
    metrics.proof_ended(Proof.FAILED)
    expected: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {
        ("pdproxy_requests_total", (("endpoint", "/v1/chat/completions"), ("outcome", "ok"))): 1,
        ("pdproxy_requests_total", (("endpoint", "other"), ("outcome", "failed"))): 1,
        ("pdproxy_phase_seconds_sum", (("phase", "prefill"),)): 0.5,
        ("pdproxy_leg_faults_total", (("leg", "prefill"), ("fault", "stall"))): 1,
        ("pdproxy_steps_total", (("leg", "decode"), ("fault", "reset"), ("step", "one"))): 1,
        ("pdproxy_local_total", (("reason", "two"),)): 1,
        ("pdproxy_migrations_total", (("outcome", "done"),)): 1,
        ("pdproxy_continuable_total", (("answer", "no"), ("reason", "one"))): 1,
        ("pdproxy_recomputed_total", ()): 1,
        ("pdproxy_pair_barred", (("prefill", "p"), ("decode", "n"))): 1,
        ("pdproxy_known_answer_tests_total", (("result", "failed"),)): 1,
        ("pdproxy_known_answer_tests_total", (("result", "passed"),)): 0,
        ("pdproxy_releases_total", (("outcome", "failed"),)): 1,
        ("pdproxy_deliveries_total", (("outcome", "ticket"),)): 1,
        ("pdproxy_deliveries_total", (("outcome", "failed"),)): 0,
        ("pdproxy_requests_active", ()): 1,
        ("pdproxy_requests_queued", ()): 3,
        ("pdproxy_body_bytes", ()): 700,
        ("pdproxy_rejected_total", (("reason", "one"),)): 1,
        ("pdproxy_tokens_total", (("kind", "cached"),)): 512,
        ("pdproxy_prefill_pending_tokens_estimate", (("model", "idle"),)): 0,
        ("pdproxy_prefill_pending_tokens_estimate", (("model", "m"),)): 300,
        ("pdproxy_node_active", (("node", "n"), ("role", "one"))): 2,
        ("pdproxy_circuit_moves_total", (("node", "n"), ("to", "two"))): 1,
        ("pdproxy_task_failures_total", (("task", "health"),)): 1,
        ("pdproxy_silence_probes_total", (("role", "decode"), ("outcome", "given_up"))): 1,
        ("pdproxy_silence_probes_total", (("role", "prefill"), ("outcome", "given_up"))): 0,
    }
    for (name, labels), value in expected.items():
        assert registry.get_sample_value(name, dict(labels)) == value, name
    active[0] = 0
    assert registry.get_sample_value("pdproxy_requests_active") == 0


def test_series_that_alerts_use_exist_from_the_start(metrics: Metrics, registry: CollectorRegistry) -> None:
    assert registry.get_sample_value("pdproxy_requests_total", {"endpoint": "other", "outcome": "failed"}) == 0
    assert registry.get_sample_value("pdproxy_requests_total", {"endpoint": "/v1/messages", "outcome": "ok"}) == 0
    for name, label, word in (
        ("task_failures", "task", Task.DISCOVERY),
        ("releases", "outcome", Attempt.FAILED),
        ("migrations", "outcome", Attempt.FAILED),
        ("tokens", "kind", Tokens.CACHED),
        ("rejected", "reason", Rejection.QUEUE_FULL),
    ):
        assert registry.get_sample_value(f"pdproxy_{name}_total", {label: word}) == 0


def test_a_node_is_in_one_state_until_it_is_forgotten(metrics: Metrics, registry: CollectorRegistry) -> None:
    def states() -> dict[Word, float | None]:
        return {
            word: registry.get_sample_value("pdproxy_node_up", {"node": "n", "role": "one", "state": word})
            for word in Word
        }

    metrics.node_state("n", Word.ONE, Word.ONE)
    metrics.node_state("n", Word.ONE, Word.TWO)
    assert states() == {Word.ONE: 0, Word.TWO: 1}
    metrics.circuit_moved("n", Word.TWO)
    metrics.node_forgotten("n", Word.ONE, Word, Word)
    metrics.node_forgotten("n", Word.ONE, Word, Word)
    assert states() == {Word.ONE: None, Word.TWO: None}
    assert registry.get_sample_value("pdproxy_circuit_moves_total", {"node": "n", "to": "two"}) is None


def test_a_node_that_comes_back_is_counted_anew(metrics: Metrics, registry: CollectorRegistry) -> None:
    def active() -> float | None:
        return registry.get_sample_value("pdproxy_node_active", {"node": "n", "role": "one"})

    metrics.node_active("n", Word.ONE, 3)
    metrics.node_forgotten("n", Word.ONE, Word, Word)
    assert active() is None
    metrics.node_active("n", Word.ONE, 1)
    assert active() == 1


def test_tokens_never_count_backwards(metrics: Metrics, registry: CollectorRegistry) -> None:
    metrics.tokens(Tokens.PROMPT, -5)
    assert registry.get_sample_value("pdproxy_tokens_total", {"kind": "prompt"}) == 0
