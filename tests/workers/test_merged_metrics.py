"""Metrics of several workers as one proxy's."""

from functools import partial

from prometheus_client import CollectorRegistry, generate_latest

from pdproxy.nodes.node import Role, State
from pdproxy.observe.labels import Outcome, Phase
from pdproxy.observe.metrics import Metrics
from pdproxy.request import Endpoint
from pdproxy.workers.merged_metrics import LARGEST, SMALLEST, SUMMED, MergedMetrics


class FakeWorker:
    """Metrics as a worker has them."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.metrics = Metrics(self.registry)

    def requests(self, number: int) -> None:
        for _ in range(number):
            self.metrics.request_ended(Endpoint.CHAT, "m", Outcome.OK)

    @property
    def text(self) -> str:
        return generate_latest(self.registry).decode()


def shown(merged: MergedMetrics) -> list[str]:
    return generate_latest(merged).decode().splitlines()


def total(number: float) -> str:
    return f'pdproxy_requests_total{{endpoint="/v1/chat/completions",model="other",outcome="ok"}} {number:.1f}'


def test_counters_and_histograms_are_summed() -> None:
    left, right, merged = FakeWorker(), FakeWorker(), MergedMetrics(CollectorRegistry())
    left.requests(2)
    right.requests(3)
    left.metrics.phase_took(Phase.TOTAL, 0.2)
    right.metrics.phase_took(Phase.TOTAL, 2)
    merged.update(0, left.text)
    merged.update(1, right.text)
    lines = shown(merged)
    assert total(5) in lines
    assert "# TYPE pdproxy_requests_total counter" in lines
    assert 'pdproxy_phase_seconds_bucket{le="0.25",phase="total"} 1.0' in lines
    assert 'pdproxy_phase_seconds_bucket{le="+Inf",phase="total"} 2.0' in lines
    assert 'pdproxy_phase_seconds_sum{phase="total"} 2.2' in lines


def test_gauges_are_merged_by_what_they_mean() -> None:
    left, right, merged = FakeWorker(), FakeWorker(), MergedMetrics(CollectorRegistry())
    for worker, legs, state in ((left, 2, State.UP), (right, 3, State.DOWN)):
        worker.metrics.watch_node("d", Role.DECODE, partial(float, legs))
        worker.metrics.node_state("d", Role.DECODE, state)
        worker.metrics.node_state("p", Role.PREFILL, State.UP)
        worker.metrics.watch_requests(lambda: 4, lambda: 1)
    merged.update(0, left.text)
    merged.update(1, right.text)
    lines = shown(merged)
    assert 'pdproxy_node_active{node="d",role="decode"} 5.0' in lines
    assert "pdproxy_requests_active 8.0" in lines
    assert 'pdproxy_node_up{node="p",role="prefill",state="up"} 1.0' in lines
    for state in (State.UP, State.DOWN):
        assert f'pdproxy_node_up{{node="d",role="decode",state="{state}"}} 1.0' in lines


def test_what_a_worker_counted_stays_when_it_ends_and_what_it_measured_goes() -> None:
    left, right, merged = FakeWorker(), FakeWorker(), MergedMetrics(CollectorRegistry())
    left.requests(2)
    left.metrics.watch_node("d", Role.DECODE, lambda: 2)
    right.requests(3)
    right.metrics.watch_node("d", Role.DECODE, lambda: 1)
    merged.update(0, left.text)
    merged.update(1, right.text)
    merged.retire(0)
    assert total(5) in shown(merged)
    assert 'pdproxy_node_active{node="d",role="decode"} 1.0' in shown(merged)
    again = FakeWorker()
    again.requests(1)
    merged.update(0, again.text)
    assert total(6) in shown(merged)


def test_how_each_gauge_is_merged_was_decided() -> None:
    """A new gauge: add it to one of the three sets of merged_metrics.py, and to docs/metrics.md."""
    gauges = {family.name for family in FakeWorker().registry.collect() if family.type == "gauge"}
    assert gauges <= SUMMED | LARGEST | SMALLEST
    assert len(SUMMED) + len(LARGEST) + len(SMALLEST) == len(SUMMED | LARGEST | SMALLEST)
