"""The worker side, over two disk tiers that really save and load a small hybrid cache."""

import pickle
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiKVConnectorMetadata,
    MultiKVConnectorWorkerMetadata,
)
from vllm.v1.kv_cache_interface import KVCacheSpec

from connector.tiers import WeightedMultiConnector
from connector.tiers.multi_connector import IDLE_REST
from connector.tiers.pending_loads import ChildLoad
from connector.tiers.rank_loads import WeightedMetadata, WeightedReport
from tests.connector.harness import DENSE, HYBRID
from tests.connector.tiers.disk_tier import Copy, DiskMetadata, DiskTier
from tests.connector.tiers.harness import cache_of, multi_config, tier

BLOCKS = 20
SOURCE, TARGET = ((1, 2, 3), (4,)), ((11, 12, 13), (14,))


def worker(
    tmp_path: Path, first: str = "DiskTier", second: str = "DiskTier", groups: tuple[KVCacheSpec, ...] = HYBRID
) -> WeightedMultiConnector:
    children = [tier(tmp_path / "one", "one", first), tier(tmp_path / "two", "two", second)]
    made = WeightedMultiConnector(
        multi_config(children, groups, num_blocks=BLOCKS), KVConnectorRole.WORKER, cache_of(groups, BLOCKS)
    )
    made.register_kv_caches(caches(groups))
    return made


def caches(groups: tuple[KVCacheSpec, ...]) -> dict[str, Any]:
    attention = torch.arange(2 * BLOCKS * 3).reshape(2, BLOCKS, 3).float()
    state = [torch.arange(BLOCKS * 4).reshape(BLOCKS, 4).float(), torch.arange(BLOCKS).reshape(BLOCKS, 1).float()]
    return (
        dict(zip(("layer0", "layer1"), (attention, state), strict=False)) if len(groups) > 1 else {"layer0": attention}
    )


def step(
    connector: WeightedMultiConnector, one: DiskMetadata, loads: dict[str, ChildLoad] | None = None, **more: Any
) -> Any:
    """One step with work for the first child; what vLLM's model runner takes from the connector, in its order."""
    connector.bind_connector_metadata(WeightedMetadata((one, DiskMetadata()), None, loads or {}, **more))
    connector.start_load_kv(None)
    connector.wait_for_save()
    results = connector.get_transfer_results(set())
    blocks = connector.get_block_ids_with_load_errors()
    connector.clear_connector_metadata()
    return results, blocks


def of(connector: WeightedMultiConnector) -> list[DiskTier]:
    return [child for child in connector.sub_connectors if isinstance(child, DiskTier)]


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "prefix")


def test_the_tier_brings_back_what_it_stored(tmp_path: Path, path: str) -> None:
    """The test's own tier works: otherwise nothing that is tested with it would mean anything."""
    connector = worker(tmp_path)
    layers = of(connector)[0]._layers
    step(connector, DiskMetadata(saves=[Copy("r", path, SOURCE)]))
    step(connector, DiskMetadata(loads=[Copy("r", path, TARGET, (1, 0))]))
    attention, (convolution, recurrent) = layers["layer0"][0], layers["layer1"]
    assert torch.equal(attention[:, 12:14], attention[:, 2:4])
    assert not torch.equal(attention[:, 11], attention[:, 1])
    assert torch.equal(convolution[14], convolution[4])
    assert torch.equal(recurrent[14], recurrent[4])


def test_a_load_that_ended_well_is_finished_and_no_more(tmp_path: Path, path: str) -> None:
    connector = worker(tmp_path)
    step(connector, DiskMetadata(saves=[Copy("r", path, SOURCE)]))
    results, blocks = step(
        connector, DiskMetadata(loads=[Copy("r", path, TARGET, (0, 0))]), {"r": ChildLoad(0, TARGET)}
    )
    assert (results.finished_recving, results.failed_recving, blocks) == ({"r"}, set(), set())


@pytest.mark.parametrize("kind", ["DiskTier", "BlockwiseTier"])
def test_a_stale_file_is_a_failed_request(tmp_path: Path, path: str, kind: str) -> None:
    """Whether the child reports it itself, or names blocks, at which vLLM raises where there are several groups."""
    connector = worker(tmp_path, kind)
    loads = {"r": ChildLoad(0, TARGET), "other": ChildLoad(1, SOURCE)}
    results, blocks = step(connector, DiskMetadata(loads=[Copy("r", path, TARGET, (0, 0))]), loads)
    assert (results.finished_recving, results.failed_recving, blocks) == ({"r"}, {"r"}, set())


def test_with_one_group_blocks_stay_blocks(tmp_path: Path, path: str) -> None:
    """vLLM then keeps what came before the first of them."""
    connector = worker(tmp_path, "BlockwiseTier", groups=DENSE)
    results, blocks = step(
        connector, DiskMetadata(loads=[Copy("r", path, TARGET[:1], (0,))]), {"r": ChildLoad(0, TARGET[:1])}
    )
    assert (results.finished_recving, results.failed_recving, blocks) == ({"r"}, set(), {13})
    assert connector.get_block_ids_with_load_errors() == set()


def test_a_load_that_takes_too_long_has_failed_and_its_end_is_reported_apart(tmp_path: Path, path: str) -> None:
    connector = worker(tmp_path, "HangingTier")
    step(connector, DiskMetadata(saves=[Copy("r", path, SOURCE)]))
    hangs = tmp_path / "one" / "hangs"
    hangs.touch()
    load = DiskMetadata(loads=[Copy("r", path, TARGET, (0, 0))])
    results, _ = step(connector, load, {"r": ChildLoad(0, TARGET)})
    assert results.finished_recving == set()
    assert connector.build_connector_worker_meta() is None
    results, _ = step(connector, DiskMetadata(), overdue=frozenset({"r", "unknown"}))
    assert (results.finished_recving, results.failed_recving) == ({"r"}, {"r"})
    assert connector.build_connector_worker_meta() == WeightedReport(None, {"r": 1}, {})
    began = time.monotonic()
    results, _ = step(connector, DiskMetadata(), overdue=frozenset({"r"}), idle=True)
    assert time.monotonic() - began >= IDLE_REST
    assert results.finished_recving == set()
    hangs.unlink()
    results, _ = step(connector, DiskMetadata())
    assert (results.finished_recving, results.failed_recving) == (set(), set())
    assert connector.build_connector_worker_meta() == WeightedReport(None, {}, {"r": 1})


def test_a_load_that_ended_in_time_is_not_given_up(tmp_path: Path, path: str) -> None:
    connector = worker(tmp_path)
    step(connector, DiskMetadata(saves=[Copy("r", path, SOURCE)]))
    load = DiskMetadata(loads=[Copy("r", path, TARGET, (0, 0))])
    results, _ = step(connector, load, {"r": ChildLoad(0, TARGET)}, overdue=frozenset({"r"}))
    assert (results.finished_recving, results.failed_recving) == ({"r"}, set())
    step(connector, DiskMetadata(), overdue=frozenset({"r"}))
    assert connector.build_connector_worker_meta() is None


def test_reports_of_several_ranks_become_one_and_travel() -> None:
    one = WeightedReport(None, {"a": 1}, {"c": 1})
    other = WeightedReport(None, {"a": 1, "b": 1}, {})
    assert pickle.loads(pickle.dumps(one.aggregate(other))) == WeightedReport(None, {"a": 2, "b": 1}, {"c": 1})
    with pytest.raises(TypeError):
        one.aggregate(MultiKVConnectorWorkerMetadata((None, None)))


class WordsReport(KVConnectorWorkerMetadata):
    """A child's report: what it has to say, once for each rank."""

    def __init__(self, *words: str) -> None:
        self.words = words

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "WordsReport":
        assert isinstance(other, WordsReport)
        return WordsReport(*self.words, *other.words)


def test_the_children_s_reports_are_merged_each_by_its_own_class() -> None:
    one, other = (WeightedReport(MultiKVConnectorWorkerMetadata((WordsReport(word), None))) for word in ("a", "b"))
    merged = one.aggregate(other).aggregate(WeightedReport(None, {"r": 1}))
    assert merged.children is not None
    (report, nothing) = merged.children.metadata
    assert isinstance(report, WordsReport)
    assert (report.words, nothing, merged.stalled) == (("a", "b"), None, {"r": 1})


@pytest.fixture
def told(tmp_path: Path) -> tuple[WeightedMultiConnector, DiskTier, DiskTier]:
    """A child that takes preemptions as metadata, and one that takes them as ids."""
    connector = worker(tmp_path, "DiskTier", "OldTier")
    new, old = of(connector)
    return connector, new, old


Told = tuple[WeightedMultiConnector, DiskTier, DiskTier]


def test_preemptions_reach_each_child_in_its_own_signature(told: Told) -> None:
    connector, new, old = told
    meta = WeightedMetadata((DiskMetadata(), DiskMetadata()), None, {}, frozenset({"b", "a"}))
    connector.handle_preemptions(meta)
    assert new.calls == ["preempted, with DiskMetadata"]
    assert old.calls == ["preempted ['a', 'b']"]


def test_preemptions_may_come_as_plain_ids(told: Told) -> None:
    connector, new, old = told
    connector.handle_preemptions({"a"})
    assert (new.calls, old.calls) == ([], ["preempted ['a']"])
    connector.bind_connector_metadata(WeightedMetadata((DiskMetadata(), DiskMetadata())))
    connector.handle_preemptions({"b"})
    assert (new.calls, old.calls[1:]) == (["preempted, with DiskMetadata"], ["preempted ['b']"])


def test_preemptions_with_metadata_that_is_not_ours(told: Told) -> None:
    """As vLLM makes it while it captures graphs, say: nothing was preempted."""
    connector, new, old = told
    connector.handle_preemptions(MultiKVConnectorMetadata((DiskMetadata(), DiskMetadata())))
    assert (new.calls, old.calls) == (["preempted, with DiskMetadata"], ["preempted []"])


def test_metadata_can_travel_between_processes() -> None:
    meta = WeightedMetadata((KVConnectorMetadata(),), None, {"r": ChildLoad(0, TARGET)}, frozenset({"a"}))
    again = pickle.loads(pickle.dumps(meta))
    assert (again.loads, again.preempted) == (meta.loads, meta.preempted)
