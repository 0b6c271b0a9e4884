"""Offloading tiers on hybrid models beside hand-overs, chosen by weighted score (vllm#38261).

The tier is vLLM's own OffloadingConnector where it has the behaviour (its scheduler side; the tests play its workers,
which need a GPU), a small disk tier elsewhere.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiKVConnectorWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.v1.outputs import KVConnectorOutput

from connector.config import ConfigError
from connector.tiers import MultiConnector
from connector.tiers.rank_loads import WeightedReport
from tests.connector.harness import BLOCK, DENSE, HYBRID, make_node, prompt, take_ticket
from tests.connector.tiers.harness import Several, loaded, make_several, multi_config, pull, shelve, tier

pytestmark = pytest.mark.usefixtures("every_pace")

UNIT = 2 * BLOCK
TOKENS = prompt(6 * BLOCK + 4)


def memory(unit: int = UNIT, **extra: Any) -> dict[str, Any]:
    """vLLM's OffloadingConnector, with units of so many tokens."""
    more = {"name": "memory", "cpu_bytes_to_use": 1 << 24, "block_size": unit, **extra}
    return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": more}


def with_memory(groups: Sequence[KVCacheSpec] = HYBRID, **extra: Any) -> Several:
    return make_several([memory(**extra), pull()], groups)


def plan(node: Several) -> Any:
    """The planner's orders in the last step."""
    return node.plans[-1].metadata[0]


def done(jobs: Sequence[int], *received: str) -> KVConnectorOutput:
    """The workers say: these copies are done, and these requests have what they waited for."""
    report = OffloadingWorkerMetadata(dict.fromkeys(jobs, 1))
    return KVConnectorOutput(
        finished_recving=set(received),
        kv_connector_worker_meta=WeightedReport(MultiKVConnectorWorkerMetadata((report, None))),
    )


def store(node: Several, tokens: Sequence[int], *, kept: slice = slice(None)) -> dict[int, int]:
    """Compute a prompt and have the copies that the planner orders done, or some of them; blocks of each copy."""
    node.add("store", tokens)
    jobs: dict[int, int] = {}
    for _ in range(5):
        node.step()
        jobs |= {job: len(one.src_spec.block_ids) for job, one in plan(node).store_jobs.items()}
    node.step(done(list(jobs)[kept]))
    node.scheduler.reset_prefix_cache()
    return jobs


def test_a_prompt_is_cut_into_whole_units_and_the_rest_is_left() -> None:
    """96 of 100 tokens are stored, in three units: six blocks of attention, and one state, at the last boundary."""
    node = with_memory()
    assert sorted(store(node, TOKENS).values()) == [1, 6]


def test_what_was_stored_is_loaded_with_its_state() -> None:
    node = with_memory()
    store(node, TOKENS)
    node.add("again", TOKENS)
    node.step()
    jobs = plan(node).load_jobs
    assert len(jobs) == 1
    assert sum(len(job.dst_spec.block_ids) for job in jobs.values()) == 7
    assert node.selected("memory")["tokens_won"] == 6 * BLOCK
    node.step(done(list(jobs), "again"))
    assert len(node.run_out("again")) == 4


def test_half_a_unit_is_transferred_where_the_other_half_is_here() -> None:
    """A local hit that ends within a unit: what is loaded begins there, with the unit's second block."""
    node = with_memory(DENSE)
    store(node, TOKENS)
    node.add("local", TOKENS[: BLOCK + 3])
    node.run_out("local")
    node.add("again", TOKENS)
    node.step()
    (job,) = plan(node).load_jobs.values()
    assert len(job.dst_spec.block_ids) == 5
    assert node.selected("memory")["tokens_won"] == 5 * BLOCK


@pytest.mark.parametrize("kept", [slice(0, 1), slice(1, 2)])
def test_where_groups_disagree_the_least_counts(kept: slice) -> None:
    """Attention without its state, or a state without its attention, is nothing."""
    node = with_memory()
    store(node, TOKENS, kept=kept)
    node.add("again", TOKENS)
    for _ in range(3):
        node.step()
        assert plan(node).load_jobs == {}
    assert "tokens_won" not in node.selected("memory")


@pytest.mark.parametrize(
    ("unit", "says"),
    [
        (24, "use 32"),
        (8, "less than the 16 .* use 16"),
        (0, "over 0"),
        (-16, "over 0"),
        (8192, "set max_model_len to 8192"),
    ],
)
def test_a_unit_that_cannot_be_cut_is_refused_with_the_number_that_can(unit: int, says: str) -> None:
    with pytest.raises(ConfigError, match=f"'memory'.*{says}"):
        with_memory(unit=unit)


def test_a_child_without_the_hybrid_allocator_is_refused_by_name(tmp_path: Path) -> None:
    config = multi_config([pull(), tier(tmp_path, "lake", "DenseTier")])
    with pytest.raises(ConfigError, match="'lake'"):
        MultiConnector.get_required_kvcache_layout(config)
    with pytest.raises(ConfigError, match="'lake'"):
        MultiConnector.requires_piecewise_for_cudagraph(config.kv_transfer_config.kv_connector_extra_config)


@pytest.mark.parametrize(("on_disk", "winner"), [(6, "memory"), (11, "memory"), (13, "disk"), (18, "disk")])
def test_fast_memory_beats_a_slow_disk_unless_the_disk_has_far_more(tmp_path: Path, on_disk: int, winner: str) -> None:
    """Memory has six blocks, and a token of it counts twice. Once: whichever came first in the list."""
    node = make_several([tier(tmp_path), memory(load_weight=2), pull()])
    longer = [*TOKENS[: 6 * BLOCK], *prompt(13 * BLOCK, seed=5)]
    node.add("store", TOKENS)
    jobs: list[int] = []
    for _ in range(5):
        node.step()
        jobs += node.plans[-1].metadata[1].store_jobs
    report = OffloadingWorkerMetadata(dict.fromkeys(jobs, 1))
    node.step(
        KVConnectorOutput(kv_connector_worker_meta=WeightedReport(MultiKVConnectorWorkerMetadata((None, report, None))))
    )
    node.scheduler.reset_prefix_cache()
    shelve(tmp_path, longer, on_disk)
    node.add("d", longer)
    node.step()
    assert node.selected(winner)["wins"] == 1
    assert "wins" not in node.selected({"memory": "disk", "disk": "memory"}[winner])


def test_one_block_in_a_tier_does_not_cancel_a_hand_over(tmp_path: Path) -> None:
    """Once: it did, where the tier stood first."""
    prefill = make_node("kv_producer", engine_id="engine-p")
    node = make_several([tier(tmp_path), pull()])
    shelve(tmp_path, TOKENS, 1)
    node.add("d", TOKENS, take_ticket(prefill, TOKENS))
    node.step()
    assert node.reads() == {"d": len(TOKENS) - 1}


def test_metrics_are_per_child_by_name_and_travel(tmp_path: Path) -> None:
    """Once: counted in the engine's process, where nobody reads. Now: in the stats that go to the API server."""
    node = make_several([tier(tmp_path / "a", "near"), tier(tmp_path / "b", "far"), pull()])
    shelve(tmp_path / "b", TOKENS, 6)
    node.add("d", TOKENS)
    node.step()
    assert node.selected("near") == {"queries": 1, "misses": 1}
    assert node.selected("far") == {"queries": 1, "wins": 1, "tokens_won": 6 * BLOCK}
    assert node.pending == {"near": 0, "far": 1, "pull": 0}
    node.step(loaded("d"))
    assert node.pending == {"near": 0, "far": 0, "pull": 0}


@pytest.mark.parametrize("blocks", [0, 2, 6])
def test_tokens_are_never_negative_when_local_and_external_hits_race(tmp_path: Path, blocks: int) -> None:
    """A tier that subtracts the local hit from its own offers less than nothing. Once: a counter went back and killed
    the thread that counts, or an assertion the engine."""
    node = make_several([tier(tmp_path, kind="NaiveTier"), pull()], DENSE)
    node.add("before", TOKENS)
    node.run_out("before")
    shelve(tmp_path, TOKENS, blocks)
    node.add("d", TOKENS)
    assert len(node.run_out("d")) == 4
    assert node.selected("disk") == {"queries": 2, "misses": 2}
    assert node.counts("prompt_tokens") == {"computed": len(TOKENS) + 4, "hit": 6 * BLOCK}


def test_a_stale_file_falls_back_to_computing(tmp_path: Path) -> None:
    """The file is seen when the request is planned, and gone when it is read. Once: the request failed."""
    node = make_several([tier(tmp_path), pull()])
    free = node.free_blocks
    path = shelve(tmp_path, TOKENS, 6)
    node.add("d", TOKENS)
    node.step()
    assert node.loads() == ["d"]
    path.unlink()
    node.step(loaded("d", failed=["d"]))
    assert len(node.run_out("d")) == 4
    assert node.free_blocks == free
    assert node.selected("disk") == {"queries": 1, "wins": 1, "tokens_won": 6 * BLOCK, "failed_loads": 1}


def test_a_file_that_stays_broken_is_not_tried_for_ever(tmp_path: Path) -> None:
    """The file is there whenever it is looked for, and cannot be read."""
    node = make_several([tier(tmp_path), pull()])
    shelve(tmp_path, TOKENS, 6)
    node.add("d", TOKENS)
    node.step()
    node.step(loaded("d", failed=["d"]))
    assert len(node.run_out("d")) == 4
    assert node.selected("disk")["wins"] == 1
    node.add("other", TOKENS)
    node.step()
    assert node.disk().asked[-1][0] == "other"


def test_preempted_requests_are_reported_to_the_workers() -> None:
    """Which children take ids and which take metadata is seen in tests of the workers' half."""
    node = make_several([memory(), pull()], num_blocks=24)
    for index in range(3):
        node.add(f"r{index}", prompt(90, seed=index), max_tokens=60)
    for _ in range(200):
        node.step(done(list(plan(node).store_jobs)) if node.plans else None)
        if not node.scheduler.requests:
            break
    assert not node.scheduler.requests
    assert any(meta.preempted for meta in node.plans)
