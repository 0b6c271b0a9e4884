"""The half in the scheduler's process: vLLM's pull scheduler, with every ticket judged and every lease kept.

`facade` says when vLLM calls what. Each hook first lets a desk decide, and vLLM's own code then acts on clean params.
Over 300 lines: vLLM wants all hooks on one class, and each is short.
"""

import logging
import secrets
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlHandshakePayload
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import NixlPullConnectorScheduler

from connector.config import ConnectorConfig
from connector.decode_reads import PromptTokens, Quarantine, ReadTracker, TicketToReturn, TokenAccounting
from connector.fingerprint import Fingerprint
from connector.kv_groups import group_shapes, node_capacity
from connector.leases import LeaseTable
from connector.messages import Verdict
from connector.metadata import ConnectorMetadata, WorkerReport
from connector.node_fingerprint import all_parts, lora_settings, node_fingerprint, rank_parts
from connector.prefill_tickets import HandOvers, TicketIssuer
from connector.side_channel import Listener
from connector.stats import ConnectorStats, Counters, Group, drained
from connector.tcp_server import Limits
from connector.ticket import Expected, GroupKind
from connector.ticket_fields import Refusal, RefusalReason, is_plain, names_media_itself, prompt_digest, usable_name
from connector.transfer_params import (
    Action,
    ComputeLocally,
    IssueTicket,
    ParamsValidator,
    ReadTicket,
    ReleaseHandOver,
    RequestFacts,
)
from connector.weights import Adapters

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


log = logging.getLogger("vllm.pdproxy.scheduler")

REMEMBERED_FOR = 600.0
"""Seconds for which an ended lease and a released hand-over id are remembered: longer than any read may take."""
MOST_REMEMBERED = 65536
ALIAS_BYTES = 18
"""Random bytes in an alias, 24 characters of it: what a ticket names cannot be guessed."""


class ValidatedParams(dict[str, Any]):
    """`kv_transfer_params` that were judged here; a sender cannot make one.

    vLLM may announce a request twice, and marks in its params what it has done to it (`_p_side_truncated`: the
    prompt's last tokens are off). A request that is announced again keeps them.
    """


class ConnectorScheduler(NixlPullConnectorScheduler):
    """One per engine (and so per data-parallel rank). Everything but `judge` runs on the engine's thread."""

    def __init__(
        self, vllm_config: "VllmConfig", engine_id: str, kv_cache_config: "KVCacheConfig", config: ConnectorConfig
    ) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)
        parallel = vllm_config.parallel_config
        self.accounts = Counters()
        self.accounts.capacity(node_capacity(vllm_config, kv_cache_config))
        self._shapes = group_shapes(kv_cache_config)
        self._gate = ParamsValidator(config.role, Expected(self._shapes, config.keys, config.allowed_hosts))
        ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
        self._leases = LeaseTable(ranks=ranks, memory=REMEMBERED_FOR, capacity=MOST_REMEMBERED)
        self._prefill = TicketIssuer(
            leases=self._leases,
            hand_overs=HandOvers(memory=REMEMBERED_FOR, capacity=MOST_REMEMBERED),
            accounts=self.accounts,
            keys=config.keys,
            block_sizes=tuple(shape.block_size for shape in self._shapes),
            make_alias=lambda: secrets.token_urlsafe(ALIAS_BYTES),
            now=time.monotonic,
            wall=time.time,
        )
        self._quarantine = Quarantine()
        self._decode = ReadTracker(
            accounts=self.accounts,
            quarantine=self._quarantine,
            ranks=ranks,
            retries=config.read_retries,
            make_nonce=lambda: secrets.token_hex(8),
        )
        self.adopt(node_fingerprint(vllm_config, kv_cache_config))
        self._adapters = Adapters(lora_settings(vllm_config))
        self._ledger = TokenAccounting(self.accounts)
        self._listener: Listener | None = None
        self._keys = config.keys
        self._connections = config.side_channel_connections
        if not config.keys:
            log.warning(
                "Tickets are neither signed nor checked for a signature: give prefill and decode nodes a common key "
                "(pdproxy_key_file or PDPROXY_TICKET_KEYS) wherever others can reach them."
            )

    def adopt(self, fingerprint: Fingerprint) -> None:
        """Give out tickets with this fingerprint, and take only those that have the same."""
        self._prefill.fingerprint = self._fingerprint = fingerprint
        self._gate = replace(self._gate, expected=replace(self._gate.expected, fingerprint=fingerprint))

    # ---- a request arrives

    def on_new_request(self, request: "Request") -> None:
        """Judge the request's `kv_transfer_params`, whoever wrote them; vLLM then sees clean ones or none."""
        if not isinstance(request.kv_transfer_params, ValidatedParams):
            order = self._gate.judge(request.kv_transfer_params, self._facts(request))
            params = self._take(request, order)
            request.kv_transfer_params = None if params is None else ValidatedParams(params)
        super().on_new_request(request)

    def _facts(self, request: "Request") -> RequestFacts:
        num_prompt_tokens = request.num_prompt_tokens
        ending = request.abort_immediately
        adapter = self._adapters.content(request.lora_request if request.kv_transfer_params else None)
        return RequestFacts(
            suitable=None if ending else self._unsuitable(request) or adapter.unknown,
            expected_tokens=None if ending else self._get_remote_prefill_token_count(num_prompt_tokens),
            digest=lambda num_tokens: prompt_digest(request, num_tokens, adapter.digest),
        )

    def _unsuitable(self, request: "Request") -> str | None:
        if not is_plain(request):
            return "prompt embeddings have no digest"
        if names_media_itself(request):
            return "a media item is named by its sender, not by its content"
        if request.resumable:
            return "a session's prompt still grows"
        if request.skip_reading_prefix_cache:
            return "prompt log-probabilities need every token computed here"
        if request.num_prompt_tokens <= self._prefill_backoff():
            return "the prompt is too short to hand over"
        return None if usable_name(request.request_id) else "the request id cannot stand in a ticket"

    def _take(self, request: "Request", order: Action) -> dict[str, Any] | None:
        match order:
            case ComputeLocally():
                return None
            case IssueTicket():
                return order.params() if self._prefill.arrive(request.request_id, order) else None
            case ReadTicket(ticket):
                self._decode.accept(request, ticket)
                return ticket.params()
            case ReleaseHandOver(hand_over):
                self._prefill.release(hand_over)
                return None
            case Refusal(reason, detail):
                self._refuse(request.request_id, reason, detail)
                return None

    def _refuse(self, request_id: str, reason: RefusalReason, detail: str) -> None:
        self.accounts.refused(reason)
        log.warning("Request %s: kv_transfer_params refused (%s): %s. Computing locally.", request_id, reason, detail)

    # ---- a step is planned

    def update_state_after_alloc(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        """vLLM plans the read; we order its attempt, and note where the prompt's tokens come from."""
        params = request.kv_transfer_params
        reads = params is not None and bool(params.get("do_remote_prefill"))
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if request.num_computed_tokens > 0:
            # Back from a load. Of reads of ours nothing waits any more: they were settled with the workers' report.
            self._ledger.loaded(request.request_id, request.num_computed_tokens)
        elif request.num_preemptions == 0:
            self._plan(request, num_external_tokens, blocks if reads else None)
        if reads:
            every = [block for group in blocks.blocks for block in group]
            hit = self._get_remote_prefill_token_count(request.num_prompt_tokens) - num_external_tokens
            self._decode.order(request.request_id, blocks=every, hit=hit, pull=num_external_tokens)

    def _plan(self, request: "Request", pulled: int, allocated: "KVCacheBlocks | None") -> None:
        stats = request.prefill_stats
        if stats is None:
            return
        hit = stats.num_local_cached_tokens
        loaded = stats.num_external_cached_tokens - pulled
        computed = stats.num_prompt_tokens - hit - pulled - loaded
        blocks = self._blocks(allocated) if allocated is not None and pulled else {}
        self._ledger.plan(request.request_id, PromptTokens(hit, pulled, computed, blocks, loaded))

    def _blocks(self, allocated: "KVCacheBlocks") -> dict[Group, tuple[int, int]]:
        """Blocks (hit, pulled) by kind: those that the prefix cache had already, and those that the read fills."""
        to_pull = self.get_exchange_clipped_blocks(allocated.get_unhashed_block_ids_all_groups())
        counts: dict[Group, tuple[int, int]] = {"attention": (0, 0), "state": (0, 0)}
        for shape, group, ids in zip(self._shapes, self.kv_cache_config.transfer_group_ids, to_pull, strict=True):
            kind: Group = "state" if shape.kind is GroupKind.STATE else "attention"
            hit, pulled = counts[kind]
            cached = sum(block.block_hash is not None and not block.is_null for block in allocated.blocks[group])
            counts[kind] = (hit + cached, pulled + len(ids))
        return counts

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> ConnectorMetadata:
        """vLLM's orders to the workers, with ours beside them."""
        meta = ConnectorMetadata.extending(super().build_connector_meta(scheduler_output))
        orders = self._prefill.take_orders()
        meta.readers, meta.releases = orders.readers, orders.releases
        meta.aliases, meta.retired = orders.aliases, orders.retired
        meta.reads = self._decode.take_orders(meta.reqs_to_recv)
        meta.idle = scheduler_output.total_num_scheduled_tokens == 0
        return meta

    # ---- a step is done

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        """Close the books of this step; vLLM frees blocks only after it."""
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, WorkerReport):
            self._prefill.hear(report.reads_seen)
            for given in self._decode.hear(report):
                self._give_back(given)
        self._prefill.sent(connector_output.finished_sending or ())
        super().update_connector_output(connector_output)
        self._settle(connector_output.finished_recving or set(), connector_output.failed_recving)

    def _settle(self, finished: set[str], failed: set[str]) -> None:
        for request_id in finished:
            if request_id in failed:
                self._ledger.forget(request_id)
            else:
                self._ledger.good(request_id)
        settled = self._decode.settle(finished, failed)
        for request in settled.again:
            request.kv_transfer_params["do_remote_prefill"] = True
            super().on_new_request(request)
        for given in settled.give_back:
            self._give_back(given)

    def _give_back(self, given: TicketToReturn) -> None:
        """Have vLLM give notice for a ticket that will not be read, as for a request that ended before its read."""
        given.request.kv_transfer_params["do_remote_prefill"] = True
        super().request_finished(given.request, ())
        self._decode.give_back(given)

    # ---- a request ends

    def request_finished(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Answer a prefill leg with a ticket and keep its blocks; let everything else go."""
        request_id = request.request_id
        params = request.kv_transfer_params or {}
        if request.num_output_tokens > 0:
            # A load that ran within a step: nothing else tells that it is over.
            self._ledger.loaded(request_id, request.num_computed_tokens)
        self._ledger.forget(request_id)
        adapter = self._adapters.content(request.lora_request if params else None)
        if params.get("do_remote_decode") and (adapter.unknown or not self._prefill.wanted(request_id)):
            self._reqs_not_processed.add(request_id)
            self._reqs_need_save.pop(request_id, None)
            self._prefill.drop(request_id)
            return False, None
        held, answer = super().request_finished(request, block_ids)
        if not params.get("do_remote_decode"):
            self._decode.leave(request_id)
            return held, answer
        if not held or answer is None:
            self._prefill.drop(request_id)
            return False, None
        digest = prompt_digest(request, answer["remote_num_tokens"], adapter.digest)
        return True, self._prefill.issue(request_id, answer, digest)

    # ---- the engine starts and stops

    def bind_gpu_block_pool(self, pool: "BlockPool") -> None:
        """vLLM's block pool, for the quarantine."""
        self._quarantine.bind(pool)

    def judge(self, engine_id: str, alias: str, nonce: str) -> Verdict:
        """The side channel's answer to a decode node; called in the listener's thread."""
        return self._leases.judge(alias, nonce) if engine_id == self.engine_id else Verdict.UNKNOWN

    def set_xfer_handshake_metadata(self, metadata: dict[tuple[int, int], Any]) -> None:
        """Complete the fingerprint, and start the side channel, ours in the place of vLLM's.

        Raises SideChannelError when the port is taken.
        """
        if self._listener is not None:
            return
        for payload in metadata.values():
            if not isinstance(payload, NixlHandshakePayload):
                raise TypeError(f"expected NixlHandshakePayload, got {type(payload).__name__}")
        self.adopt(self._fingerprint.extended(rank_parts(metadata.values())))
        self.accounts.fingerprint(all_parts(self._fingerprint))
        log.info("Fingerprint %s: %s", self._fingerprint.digest, dict(self._fingerprint.parts))
        encoded = {ranks: msgspec.msgpack.encode(payload) for ranks, payload in metadata.items()}
        self._listener = Listener(
            self.side_channel_host,
            self.side_channel_port,
            encoded,
            self.judge,
            self.accounts,
            engine_id=self.engine_id,
            keys=self._keys,
            limits=Limits(self._connections, self._connections // 2),
        )
        self._listener.start()

    def has_pending_push_work(self) -> bool:
        """Whether an idle engine must step on, since only steps carry orders to workers and their reports back.

        Once, to tell its capacity before any request comes; while blocks are kept from the pool under a transfer that
        was given up; and until every notice that the workers were to give is given. See `worker_side` on how such
        steps are spaced.
        """
        unfinished = self._reqs_need_recv or self._quarantine or self._decode.owes_notice
        return self.accounts.untold_levels() or bool(unfinished) or bool(super().has_pending_push_work())

    def take_stats(self) -> ConnectorStats | None:
        """The scheduler side's accounts since the last call."""
        return drained(self.accounts)

    def shutdown(self) -> None:
        """Stop the side channel."""
        if self._listener is not None:
            self._listener.stop()
            self._listener = None
        super().shutdown()
