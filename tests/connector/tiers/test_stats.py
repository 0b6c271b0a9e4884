"""Statistics by child, through vLLM's own pipeline: worker and scheduler, a dict on a wire, Prometheus."""

import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging

from connector.stats import COUNTS, LEVELS, ConnectorStats
from connector.tiers import WeightedMultiConnector
from connector.tiers.stats import (
    PENDING,
    SELECTION,
    SELECTION_COUNTERS,
    ChildrenStats,
    SelectionSnapshot,
    SelectionStats,
)
from pdproxy.nodes.node import Binding, Capacity
from pdproxy.nodes.node_info import read_labels, read_node_capacity
from tests.connector.harness import BLOCK, make_node, prompt, take_ticket
from tests.connector.tiers.harness import loaded, make_several, multi_config, pull, shelve, tier

pytestmark = pytest.mark.usefixtures("every_pace")

TOKENS = prompt(10 * BLOCK + 5)
NIXL = ("NixlConnector", "connector.nixl_connector")
DOCUMENTED = Path(__file__).parents[3] / "docs" / "tiers.md"


def wire(payload: Mapping[str, Any]) -> dict[str, Any]:
    """The stats as they arrive in the API server's process."""
    return dict(msgspec.msgpack.decode(msgspec.msgpack.encode(payload)))


class Page:
    """The API server's side, on a registry of its own."""

    def __init__(self, config: Any) -> None:
        self.registry = CollectorRegistry()
        kinds = {kind: functools.partial(kind, registry=self.registry) for kind in (Counter, Gauge, Histogram)}
        self.metrics = WeightedMultiConnector.build_prom_metrics(config, kinds, ["engine"], {0: ["0"]})

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"pdproxy_connector_{name}", {"engine": "0", **labels})


def two_of_a_kind() -> ChildrenStats:
    """Two children of one class, and a choice, as they come together in the scheduler's process."""
    found = ChildrenStats()
    for name, number in (("near", 2), ("far", 5)):
        stats = ConnectorStats()
        stats.data[COUNTS].append(["reads", ["not_held"], number])
        found.add(name, NIXL, stats)
    counts = [("child_wins", "near", 3), ("child_tokens_won", "near", 96)]
    found.add(SELECTION, (SELECTION, None), SelectionStats.of(SelectionSnapshot(counts, {"near": 1, "far": 0})))
    return found


def test_children_of_one_class_keep_their_own_series(tmp_path: Path) -> None:
    """The page is of two tiers and NIXL; series of the class itself come once, and apart by child."""
    page = Page(multi_config([pull("near"), tier(tmp_path)]))
    stats = ConnectorStats()
    stats.data[COUNTS].append(["reads", ["not_held"], 2])
    found = ChildrenStats()
    found.add("near", NIXL, stats)
    page.metrics.observe(wire(found.to_dict()), 0)
    assert page.value("reads_total", child="near", outcome="not_held") == 2


def test_two_children_of_one_class_can_be_registered() -> None:
    """vLLM would register the names of the second again, which Prometheus refuses, or leave them out."""
    twice = multi_config([pull("near"), pull("far")])
    page = Page(twice)
    page.metrics.observe(wire(two_of_a_kind().to_dict()), 0)
    assert page.value("reads_total", child="near", outcome="not_held") == 2
    assert page.value("reads_total", child="far", outcome="not_held") == 5
    assert page.value("child_wins_total", child="near") == 3
    assert page.value("child_wins_total", child="far") == 0
    assert page.value("child_pending_loads", child="near") == 1


def test_every_series_begins_with_zero(tmp_path: Path) -> None:
    page = Page(multi_config([pull(), tier(tmp_path)]))
    for child in ("pull", "disk"):
        assert page.value("child_pending_loads", child=child) == 0
        assert [page.value(f"{name}_total", child=child) for name in SELECTION_COUNTERS] == [0] * len(
            SELECTION_COUNTERS
        )


def test_ranks_and_the_scheduler_come_together() -> None:
    """vLLM merges by type, child by child, in whichever order."""
    merged = two_of_a_kind()
    merged.aggregate(two_of_a_kind())
    scheduler = ChildrenStats()
    later = SelectionStats.of(SelectionSnapshot([("child_wins", "far", 1)], {"near": 0}))
    scheduler.add(SELECTION, (SELECTION, None), later)
    merged.aggregate(scheduler)
    payload = wire(merged.to_dict())
    assert payload["near"]["stats"][COUNTS] == [["reads", ["not_held"], 2]] * 2
    assert {child: number for _, [child], number in payload[SELECTION]["stats"][LEVELS]} == {"near": 0, "far": 0}
    assert ["child_wins", ["far"], 1] in payload[SELECTION]["stats"][COUNTS]


def test_the_log_line_has_them_by_child(tmp_path: Path) -> None:
    logging = KVConnectorLogging(multi_config([pull("near"), pull("far")]).kv_transfer_config)
    logging.observe(wire(two_of_a_kind().to_dict()))
    logging.observe(wire(two_of_a_kind().to_dict()))
    lines: list[Any] = []
    logging.log(lambda *parts: lines.append(parts))
    assert "'reads/not_held': 10" in lines[0][1]
    assert "'child_tokens_won/near': 192" in lines[0][1]
    assert "*selection*={'child_wins/near': 6, 'child_tokens_won/near': 192}" in lines[0][1]


def test_stats_of_nothing_are_empty() -> None:
    assert ChildrenStats().is_empty()
    assert WeightedMultiConnector.build_kv_connector_stats().is_empty()
    selection = SelectionStats.of(SelectionSnapshot([("child_wins", "near", 1)], {}))
    assert not selection.is_empty()
    selection.reset()
    assert selection.is_empty()


@pytest.fixture
def page(tmp_path: Path) -> Page:
    return Page(multi_config([pull(), tier(tmp_path)]))


def test_what_the_engine_counts_arrives_at_the_page(tmp_path: Path, page: Page) -> None:
    """From vLLM's real scheduler to the exposition, over a load that fails and a ticket that wins."""
    prefill = make_node("kv_producer", engine_id="engine-p")
    node = make_several([pull(), tier(tmp_path)])
    shelve(tmp_path, TOKENS, 4)
    node.add("plain", TOKENS)
    node.step()
    node.add("ticket", TOKENS, take_ticket(prefill, TOKENS))
    node.step(loaded("plain", failed=["plain"]))
    node.step(node.pulled("ticket"))
    node.run_out("plain")
    for payload in node.payloads:
        page.metrics.observe(wire(payload), 0)
    for child in ("pull", "disk"):
        asked, won, lost, missed = (
            page.value(f"child_{name}_total", child=child) for name in ("queries", "wins", "losses", "misses")
        )
        assert asked == (won or 0) + (lost or 0) + (missed or 0) > 0
        assert page.value("child_pending_loads", child=child) == 0
    assert page.value("child_tokens_won_total", child="disk") == 4 * BLOCK
    assert page.value("child_failed_loads_total", child="disk") == 1
    assert page.value("child_tokens_won_total", child="pull") == len(TOKENS) - 1
    assert page.value("prompt_tokens_total", child="pull", source="pulled") == len(TOKENS) - 1
    assert b"-1" not in generate_latest(page.registry)


def test_a_proxy_reads_a_node_s_figures_through_the_children(tmp_path: Path, page: Page) -> None:
    """Their series carry one label more than those of a node with one connector."""
    node = make_several([pull(), tier(tmp_path)], num_blocks=1001)
    node.step()
    for payload in node.payloads:
        page.metrics.observe(wire(payload), 0)
    body = generate_latest(page.registry)
    assert read_labels(body).items() >= {"role": "kv_consumer", "child": "pull", "failure_policy": "recompute"}.items()
    assert read_node_capacity(body) == Capacity(1000 * BLOCK, 1000, 3, Binding.ATTENTION)


def test_every_series_is_documented() -> None:
    rows = dict(re.findall(r"^\| `pdproxy_connector_(\w+)` \| (\w+) \|", DOCUMENTED.read_text(), re.MULTILINE))
    assert rows == {f"{name}_total": "counter" for name in SELECTION_COUNTERS} | {PENDING: "gauge"}
