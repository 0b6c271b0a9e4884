"""Reports of several ranks become one, and the worst outcome counts."""

import pickle

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlConnectorMetadata

from connector.counters import ReadOutcome
from connector.metadata import ConnectorMetadata, ReadEnd, ReadOrder, WorkerReport


def test_counts_add_up_over_ranks() -> None:
    one = WorkerReport(reads_seen={"r": {"a": 1}}, stalled={"s": 1}, drained={"d": 1})
    other = WorkerReport(reads_seen={"r": {"a": 1, "b": 1}, "q": {"c": 1}}, stalled={"s": 1}, drained={"e": 1})
    both = one.aggregate(other)
    assert both.reads_seen == {"r": {"a": 2, "b": 1}, "q": {"c": 1}}
    assert (both.stalled, both.drained) == ({"s": 2}, {"d": 1, "e": 1})
    one = WorkerReport(broken={"d": 1}, returned={"n": 1}).aggregate(WorkerReport(broken={"e": 1}, returned={"n": 1}))
    assert (one.broken, one.returned) == ({"d": 1, "e": 1}, {"n": 2})


def test_the_worst_rank_decides_and_bytes_add_up() -> None:
    good = ReadEnd("n", ReadOutcome.VERIFIED, 100, 10)
    bad = ReadEnd("n", ReadOutcome.NOT_HELD, 50, 5)
    merged = WorkerReport(reads_ended={"r": good}).aggregate(WorkerReport(reads_ended={"r": bad}))
    assert merged.reads_ended["r"] == ReadEnd("n", ReadOutcome.NOT_HELD, 150, 15)
    assert bad.merged(good) == good.merged(bad)


def test_a_later_read_replaces_an_earlier_one() -> None:
    first, second = ReadEnd("a", ReadOutcome.NOT_HELD), ReadEnd("b", ReadOutcome.VERIFIED)
    assert first.merged(second) == second


def test_only_a_report_can_be_merged_into_a_report() -> None:
    class Foreign(KVConnectorWorkerMetadata):
        def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
            return self

    with pytest.raises(TypeError):
        WorkerReport().aggregate(Foreign())


def test_an_empty_report_is_false() -> None:
    assert not WorkerReport()
    assert WorkerReport(drained={"n": 1})
    assert WorkerReport(returned={"n": 1})


def test_metadata_keeps_all_that_vllm_put_in_and_travels() -> None:
    stock = NixlConnectorMetadata()
    stock.reqs_to_send = {"r": 1.0}
    ours = ConnectorMetadata.extending(stock)
    ours.reads = {"d": ReadOrder("n")}
    arrived = pickle.loads(pickle.dumps(ours))
    assert arrived.reqs_to_send == {"r": 1.0}
    assert arrived.reads == {"d": ReadOrder("n")}
    assert arrived.releases == frozenset()
