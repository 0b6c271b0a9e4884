"""A real vLLM scheduler with the choosing connector in it; the test plays the workers, and stores prefixes on disk."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiKVConnectorWorkerMetadata
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec
from vllm.v1.outputs import KVConnectorOutput

from connector.counters import ReadOutcome
from connector.metadata import ConnectorMetadata, ReadEnd, WorkerReport
from connector.scheduler import ConnectorScheduler
from connector.stats import COUNTS, LEVELS
from connector.tiers import WeightedMultiConnector
from connector.tiers.rank_loads import WeightedMetadata, WeightedReport
from connector.tiers.stats import SELECTION
from tests.connector.harness import BLOCK, HYBRID, Node, _config, make_scheduler, nonce_of
from tests.connector.tiers.disk_tier import DiskTier, Shelf


def pull(name: str = "pull", **extra: Any) -> dict[str, Any]:
    """Our NIXL connector as a child."""
    return {
        "kv_connector": "NixlConnector",
        "kv_connector_module_path": "connector.nixl_connector",
        "kv_role": "kv_consumer",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"name": name, **extra},
    }


def tier(folder: Path, name: str = "disk", kind: str = "DiskTier", **extra: Any) -> dict[str, Any]:
    """A disk tier as a child."""
    return {
        "kv_connector": kind,
        "kv_connector_module_path": "tests.connector.tiers.disk_tier",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"name": name, "folder": str(folder), **extra},
    }


def multi_config(
    children: Sequence[Mapping[str, Any]],
    groups: Sequence[KVCacheSpec] = HYBRID,
    *,
    num_blocks: int = 400,
    policy: str = "recompute",
    role: str = "kv_consumer",
    **extra: Any,
) -> VllmConfig:
    """vLLM's configuration with these children."""
    config = _config(role, groups, "engine-d", num_blocks, {})
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="MultiConnector",
        kv_connector_module_path="connector.tiers",
        kv_role=role,
        engine_id="engine-d",
        kv_load_failure_policy=policy,
        kv_connector_extra_config={"connectors": list(children), **extra},
    )
    return config


def cache_of(groups: Sequence[KVCacheSpec], num_blocks: int = 400) -> KVCacheConfig:
    """Its KV-cache groups, a layer each."""
    named = [KVCacheGroupSpec([f"layer{index}"], spec) for index, spec in enumerate(groups)]
    return KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=named)


@dataclass
class Several(Node):
    """A node with several children."""

    plans: list[WeightedMetadata] = field(default_factory=list)
    series: Counter[tuple[str, str]] = field(default_factory=Counter)
    pending: dict[str, int] = field(default_factory=dict)
    payloads: list[dict[str, Any]] = field(default_factory=list)

    @property
    def connector(self) -> WeightedMultiConnector:
        connector = self.scheduler.connector
        assert isinstance(connector, WeightedMultiConnector)
        return connector

    @property
    def names(self) -> list[str]:
        return [child.settings.name for child in self.connector._children]

    @property
    def side(self) -> ConnectorScheduler:
        side = self._child("pull").connector_scheduler
        assert isinstance(side, ConnectorScheduler)
        return side

    def disk(self, name: str = "disk") -> DiskTier:
        found = self._child(name)
        assert isinstance(found, DiskTier)
        return found

    def _child(self, name: str) -> Any:
        return self.connector.sub_connectors[self.names.index(name)]

    def step(self, seen: KVConnectorOutput | None = None) -> list[EngineCoreOutput]:
        outputs = self._step(seen)
        for each in outputs:
            self._take(each.scheduler_stats.kv_connector_stats if each.scheduler_stats else None)
        return [output for each in outputs for output in each.outputs]

    def _keep(self, meta: Any) -> None:
        assert isinstance(meta, WeightedMetadata)
        self.plans.append(meta)
        self.metas += [part for part in meta.metadata if isinstance(part, ConnectorMetadata)]

    def _take(self, payload: dict[str, Any] | None) -> None:
        if not payload:
            return
        self.payloads.append(payload)
        selection = payload.get(SELECTION, {"stats": {COUNTS: (), LEVELS: ()}})["stats"]
        for name, [child], number in selection[COUNTS]:
            assert number > 0
            self.series[name, child] += number
        self.pending |= {child: number for _, [child], number in selection[LEVELS]}
        if "pull" in payload:
            self._count(payload["pull"]["stats"][COUNTS])

    def selected(self, child: str) -> dict[str, int]:
        """A child's counters so far, without those that are 0."""
        return {
            name.removeprefix("child_"): number for (name, of), number in self.series.items() if of == child and number
        }

    def reads(self) -> dict[str, int]:
        """Tokens that the last step's NIXL reads pull, by request; 0 where a ticket is only given back."""
        return {name: order.pull_tokens for name, order in self.metas[-1].reads.items()}

    def loads(self, name: str = "disk") -> list[str]:
        """Requests that a tier begins to load in the last step."""
        part: Any = self.plans[-1].metadata[self.names.index(name)]
        return [load.request_id for load in part.loads]

    def pulled(self, *request_ids: str, failed: Iterable[str] = (), outcome: ReadOutcome | None = None) -> Any:
        """The workers' output: these reads ended."""
        bad = set(failed)
        worst = outcome or ReadOutcome.NOT_HELD
        ends = {
            name: ReadEnd(nonce_of(self, name), worst if name in bad else ReadOutcome.VERIFIED) for name in request_ids
        }
        parts = [WorkerReport(reads_ended=ends) if name == "pull" else None for name in self.names]
        return KVConnectorOutput(
            finished_recving=set(request_ids),
            failed_recving=bad,
            kv_connector_worker_meta=WeightedReport(MultiKVConnectorWorkerMetadata(tuple(parts))),
        )


def loaded(*request_ids: str, failed: Iterable[str] = ()) -> KVConnectorOutput:
    """The workers' output: a tier's loads ended."""
    return KVConnectorOutput(finished_recving=set(request_ids), failed_recving=set(failed))


def make_several(
    children: Sequence[Mapping[str, Any]],
    groups: Sequence[KVCacheSpec] = HYBRID,
    *,
    num_blocks: int = 400,
    unit: int | None = None,
    scheduling: Mapping[str, Any] | None = None,
    **extra: Any,
) -> Several:
    """A decode node's scheduler with these children. `unit`: of `--prefix-match-unit`; `scheduling`: fields of vLLM's
    `SchedulerConfig`."""
    config = multi_config(children, groups, num_blocks=num_blocks, **extra)
    vars(config.scheduler_config).update(scheduling or {})
    config.cache_config.prefix_match_unit = unit
    hash_fn = get_hash_fn_by_name("sha256")
    init_none_hash(hash_fn)
    scheduler = make_scheduler(config, cache_of(groups, num_blocks))
    return Several(scheduler, get_request_block_hasher(scheduler.hash_block_size, hash_fn))


def shelve(folder: Path, tokens: Sequence[int], blocks: int) -> Path:
    """Put a file on a tier's shelf for the first `blocks` blocks of a prompt."""
    path = Shelf(folder).path(tokens[: blocks * BLOCK])
    path.write_bytes(b"")
    return path
