"""The metrics and their names."""

import enum

import pytest
from prometheus_client import CollectorRegistry

from pdproxy.errors import Fault
from pdproxy.nodes.node import Role
from pdproxy.observe.labels import (
    Attempt,
    Leg,
    Outcome,
    Phase,
    Proof,
    Rejection,
    SilenceOutcome,
    Task,
)
from pdproxy.observe.metrics import Metrics
from pdproxy.observe.request_metrics import MOST_MODELS, SECONDS, TOKEN_SECONDS
from pdproxy.request import Endpoint
from pdproxy.usage import Usage


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
    metrics.model_served("m")
    metrics.requests.alike(Endpoint.CHAT, "m", stream=False).ended[Outcome.OK].inc()
    metrics.requests.alike(None, "unheard of", stream=False).ended[Outcome.FAILED].inc()
    metrics.phases[Phase.PREFILL].observe(0.5)
    metrics.leg_failed(Leg.PREFILL, Fault.STALL)
    metrics.step_taken(Leg.DECODE, Fault.RESET, Word.ONE)
    metrics.plans.planned_local(Word.TWO)
    metrics.migrated(Attempt.SUCCEEDED)
    metrics.continuable(Word.ONE)
    metrics.recomputed()
    metrics.released(Attempt.FAILED)
    active = [1.0]
    metrics.watch_requests(lambda: active[0], lambda: 3)
    metrics.watch_bodies(lambda: 700)
    metrics.rejected(Word.ONE, "k")
    alike, key = metrics.requests.alike(Endpoint.CHAT, "m", stream=True), metrics.keys.series("k")
    alike.add_tokens(Usage(None, None, 512), key)
    metrics.nodes.watch_prefill("idle", lambda: 0)
    metrics.nodes.watch_prefill("m", lambda: 300)
    metrics.nodes.watch_node("n", Word.ONE, lambda: 2)
    metrics.nodes.circuit_moved("n", Word.TWO)
    metrics.task_failed(Task.HEALTH)
    metrics.nodes.silence_probed(Role.DECODE, SilenceOutcome.GIVEN_UP)
    metrics.nodes.pair_barred("p", "n")
    metrics.nodes.pair_barred("p", "other")
    metrics.nodes.pair_allowed("p", "other")
    metrics.nodes.proof_ended(Proof.FAILED)
    expected: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {
        ("pdproxy_requests_total", (("endpoint", "/v1/chat/completions"), ("model", "m"), ("outcome", "ok"))): 1,
        ("pdproxy_requests_total", (("endpoint", "other"), ("model", "other"), ("outcome", "failed"))): 1,
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
        ("pdproxy_requests_active", ()): 1,
        ("pdproxy_requests_queued", ()): 3,
        ("pdproxy_body_bytes", ()): 700,
        ("pdproxy_rejected_total", (("reason", "one"),)): 1,
        ("pdproxy_tokens_total", (("kind", "cached"), ("model", "m"))): 512,
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
    metrics.model_served("m")
    for model, endpoint, outcome in (("other", "other", "failed"), ("m", "/v1/messages", "ok")):
        labels = {"endpoint": endpoint, "model": model, "outcome": outcome}
        assert registry.get_sample_value("pdproxy_requests_total", labels) == 0
        assert registry.get_sample_value("pdproxy_tokens_total", {"kind": "cached", "model": model}) == 0
    for name, label, word in (
        ("task_failures", "task", Task.DISCOVERY),
        ("releases", "outcome", Attempt.FAILED),
        ("migrations", "outcome", Attempt.FAILED),
        ("rejected", "reason", Rejection.QUEUE_FULL),
    ):
        assert registry.get_sample_value(f"pdproxy_{name}_total", {label: word}) == 0


def test_a_node_is_in_one_state_until_it_is_forgotten(metrics: Metrics, registry: CollectorRegistry) -> None:
    def states() -> dict[Word, float | None]:
        return {
            word: registry.get_sample_value("pdproxy_node_up", {"node": "n", "role": "one", "state": word})
            for word in Word
        }

    metrics.nodes.node_state("n", Word.ONE, Word.ONE)
    metrics.nodes.node_state("n", Word.ONE, Word.TWO)
    assert states() == {Word.ONE: 0, Word.TWO: 1}
    metrics.nodes.circuit_moved("n", Word.TWO)
    metrics.nodes.node_forgotten("n", (Word.ONE,), Word, Word)
    metrics.nodes.node_forgotten("n", (Word.ONE,), Word, Word)
    assert states() == {Word.ONE: None, Word.TWO: None}
    assert registry.get_sample_value("pdproxy_circuit_moves_total", {"node": "n", "to": "two"}) is None


def test_a_node_that_comes_back_is_counted_anew(metrics: Metrics, registry: CollectorRegistry) -> None:
    def active() -> float | None:
        return registry.get_sample_value("pdproxy_node_active", {"node": "n", "role": "one"})

    metrics.nodes.watch_node("n", Word.ONE, lambda: 3)
    metrics.nodes.node_forgotten("n", (Word.ONE,), Word, Word)
    assert active() is None
    metrics.nodes.watch_node("n", Word.ONE, lambda: 1)
    assert active() == 1


def test_tokens_never_count_backwards(metrics: Metrics, registry: CollectorRegistry) -> None:
    alike = metrics.requests.alike(Endpoint.CHAT, "m", stream=True)
    alike.add_tokens(Usage(-5, -1, None), metrics.keys.series("k"))
    assert registry.get_sample_value("pdproxy_tokens_total", {"kind": "prompt", "model": "other"}) == 0


def test_clients_make_no_label_values_and_nodes_not_too_many(metrics: Metrics, registry: CollectorRegistry) -> None:
    for number in range(MOST_MODELS + 5):
        metrics.model_served(f"adapter-{number}")
    metrics.model_served("")
    for model in ("adapter-0", f"adapter-{MOST_MODELS}", "a client's word", ""):
        metrics.requests.alike(Endpoint.CHAT, model, stream=False).ended[Outcome.OK].inc()
    families = list(registry.restricted_registry(["pdproxy_requests_total"]).collect())
    counted = {sample.labels["model"]: sample.value for family in families for sample in family.samples if sample.value}
    assert counted == {"adapter-0": 1, "other": 3}
    assert len({sample.labels["model"] for family in families for sample in family.samples}) == MOST_MODELS + 1


def test_latency_is_kept_by_endpoint_model_streaming_and_error(metrics: Metrics, registry: CollectorRegistry) -> None:
    def value(name: str, **more: str) -> float | None:
        return registry.get_sample_value(f"gen_ai_server_{name}", {**labels, **more})

    labels = {
        "gen_ai_operation_name": "chat",
        "gen_ai_provider_name": "vllm",
        "gen_ai_request_model": "m",
        "gen_ai_request_stream": "true",
        "endpoint": "/v1/messages",
    }
    metrics.model_served("m")
    series = metrics.requests.alike(Endpoint.MESSAGES, "m", stream=True)
    series.first_token.observe(0.3)
    series.streamed(11, 0.22)
    series.streamed(1, 0.0)
    series.seconds[Outcome.OK].observe(3000)
    series.seconds[Outcome.FAILED].observe(2)
    assert (value("time_to_first_token_seconds_sum"), value("time_to_first_token_seconds_count")) == (0.3, 1)
    assert value("time_to_first_token_seconds_bucket", le="0.35") == 1
    assert value("time_per_output_token_seconds_sum") == pytest.approx(0.022)
    assert value("time_per_output_token_seconds_count") == 1
    assert value("request_duration_seconds_bucket", le="1800.0", error_type="") == 0
    assert value("request_duration_seconds_bucket", le="3600.0", error_type="") == 1
    assert value("request_duration_seconds_sum", error_type="failed") == 2


CONVENTIONAL = {
    "time_to_first_token": (
        SECONDS,
        (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10),
    ),
    "time_per_output_token": (TOKEN_SECONDS, (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)),
}


@pytest.mark.parametrize("name", CONVENTIONAL)
def test_the_conventions_bounds_are_among_ours(name: str) -> None:
    ours, theirs = CONVENTIONAL[name]
    assert set(theirs) <= set(ours)
    assert list(ours) == sorted(set(ours))
