"""Usage of each API key, in the metrics."""

from prometheus_client import CollectorRegistry

from pdproxy.observe.labels import Outcome, Rejection, Tokens
from pdproxy.observe.request_metrics import IN_USAGE, MOST_KEYS, OTHER_KEYS, KeyMetrics


def test_a_known_key_begins_at_zero_and_is_asked_what_it_runs() -> None:
    registry = CollectorRegistry()
    metrics = KeyMetrics(registry)
    metrics.series("alice")
    assert registry.get_sample_value("pdproxy_key_requests_total", {"key": "alice", "outcome": "failed"}) == 0
    assert registry.get_sample_value("pdproxy_key_rejected_total", {"key": "alice", "reason": "input_rate"}) == 0
    metrics.watch_queue(len, lambda key: 2)
    assert registry.get_sample_value("pdproxy_key_requests_active", {"key": "alice"}) == 5
    assert registry.get_sample_value("pdproxy_key_requests_queued", {"key": "alice"}) == 2


def test_names_beyond_the_most_are_counted_together() -> None:
    registry = CollectorRegistry()
    metrics = KeyMetrics(registry)
    for number in range(MOST_KEYS + 5):
        metrics.series(f"k{number}").tokens[IN_USAGE.index(Tokens.PROMPT)].inc(10)
    metrics.rejected(f"k{MOST_KEYS}", Rejection.QUEUE_FULL)
    metrics.series(f"k{MOST_KEYS}").ended[Outcome.OK].inc()
    metrics.waited(f"k{MOST_KEYS}", 1.5)
    first, others = {"key": "k0", "kind": "prompt"}, {"key": OTHER_KEYS, "kind": "prompt"}
    assert registry.get_sample_value("pdproxy_key_tokens_total", first) == 10
    assert registry.get_sample_value("pdproxy_key_tokens_total", others) == 50
    assert registry.get_sample_value("pdproxy_key_queue_seconds_total", {"key": OTHER_KEYS}) == 1.5
    assert registry.get_sample_value("pdproxy_key_requests_total", {"key": f"k{MOST_KEYS}", "outcome": "ok"}) is None
