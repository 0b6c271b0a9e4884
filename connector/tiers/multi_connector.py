"""vLLM's MultiConnector, which loads from the child that saves most instead of from the first that has anything.

Configured as `kv_connector: MultiConnector` (vLLM's platform code decides by that name) with
`kv_connector_module_path: connector.tiers`; `children` shows how children are configured.

Scheduler process:
    get_num_new_matched_tokens ─► `selection` asks every child; the best offer's tokens are the answer
    update_state_after_alloc ─► the chosen child loads; every other child is called with 0 tokens, and a ticket that was
        not used goes back to the prefill node in the same step
    update_connector_output ─► a child is passed its own loads only. One whose load failed is not asked for that request
        again, so that the next best child is chosen, or the prompt is computed. A load that takes too long has failed:
        its prompt is computed, and its blocks are kept from the pool until the load has ended
Worker process:
    get_transfer_results ─► a child's failed blocks become failed requests where there are several cache groups; so do
        loads that take too long, whose end is reported to our scheduler side alone
"""

import logging
import time
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

from ..admission import AdmissionControl, NoAdmissionControl
from ..decode_reads import Quarantine
from ..kv_groups import sequence_blocks
from ..resume_boundary import LocalHits
from ..scheduler import ConnectorScheduler
from ..vllm_version import require_tested
from .children import MultiSettings, make_children
from .pending_loads import LoadDeadlines, PendingLoads
from .rank_loads import RankLoads, WeightedMetadata, WeightedReport, notify_output, notify_preempted
from .selection import ChildSelector, require_children, require_units, stored_blocks
from .stats import (
    SELECTION,
    ChildrenPromMetrics,
    ChildrenStats,
    SelectionCounters,
    SelectionStats,
    SharedMetric,
)

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
"""Seconds that a step with nothing to compute takes while only loads that were given up are running."""


class WeightedMultiConnector(MultiConnector):
    """Several connectors on one node; the one whose load saves most loads. Raises ConfigError."""

    def __init__(self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig") -> None:
        require_tested(vllm_config.kv_transfer_config.kv_connector_extra_config)
        settings = self._settings(vllm_config)
        listed = vllm_config.kv_transfer_config.kv_connector_extra_config["connectors"]
        require_children(settings.children, listed)
        self._block_size: int
        self._block_size, hash_block = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
        require_units(settings.children, stored_blocks(vllm_config, kv_cache_config, hash_block))
        super().__init__(vllm_config, role, kv_cache_config)
        self._children = make_children(settings.children, listed, self.sub_connectors)
        self._counters = SelectionCounters()
        self._loads = PendingLoads([child.name for child in settings.children], self._counters)
        self._manager: KVCacheManager | None = None
        self._several_groups = len(kv_cache_config.kv_cache_groups) > 1
        self._selector = ChildSelector(
            self._children,
            self._loads,
            groups=len(kv_cache_config.kv_cache_groups),
            decide_within=settings.decide_within,
            shared_hit=self._shared_hit,
            now=time.monotonic,
        )
        self._quarantine = Quarantine()
        sizes = sequence_blocks(vllm_config, kv_cache_config)
        self._local_hits = LocalHits(kv_cache_config)
        self._admission = AdmissionControl(sizes, self._quarantined_blocks, self._local_hits)
        sides = (getattr(connector, "connector_scheduler", None) for connector in self.sub_connectors)
        self._sides = [side for side in sides if isinstance(side, ConnectorScheduler)]
        for side in self._sides:
            side.admission = NoAdmissionControl(sizes, self._quarantined_blocks, self._local_hits)
        self._deadlines = LoadDeadlines(settings.load_deadline, self._quarantine)
        self._rank_loads = RankLoads()
        self._unloaded_blocks: set[int] = set()
        self._step: KVConnectorMetadata | None = None
        self._overdue: frozenset[str] = frozenset()
        self._idle = False
        self._in_scheduler = role == KVConnectorRole.SCHEDULER

    # ---- before it starts

    @classmethod
    def _settings(cls, vllm_config: "VllmConfig") -> MultiSettings:
        transfer = vllm_config.kv_transfer_config
        return MultiSettings.from_extra(transfer.kv_load_failure_policy, transfer.kv_connector_extra_config)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """vLLM's answer. vLLM calls this, or the next, before it makes any connector, so a child that cannot work is
        refused here by name. Later, vLLM's own errors would name this class, or cache groups."""
        require_children(MultiSettings.from_extra("recompute", extra_config).children, extra_config["connectors"])
        return bool(super().requires_piecewise_for_cudagraph(extra_config))

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: "VllmConfig") -> str | None:
        """vLLM's answer. Called while the model is built; children are checked as above."""
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        require_children(cls._settings(vllm_config).children, extra["connectors"])
        layout: str | None = super().get_required_kvcache_layout(vllm_config)
        return layout

    # ---- the scheduler's process

    def bind_kv_cache_manager(self, kv_cache_manager: "KVCacheManager") -> None:
        """vLLM's cache, for the shared hit; its pool, for the quarantine."""
        super().bind_kv_cache_manager(kv_cache_manager)
        self._manager = kv_cache_manager
        self._quarantine.bind(kv_cache_manager.block_pool)
        self._admission.bind(kv_cache_manager.block_pool)
        self._local_hits.bind(kv_cache_manager.block_pool)

    def _quarantined_blocks(self) -> int:
        return self._quarantine.blocks + sum(side.quarantine.blocks for side in self._sides)

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        """Asked by vLLM before it looks up a request."""
        return self._selector.offers_divergent_hits

    def _shared_hit(self, request: "Request") -> int:
        if self._manager is None:
            return 0
        _, found, _ = self._manager.get_computed_blocks(request)
        tokens = int(found)
        return tokens - tokens % self._block_size

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int | None, bool]:
        """Ask all children, and answer for the best offer, unless this would hold others up."""
        answer, offer = self._selector.select(request, num_computed_tokens)
        answer = self._admission.answer(request, answer)
        if offer is None or not answer[0]:
            self._requests_to_connector.pop(request.request_id, None)
        else:
            self._requests_to_connector[request.request_id] = offer.child
        return answer

    def update_state_after_alloc(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        """The chosen child loads these tokens, the others none. A tier's load gets a deadline; a ticket's read has its
        own."""
        self._selector.forget(request.request_id)
        self._admission.on_admitted(request.request_id, num_external_tokens)
        ids = tuple(tuple(block.block_id for block in group) for group in blocks.blocks)
        winner = self._loads.admitted(request.request_id, ids, num_external_tokens)
        loads = winner is not None and self._loads.loading(request.request_id) == winner
        if winner is not None and loads and not self._children[winner].hands_over:
            every = [block for group in blocks.blocks for block in group]
            self._deadlines.on_load_started(request.request_id, every, time.monotonic())
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> WeightedMetadata:
        """Every child's metadata, and ours."""
        stock = super().build_connector_meta(scheduler_output)
        self._selector.on_step_planned()
        preempted = frozenset(scheduler_output.preempted_req_ids or ())
        return WeightedMetadata(
            stock.metadata,
            stock.extra_async_saves,
            loads=self._loads.pop_new(),
            preempted=preempted,
            overdue=self._deadlines.pop_overdue(time.monotonic()),
            idle=scheduler_output.total_num_scheduled_tokens == 0,
        )

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        """Pass each child its own loads; the end of a load whose child is unknown is passed to all."""
        finished = set(connector_output.finished_recving or ())
        failed = self._loads.failed_requests(connector_output.failed_recving, connector_output.invalid_block_ids)
        given_up, drained = self._on_worker_report(connector_output.kv_connector_worker_meta)
        ended = (finished - given_up) | drained
        for request_id in failed - given_up:
            self._loads.fail(request_id)
        notify_output(self._children, connector_output, {each: self._loads.loading(each) for each in ended})
        self._loads.ended(ended)
        self._deadlines.ended(ended)

    def _on_worker_report(self, report: Any) -> tuple[set[str], set[str]]:
        """Requests whose load was given up in this step, and those whose given-up load has ended."""
        if not isinstance(report, WeightedReport):
            return set(), set()
        given_up = self._deadlines.give_up(report.stalled)
        for request_id in given_up:
            log.warning("The load for %s takes too long: computing it here.", request_id)
            self._loads.give_up(request_id)
        return given_up, set(self._deadlines.on_drained(report.drained))

    def has_pending_push_work(self) -> bool:
        """Whether an idle engine must step on: for a child, or until loads that were given up have ended."""
        return bool(self._quarantine) or bool(super().has_pending_push_work())

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Passed to every child."""
        self._selector.forget(request.request_id)
        self._admission.forget(request.request_id)
        self._loads.on_request_finished(request.request_id)
        answer: tuple[bool, dict[str, Any] | None] = super().request_finished_all_groups(request, block_ids)
        return answer

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        """Passed to the child that hands over; others may refuse pipeline stages, which do not concern them."""
        for child in self._children:
            if child.hands_over:
                child.connector.set_xfer_handshake_metadata_pp_aware(metadata)

    # ---- a worker's process

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Each child gets its own; ours has the loads that begin and those that are overdue."""
        super().bind_connector_metadata(connector_metadata)
        self._step, self._overdue, self._idle = connector_metadata, frozenset(), False
        if isinstance(connector_metadata, WeightedMetadata):
            self._rank_loads.start(connector_metadata.loads)
            self._overdue, self._idle = connector_metadata.overdue, connector_metadata.idle

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata | set[str]) -> None:
        """Passed to every child in its own signature, from whichever of the two vLLM's caller has."""
        notify_preempted(self._children, kv_connector_metadata, self._step)

    def get_transfer_results(self, finished_req_ids: set[str]) -> "KVConnectorTransferResults":
        """The children's, with failed blocks as failed requests where vLLM accepts nothing else, and with overdue loads
        as failed ones."""
        results = super().get_transfer_results(finished_req_ids)
        late = self._rank_loads.pop_given_up(results.finished_recving)
        results.finished_recving -= late
        results.failed_recving -= late
        for child in self._children:
            blocks = child.connector.get_block_ids_with_load_errors()
            if self._several_groups:
                self._rank_loads.on_load_errors(child.number, blocks)
            else:
                self._unloaded_blocks |= blocks - self._rank_loads.blocks_of_given_up(blocks)
        results.failed_recving |= self._rank_loads.finish(results.finished_recving)
        given_up = self._rank_loads.give_up(self._overdue)
        results.finished_recving |= given_up
        results.failed_recving |= given_up
        if self._idle and self._rank_loads.has_only_given_up():
            time.sleep(IDLE_REST)
        return results

    def build_connector_worker_meta(self) -> WeightedReport | None:
        """The children's reports, and ours on overdue loads; None when there is nothing to report."""
        stock = super().build_connector_worker_meta()
        stalled, drained = self._rank_loads.pop_report()
        if stock is None and not stalled and not drained:
            return None
        return WeightedReport(stock, stalled, drained)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that were not loaded, of a model with one cache group."""
        blocks, self._unloaded_blocks = self._unloaded_blocks, set()
        return blocks

    # ---- statistics, in every process

    def get_kv_connector_stats(self) -> ChildrenStats | None:
        """Every child's stats since the last call, and the counts of the selection."""
        found = ChildrenStats()
        for child in self._children:
            stats = child.connector.get_kv_connector_stats()
            if stats is not None:
                found.add(child.settings.name, child.source, stats)
        if self._in_scheduler:
            selection = SelectionStats.of(self._counters.drain(self._loads.pending()))
            if not selection.is_empty():
                found.add(SELECTION, (SELECTION, None), selection)
        return found if found.data else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> ChildrenStats:
        """Stats from the dict that came from another process, or empty ones."""
        return ChildrenStats() if data is None else ChildrenStats.from_dict(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: "VllmConfig",
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> ChildrenPromMetrics:
        """Every child's own Prometheus series, with its name as the label `child`, and ours."""
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
