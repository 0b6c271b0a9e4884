"""From a counter to the metrics page: counters -> stats -> msgpack -> merged -> Prometheus."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

pytest.importorskip("vllm")

from connector.config import ENDPOINT_PLUGIN, PLUGINS, SECRET_VARIABLE, ConnectorConfig, Role
from connector.counters import COUNTERS, Counters, ReadOutcome
from connector.nixl_connector import node_info
from connector.stats import ConnectorPromMetrics, ConnectorStats, drained


def filled(**tokens: int) -> ConnectorStats:
    counters = Counters()
    counters.prompt_tokens(**tokens)
    stats = ConnectorStats()
    stats.drain_from(counters)
    return stats


def prometheus(registry: CollectorRegistry, info: dict[str, str]) -> ConnectorPromMetrics:
    types: dict[Any, Any] = {kind: partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)}
    config: Any = SimpleNamespace(kv_transfer_config=None)
    return ConnectorPromMetrics(config, types, ["model_name", "engine"], {0: ["m", "0"], 1: ["m", "1"]}, info)


def test_ours_alone_count_as_something_to_report() -> None:
    assert ConnectorStats().is_empty()
    assert not filled(hit=1).is_empty()
    assert drained(Counters()) is None


def test_stats_are_new_after_they_were_handed_over() -> None:
    stats = filled(hit=1)
    handed = stats.clone_and_reset()
    assert stats.is_empty()
    assert not handed.is_empty()


def test_both_sides_merge_and_reduce_to_one_number_a_series() -> None:
    merged = filled(hit=3, pulled=2).aggregate(filled(hit=4))
    reduced = merged.reduce()
    assert reduced["prompt_tokens/hit"] == 7
    assert reduced["prompt_tokens/pulled"] == 2
    assert reduced["Num failed transfers"] == 0


def test_numbers_arrive_at_the_metrics_page_of_the_right_engine() -> None:
    registry = CollectorRegistry()
    metrics = prometheus(registry, {"role": "kv_consumer"})
    counters = Counters()
    counters.prompt_tokens(hit=5)
    counters.blocks("state", pulled=3)
    counters.ticket_unused()
    counters.verify_seconds(0.002)
    stats = drained(counters)
    assert stats is not None
    wire = msgspec.msgpack.decode(msgspec.msgpack.encode(stats.to_dict()))
    metrics.observe(wire, engine_idx=1)
    labels = {"model_name": "m", "engine": "1"}
    value = registry.get_sample_value
    assert value("pdproxy_connector_prompt_tokens_total", {**labels, "source": "hit"}) == 5
    assert value("pdproxy_connector_blocks_total", {**labels, "group": "state", "kind": "pulled"}) == 3
    assert value("pdproxy_connector_unused_tickets_total", labels) == 1
    assert value("pdproxy_connector_verify_seconds_count", labels) == 1
    assert value("pdproxy_connector_info", {**labels, "role": "kv_consumer"}) == 1


def test_a_fingerprint_is_one_series_a_part() -> None:
    counters, registry = Counters(), CollectorRegistry()
    counters.fingerprint({"dtype": "bfloat16", "all": "0123456789abcdef"})
    stats = drained(counters)
    assert stats is not None
    prometheus(registry, {}).observe(msgspec.msgpack.decode(msgspec.msgpack.encode(stats.to_dict())))
    for part, value in (("dtype", "bfloat16"), ("all", "0123456789abcdef")):
        labels = {"model_name": "m", "engine": "0", "part": part, "value": value}
        assert registry.get_sample_value("pdproxy_connector_fingerprint", labels) == 1
    assert drained(counters) is None


def test_every_counter_stands_at_zero_before_anything_happens() -> None:
    registry = CollectorRegistry()
    prometheus(registry, {})
    for engine in ("0", "1"):
        labels = {"model_name": "m", "engine": engine}
        value = registry.get_sample_value
        assert value("pdproxy_connector_refused_total", {**labels, "reason": "digest"}) == 0
        assert value("pdproxy_connector_leases_ended_total", {**labels, "how": "expired"}) == 0
        assert value("pdproxy_connector_reads_total", {**labels, "outcome": "not_held"}) == 0
        assert value("pdproxy_connector_unused_tickets_total", labels) == 0


def test_whatever_is_counted_was_there_from_the_start() -> None:
    for labels in COUNTERS.values():
        assert all(labels.values())
    assert set(COUNTERS["reads"]["outcome"]) == {*ReadOutcome}


def test_stock_stats_without_our_keys_are_observed_too() -> None:
    registry = CollectorRegistry()
    stats = ConnectorStats()
    stats.record_failed_transfer()
    data = {key: value for key, value in stats.data.items() if not key.startswith("pdproxy")}
    prometheus(registry, {}).observe(data)
    assert b'vllm:nixl_num_failed_transfers_total{engine="0",model_name="m"} 1.0' in generate_latest(registry)


def engine_config(**more: Any) -> Any:
    return SimpleNamespace(
        cache_config=SimpleNamespace(
            block_size=256,
            mamba_block_size=256,
            mamba_cache_mode="align",
            enable_prefix_caching=True,
            cache_dtype="auto",
        ),
        kv_transfer_config=SimpleNamespace(kv_role="kv_producer", kv_load_failure_policy="recompute"),
        model_config=SimpleNamespace(model="tiny", dtype="torch.bfloat16"),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=8192, max_num_seqs=256),
        **more,
    )


def test_the_info_has_what_a_preflight_compares() -> None:
    config = engine_config(use_v2_model_runner=True, parallel_config=parallel("auto"))
    info = node_info(config, ConnectorConfig(Role.PREFILL, (b"k" * 16,)), {})
    assert info["role"] == "kv_producer"
    assert (info["model"], info["dtype"], info["tp_size"], info["lease_seconds"]) == ("tiny", "bfloat16", "2", "30")
    assert (info["prefix_caching"], info["signed"]) == ("true", "true")
    assert (info["max_num_batched_tokens"], info["max_num_seqs"]) == ("8192", "256")
    assert info["resume"] == "false"
    assert all(info.values())


def parallel(worker: str) -> Any:
    return SimpleNamespace(tensor_parallel_size=2, worker_cls=worker)


GOOD = {PLUGINS: f"pdproxy_connector,{ENDPOINT_PLUGIN}", SECRET_VARIABLE: "s" * 64}


@pytest.mark.parametrize(
    ("role", "environ", "v2", "worker", "resumes"),
    [
        (Role.DECODE, GOOD, True, "vllm.v1.worker.gpu_worker.Worker", "true"),
        (Role.BOTH, GOOD, False, "pdproxy_connector.cpu_worker.SeededCPUWorker", "true"),
        (Role.PREFILL, GOOD, True, "vllm.v1.worker.gpu_worker.Worker", "true"),
        (Role.DECODE, GOOD, False, "vllm.v1.worker.gpu_worker.Worker", "false"),
        (Role.DECODE, GOOD, False, "vllm.v1.worker.cpu_worker.CPUWorker", "false"),
        (Role.DECODE, GOOD | {PLUGINS: "pdproxy_connector"}, True, "vllm.v1.worker.gpu_worker.Worker", "false"),
        (Role.DECODE, {PLUGINS: ENDPOINT_PLUGIN}, True, "vllm.v1.worker.gpu_worker.Worker", "false"),
    ],
)
def test_the_info_says_where_streams_can_go_on(
    role: Role, environ: dict[str, str], v2: bool, worker: str, resumes: str
) -> None:
    config = engine_config(use_v2_model_runner=v2, parallel_config=parallel(worker))
    assert node_info(config, ConnectorConfig(role), environ)["resume"] == resumes
