"""The choosing connector: vLLM's MultiConnector, with the first child that has anything replaced by the best.

Configured as `kv_connector: MultiConnector` (vLLM's platform code decides by that name) with
`kv_connector_module_path: connector.tiers`; `settings` shows the children. Over 300 lines: vLLM wants all hooks on one
class.

Scheduler process:
    get_num_new_matched_tokens ─► `Chooser` asks every child; `choice` decides ─► the winner's tokens
    update_state_after_alloc ─► the winner loads; every other child hears that it does not, and a ticket that was not
        used goes back to the prefill node in the same step
    update_connector_output ─► a child hears of its own loads only; one whose load failed is not asked for that request
        again, so that the next best child is taken, or the prompt is computed; a load that takes too long has failed,
        its prompt is computed, and its blocks are kept from the pool until the load has ended
Worker process:
    get_transfer_results ─► a child's failed blocks become failed requests where there are several cache groups; so do
        loads that take too long, whose end is told to our scheduler side alone
"""

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import supports_hma
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

from connector.decode_reads import Quarantine
from connector.shape_check import require_fit
from connector.tiers.children import Child, ChildSettings, MultiSettings, hands_over
from connector.tiers.pending_loads import LoadDeadlines, PendingLoads
from connector.tiers.rank_loads import RankLoads, WeightedMetadata, WeightedReport, notify_output, notify_preempted
from connector.tiers.selection import (
    ChildSelector,
    require_hybrid_support,
    require_one_side_channel,
    require_units,
    stored_blocks,
)
from connector.tiers.stats import (
    SELECTION,
    ChildrenPromMetrics,
    ChildrenStats,
    SelectionCounters,
    SelectionStats,
    SharedMetric,
)
from connector.vllm_contracts import TIERS

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


log = logging.getLogger("vllm.pdproxy.multi")

IDLE_REST = 0.025
"""Seconds that a step with nothing to compute takes while all that runs is loads that were given up."""


class WeightedMultiConnector(MultiConnector):
    """Several connectors on one node; the one whose load saves most wins. Raises ConfigError."""

    def __init__(self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig") -> None:
        require_fit(TIERS)
        settings = self._settings(vllm_config)
        listed = vllm_config.kv_transfer_config.kv_connector_extra_config["connectors"]
        self._require_fit(settings.children, listed)
        self._block_size: int
        self._block_size, hash_block = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
        require_units(settings.children, stored_blocks(vllm_config, kv_cache_config, hash_block))
        super().__init__(vllm_config, role, kv_cache_config)
        configs = [KVTransferConfig(**entry) for entry in listed]
        self._sources = [(config.kv_connector, config.kv_connector_module_path) for config in configs]
        self._children = tuple(
            Child(number, each, connector, bool(config.is_kv_consumer))
            for number, (each, connector, config) in enumerate(
                zip(settings.children, self.sub_connectors, configs, strict=True)
            )
        )
        self._tally = SelectionCounters()
        self._desk = PendingLoads([child.name for child in settings.children], self._tally)
        self._manager: KVCacheManager | None = None
        self._several_groups = len(kv_cache_config.kv_cache_groups) > 1
        self._chooser = ChildSelector(
            self._children,
            self._desk,
            groups=len(kv_cache_config.kv_cache_groups),
            decide_within=settings.decide_within,
            shared_hit=self._shared_hit,
            now=time.monotonic,
        )
        self._quarantine = Quarantine()
        self._overdue = LoadDeadlines(settings.load_deadline, self._quarantine)
        self._failures = RankLoads()
        self._unloaded_blocks: set[int] = set()
        self._told_overdue: frozenset[str] = frozenset()
        self._idle = False

    # ---- before it starts

    @classmethod
    def _settings(cls, vllm_config: "VllmConfig") -> MultiSettings:
        transfer = vllm_config.kv_transfer_config
        return MultiSettings.from_extra(transfer.kv_load_failure_policy, transfer.kv_connector_extra_config)

    @classmethod
    def _require_fit(cls, children: Sequence[ChildSettings], listed: Sequence[dict[str, Any]]) -> None:
        classes = [KVConnectorFactory.get_connector_class(KVTransferConfig(**entry)) for entry in listed]
        require_hybrid_support(children, map(supports_hma, classes))
        require_one_side_channel(children, map(hands_over, classes))

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """vLLM's answer. It asks here, or below, before it makes any connector: so this is where a child that cannot
        work is named. Later vLLM would end with a word about this class, or about cache groups."""
        cls._require_fit(MultiSettings.from_extra("recompute", extra_config).children, extra_config["connectors"])
        return bool(super().requires_piecewise_for_cudagraph(extra_config))

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: "VllmConfig") -> str | None:
        """vLLM's answer; asked while the model is built, and children are looked at as above."""
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        cls._require_fit(cls._settings(vllm_config).children, extra["connectors"])
        layout: str | None = super().get_required_kvcache_layout(vllm_config)
        return layout

    # ---- the scheduler's process

    def bind_kv_cache_manager(self, kv_cache_manager: "KVCacheManager") -> None:
        """vLLM's cache, for the shared hit; its pool, for blocks under loads that were given up."""
        super().bind_kv_cache_manager(kv_cache_manager)
        self._manager = kv_cache_manager
        self._quarantine.bind(kv_cache_manager.block_pool)

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        """Asked by vLLM before it looks up a request."""
        return self._chooser.offers_divergent_hits

    def _shared_hit(self, request: "Request") -> int:
        if self._manager is None:
            return 0
        _, found, _ = self._manager.get_computed_blocks(request)
        tokens = int(found)
        return tokens - tokens % self._block_size

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int | None, bool]:
        """Ask all children, and answer for the best."""
        answer, claim = self._chooser.ask(request, num_computed_tokens)
        if claim is None:
            self._requests_to_connector.pop(request.request_id, None)
        else:
            self._requests_to_connector[request.request_id] = claim.child
        return answer

    def update_state_after_alloc(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        """The winner hears how much it loads; the others that they load nothing."""
        self._chooser.forget(request.request_id)
        ids = tuple(tuple(block.block_id for block in group) for group in blocks.blocks)
        winner = self._desk.admitted(request.request_id, ids, num_external_tokens)
        if winner is not None and self._desk.loading(request.request_id) == winner:
            self._watch(request.request_id, winner, blocks)
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def _watch(self, request_id: str, child: int, blocks: "KVCacheBlocks") -> None:
        """Give a tier's load a deadline; reads of tickets have their own."""
        if not self._children[child].hands_over:
            every = [block for group in blocks.blocks for block in group]
            self._overdue.begin(request_id, every, time.monotonic())

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> WeightedMetadata:
        """Every child's, and ours."""
        stock = super().build_connector_meta(scheduler_output)
        self._chooser.step_planned()
        preempted = frozenset(scheduler_output.preempted_req_ids or ())
        return WeightedMetadata(
            stock.metadata,
            stock.extra_async_saves,
            loads=self._desk.take_new(),
            preempted=preempted,
            overdue=self._overdue.take(time.monotonic()),
            idle=scheduler_output.total_num_scheduled_tokens == 0,
        )

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        """Tell each child of its own loads; a load that nobody is known to have begun is told to all."""
        finished = set(connector_output.finished_recving or ())
        failed = self._desk.failed(connector_output.failed_recving, connector_output.invalid_block_ids)
        given_up, drained = self._hear(connector_output.kv_connector_worker_meta)
        ended = (finished - given_up) | drained
        for request_id in failed - given_up:
            owner = self._desk.loading(request_id)
            self._desk.fail(request_id, bar=owner is None or not self._children[owner].hands_over)
        notify_output(self._children, connector_output, {each: self._desk.loading(each) for each in ended})
        self._desk.ended(ended)
        self._overdue.ended(ended)

    def _hear(self, report: Any) -> tuple[set[str], set[str]]:
        """Requests whose load was given up in this step, and those whose load has ended since it was."""
        if not isinstance(report, WeightedReport):
            return set(), set()
        given_up = self._overdue.give_up(report.stalled)
        for request_id in given_up:
            log.warning("The load for %s takes too long: computing it here.", request_id)
            self._desk.give_up(request_id)
        return given_up, set(self._overdue.drain(report.drained))

    def has_pending_push_work(self) -> bool:
        """Whether an idle engine must step on: for a child, or for the end of loads that were given up."""
        return bool(self._quarantine) or bool(super().has_pending_push_work())

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Every child hears the end of every request."""
        self._chooser.forget(request.request_id)
        self._desk.leave(request.request_id)
        answer: tuple[bool, dict[str, Any] | None] = super().request_finished_all_groups(request, block_ids)
        return answer

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        """For the child that handed it out; others may refuse pipeline stages that do not concern them."""
        for child in self._children:
            if child.hands_over:
                child.connector.set_xfer_handshake_metadata_pp_aware(metadata)

    # ---- a worker's process

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """The children's, each its own; ours tells which loads begin."""
        super().bind_connector_metadata(connector_metadata)
        self._told_overdue, self._idle = frozenset(), False
        if isinstance(connector_metadata, WeightedMetadata):
            self._failures.expect(connector_metadata.loads)
            self._told_overdue, self._idle = connector_metadata.overdue, connector_metadata.idle

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata | set[str]) -> None:
        """Tell every child, in its own signature, whichever of the two vLLM's caller has."""
        notify_preempted(self._children, kv_connector_metadata, self._connector_metadata)

    def get_transfer_results(self, finished_req_ids: set[str]) -> "KVConnectorTransferResults":
        """The children's, with failed blocks told as failed requests where vLLM takes nothing else, and loads that take
        too long as failed ones."""
        results = super().get_transfer_results(finished_req_ids)
        late = self._failures.withhold(results.finished_recving)
        results.finished_recving -= late
        results.failed_recving -= late
        for child in self._children:
            blocks = child.connector.get_block_ids_with_load_errors()
            if self._several_groups:
                self._failures.hear(child.number, blocks)
            else:
                self._unloaded_blocks |= blocks - self._failures.of_given_up(blocks)
        results.failed_recving |= self._failures.settle(results.finished_recving)
        given_up = self._failures.give_up(self._told_overdue)
        results.finished_recving |= given_up
        results.failed_recving |= given_up
        if self._idle and self._failures.waits_for_given_up():
            time.sleep(IDLE_REST)
        return results

    def build_connector_worker_meta(self) -> WeightedReport | None:
        """The children's reports, and ours on loads that took too long; None when there is nothing."""
        stock = super().build_connector_worker_meta()
        stalled, drained = self._failures.take_report()
        if stock is None and not stalled and not drained:
            return None
        return WeightedReport(stock, stalled, drained)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that were not loaded, of a model with one cache group."""
        blocks, self._unloaded_blocks = self._unloaded_blocks, set()
        return blocks

    # ---- statistics, in every process

    def get_kv_connector_stats(self) -> ChildrenStats | None:
        """Every child's since the last call, and the scheduler's choices."""
        found = ChildrenStats()
        for child, source in zip(self._children, self._sources, strict=True):
            stats = child.connector.get_kv_connector_stats()
            if stats is not None:
                found.add(child.settings.name, source, stats)
        if self.role == KVConnectorRole.SCHEDULER:
            selection = SelectionStats.of(self._tally.drain(self._desk.pending()))
            if not selection.is_empty():
                found.add(SELECTION, (SELECTION, None), selection)
        return found if found.data else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> ChildrenStats:
        """Stats out of what came from another process, or empty ones."""
        return ChildrenStats() if data is None else ChildrenStats.from_dict(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: "VllmConfig",
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> ChildrenPromMetrics:
        """The Prometheus side: every child's own series, with its name as the label `child`, and ours."""
        once = {kind: SharedMetric(metric) for kind, metric in metric_types.items()}
        classes = cls._get_connector_classes_and_configs(vllm_config)
        children = {
            each.name: connector.build_prom_metrics(
                config,
                once,
                [*labelnames, "child"],
                {engine: [*values, each.name] for engine, values in per_engine_labelvalues.items()},
            )
            for each, (connector, config) in zip(cls._settings(vllm_config).children, classes, strict=True)
        }
        return ChildrenPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues, children)
