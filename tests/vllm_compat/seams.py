"""The seams with vLLM that are written down by hand. `check` adds those that are found in the connector's source.

vLLM promises none of what is listed here. `test_seams` compares all seams between the tested versions. Methods that the
connector overrides are found in its source, too, and `test_every_override_of_the_list_is_one` compares them with
`OVERRIDES`: a hook that vLLM renames would otherwise pass for a method of our own. Methods that the connector wraps in
place, and overrides in no class of its own, stand in `UNSEEN`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from connector.journal import FINISH_REASONS
from connector.messages import HANDSHAKE

V1 = "vllm.distributed.kv_transfer.kv_connector.v1"
NIXL = f"{V1}.nixl"
SCHEDULER = f"{NIXL}.pull_scheduler:NixlPullConnectorScheduler"
WORKER = f"{NIXL}.pull_worker:NixlPullConnectorWorker"
MULTI = f"{V1}.multi_connector"
PROM_METRICS = f"{V1}.metrics:KVConnectorPromMetrics"
SCHEDULING = "vllm.v1.core.sched.scheduler:Scheduler"
OUTPUTS = "vllm.v1.engine.output_processor"
FREE_QUEUE = "vllm.v1.core.kv_cache_utils:FreeKVCacheBlockQueue"
OPENAI = "vllm.entrypoints.openai"
CPU_RUNNER = "vllm.v1.worker.cpu_model_runner:CPUModelRunner"

HAND_OVERS = "hand-overs"
FINGERPRINT = "fingerprint"
METRICS = "metrics"
BOUNDARY = "resume boundary"
KEEPS = "keeps"
RESUMED = "resumed requests"
ROUTES = "node's own routes"
STREAMS = "journaled streams"
TIERS = "tiers"
CPU = "seeded CPU nodes"

FEATURES: Mapping[str, str] = {
    "cpu_worker": CPU,
    "endpoints": ROUTES,
    "eviction_order": KEEPS,
    "journaled_response": STREAMS,
    "keeps": KEEPS,
    "node_fingerprint": FINGERPRINT,
    "replay": STREAMS,
    "resume_boundary": BOUNDARY,
    "resumed_requests": RESUMED,
    "stats": METRICS,
    "streams": STREAMS,
    "tiers": TIERS,
}
"""Module or package of the connector → the feature that it serves. All others serve hand-overs."""

OVERRIDES: Mapping[str, str] = {
    "vllm.plugins.endpoint_plugins.interface:EndpointPlugin": "attach_router init_state",
    "vllm.v1.worker.cpu_worker:CPUWorker": "init_device",
    CPU_RUNNER: "_update_states",
    PROM_METRICS: "__init__ observe",
    f"{MULTI}:MultiConnector": "__init__ bind_connector_metadata bind_kv_cache_manager build_connector_meta "
    "build_connector_worker_meta build_kv_connector_stats build_prom_metrics get_block_ids_with_load_errors "
    "get_kv_connector_stats get_num_new_matched_tokens get_required_kvcache_layout get_transfer_results "
    "handle_preemptions has_pending_push_work request_finished_all_groups requires_piecewise_for_cudagraph "
    "set_xfer_handshake_metadata_pp_aware supports_divergent_local_hybrid_hits update_connector_output "
    "update_state_after_alloc",
    f"{MULTI}:MultiKVConnectorStats": "aggregate to_dict",
    f"{NIXL}.connector:NixlPullConnector": "__init__ bind_kv_cache_manager build_connector_worker_meta "
    "build_kv_connector_stats build_prom_metrics get_kv_connector_stats requires_kv_delivery supports_sleep_mode",
    f"{NIXL}.stats:NixlKVConnectorStats": "is_empty reduce reset",
    f"{NIXL}.stats:NixlPromMetrics": "__init__ observe",
    SCHEDULER: "__init__ _prefill_backoff build_connector_meta "
    "get_num_new_matched_tokens has_pending_push_work on_new_request request_finished set_xfer_handshake_metadata "
    "shutdown update_connector_output update_state_after_alloc",
    WORKER: "__init__ _engines_with_inflight_transfers _get_new_notifs _nixl_handshake "
    "_read_blocks_for_req get_transfer_results register_kv_caches shutdown start_load_kv",
    f"{V1}.base:KVConnectorWorkerMetadata": "aggregate",
    FREE_QUEUE: "append_n popleft_n remove",
}
"""Class of vLLM → its methods that the connector overrides.

`supports_divergent_local_hybrid_hits` stands here for MultiConnector alone. NixlPullConnector's own is inherited, and
is True: vLLM then counts a local hit by attention blocks alone. `ConnectorScheduler._offer` subtracts whatever vLLM
counts."""

UNSEEN: Mapping[str, Mapping[str, str]] = {
    HAND_OVERS: {
        WORKER: "get_kv_connector_stats",
        # The connector wraps the next two.
        "vllm.v1.engine.core:EngineCore": "preprocess_add_request",
        SCHEDULING: "add_request",
        f"{NIXL}.metadata:NixlConnectorMetadata": "reqs_not_processed reqs_to_recv",
        f"{NIXL}.metadata:NixlHandshakePayload": "agent_metadata_bytes compatibility_hash",
        f"{NIXL}.metadata:RemoteMeta": "block_ids request_id",
        f"{NIXL}.stats:NixlKVConnectorStats": "record_notification_after_expiry",
        f"{V1}.base:KVConnectorTransferResults": "finished_sending",
        "vllm.v1.core.sched.output:NewRequestData": "req_id",
        "vllm.v1.request:Request": "skip_reading_prefix_cache",
    },
    FINGERPRINT: {
        f"{NIXL}.metadata:NixlAgentMetadata": "attn_backend_name block_lens block_size kv_cache_layout",
        "vllm.config:ModelConfig": "tokenizer tokenizer_mode tokenizer_revision",
    },
    KEEPS: {
        "vllm.v1.core.block_pool:BlockPool": "free_block_queue",
        "vllm.v1.core.kv_cache_manager:KVCacheManager": "get_computed_blocks_for_connector",
        "vllm.v1.core.kv_cache_utils:KVCacheBlock": "is_null pool ref_cnt",
    },
    RESUMED: {
        "vllm.v1.request:Request": "all_token_ids",
        "vllm.v1.structured_output.request:StructuredOutputRequest": "_grammar grammar reasoner reasoning_ended "
        "reasoning_parser_kwargs",
    },
    ROUTES: {"vllm.config:KVTransferConfig": "is_kv_consumer"},
    STREAMS: {
        "vllm.config:ModelConfig": "get_vocab_size",
        "vllm.entrypoints.anthropic.serving:AnthropicServingMessages": "engine_client",
        f"{OPENAI}.chat_completion.serving:OpenAIServingChat": "engine_client",
        f"{OPENAI}.completion.serving:OpenAIServingCompletion": "engine_client",
        f"{OPENAI}.responses.serving:OpenAIServingResponses": "create_responses enable_store engine_client tool_server",
        "vllm.outputs:CompletionOutput": "finish_reason index stop_reason token_ids",
        "vllm.outputs:RequestOutput": "num_cache_creation_tokens num_cached_tokens",
        "vllm.sampling_params:SamplingParams": "extra_args",
        "vllm.v1.engine.async_llm:AsyncLLM": "_add_request add_request engine_core generate model_config "
        "notify_kv_transfer_request_rejected output_processor",
        "vllm.v1.engine.core_client:AsyncMPClient": "add_request_async",
        "vllm.v1.engine.detokenizer:IncrementalDetokenizer": "num_output_tokens",
        "vllm.v1.engine.logprobs:LogprobsProcessor": "num_logprobs",
        f"{OUTPUTS}:OutputProcessor": "abort_requests process_outputs tracing_enabled",
        f"{OUTPUTS}:RequestOutputCollector": "close get get_nowait",
        f"{OUTPUTS}:RequestState": "parent_req queue request_index",
        "vllm.v1.engine.parallel_sampling:ParentRequest": "child_requests",
        "vllm.v1.engine:EngineCoreOutput": "finish_reason new_logprobs new_token_ids request_id stop_reason",
    },
    TIERS: {
        f"{MULTI}:MultiConnector": "_get_connector_classes_and_configs",
        f"{MULTI}:MultiKVConnectorMetadata": "extra_async_saves metadata",
    },
    CPU: {"vllm.v1.core.sched.output:NewRequestData": "req_id"},
}
"""Feature → class of vLLM → members that the connector uses through a variable, where the scan does not see it."""


@dataclass(frozen=True, slots=True)
class Inside:
    """Something that no signature shows: the connector relies on what stands in a method, a class or a constant.

    `where`: `module:Class.method` or `module:NAME`. `holds`: texts that must stand in it, as `ast.unparse` writes them.
    """

    feature: str
    where: str
    why: str
    holds: tuple[str, ...] = ()


TICKET_FIELDS = (
    "remote_engine_id",
    "remote_request_id",
    "remote_host",
    "remote_port",
    "tp_size",
    "dcp_size",
    "pp_size",
    "remote_num_tokens",
    "remote_block_ids",
)
"""Fields of vLLM's answer to a prefill leg, which `prefill_tickets` reads and `Ticket.params` writes again."""

INSIDES: tuple[Inside, ...] = (
    Inside(
        HAND_OVERS,
        f"{SCHEDULER}.update_state_after_alloc",
        "an entry of `_reqs_need_recv` has four parts: with others, vLLM's reads themselves have changed",
        ("= (request, local_block_ids, local_num_computed_blocks, num_external_tokens > 0)",),
    ),
    Inside(
        HAND_OVERS,
        f"{SCHEDULER}.build_connector_meta",
        "an entry of `_reqs_need_recv` has four parts",
        ("for req_id, (req, block_ids, cached, awaiting_kvs) in self._reqs_need_recv.items()",),
    ),
    Inside(
        HAND_OVERS,
        f"{WORKER}._nixl_handshake",
        "`messages` parses the message of three parts, and `side_channel` replies with two frames",
        ("encode((GET_META_MSG, remote_pp_rank, remote_rank))", "assert len(reply_parts) == 2"),
    ),
    Inside(
        HAND_OVERS,
        f"{NIXL}.metadata:GET_META_MSG",
        "`messages` knows the handshake by this name",
        (repr(HANDSHAKE),),
    ),
    Inside(
        HAND_OVERS,
        f"{WORKER}._read_blocks",
        "`messages` parses the notice of a read",
        ("f'{remote_request_id}:{expected_consumers}'.encode()",),
    ),
    Inside(
        HAND_OVERS,
        f"{WORKER}._read_blocks_for_req",
        "`messages` parses the notice of a read",
        ("f'{meta.remote.request_id}:{plan.local_consumers}'.encode()",),
    ),
    Inside(
        HAND_OVERS,
        f"{WORKER}._send_heartbeats",
        "`messages` parses the heartbeat",
        ("('HB:' + ','.join(hb_info.req_ids)).encode()",),
    ),
    Inside(
        HAND_OVERS,
        f"{SCHEDULER}.request_finished",
        "`prefill_tickets` reads the answer to a prefill leg",
        tuple(f" {field}=" for field in TICKET_FIELDS),
    ),
    Inside(
        HAND_OVERS,
        f"{NIXL}.metadata:NixlConnectorMetadata.add_new_req_to_recv",
        "a ticket must have every param that a read requires",
    ),
    Inside(
        HAND_OVERS,
        f"{V1}.base:KVConnectorTransferResults",
        "the results of a worker's reads have these sets and no others",
    ),
    Inside(
        KEEPS,
        "vllm.v1.core.block_pool:BlockPool.get_new_blocks",
        "`eviction_order` knows of every block that is given out",
        ("self.free_block_queue.popleft_n(num_blocks)",),
    ),
    Inside(
        RESUMED,
        f"{SCHEDULING}._handle_blocked_waiting_request",
        "a request whose grammar failed ends; `resumed_requests` ends those so whose order it refuses",
        ("self.grammar_compile_error_reqs",),
    ),
    Inside(
        STREAMS,
        "vllm.v1.engine:FINISH_REASON_STRINGS",
        "an `EngineCoreOutput` has the number of a reason; `journal` names those after which a stream can go on",
        tuple(map(repr, FINISH_REASONS)),
    ),
    Inside(
        CPU,
        f"{CPU_RUNNER}._update_states",
        "a new request gets its output tokens after its state is made and before the batch has read it",
        ("self.input_batch.add_request(request)",),
    ),
    Inside(
        CPU,
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner._bookkeeping_sync",
        "a discarded token's random numbers are taken back by the generator's offset alone",
        ("gen.set_offset(gen.get_offset() - 4)",),
    ),
    Inside(
        CPU,
        "vllm.v1.sample.ops.topk_topp_sampler:TopKTopPSampler.forward_cpu",
        "the random numbers that sampling a token takes",
        (
            "torch.randint(0, 2 ** 31, (1,), generator=gen, dtype=torch.long)",
            "torch.randint(0, 2 ** 31, (batch_size,), dtype=torch.long)",
        ),
    ),
)

DIFFERENCES: Mapping[str, Mapping[str, str]] = {
    "0.33.0": {
        f"{NIXL}.connector:NixlPullConnector.supports_sleep_mode": (
            "0.33.0 asks a connector before the node sleeps; 0.32.0 has no such hook."
        ),
        "vllm.v1.kv_cache_interface.get_mamba_prefill_checkpoint_position": (
            "0.33.0 adds num_hash_lookahead_tokens, which is 0 on every node with a KV connector "
            "(VllmConfig.num_hash_lookahead_tokens)."
        ),
        "vllm.v1.core.kv_cache_manager:KVCacheManager.get_computed_blocks_for_connector": (
            "0.33.0 takes a bound on the hit's length, too, which is None unless it is given."
        ),
        "vllm.v1.engine.EngineCoreOutput": (
            "0.33.0 adds `error`, which stays None: `replay` makes outputs of streams that go on or end well."
        ),
        "vllm.v1.structured_output.request.StructuredOutputRequest": (
            "0.33.0 adds masked_reasoning_end_ids, which its StructuredOutputManager fills when it needs them."
        ),
        f"{WORKER}._read_blocks_for_req": (
            "0.33.0 shakes hands again with a prefill engine that has registered its memory anew, as after a sleep. "
            "Our connector refuses sleep mode, and its tickets name no registration, which counts as the first."
        ),
        f"{SCHEDULER}.request_finished": (
            "0.33.0 adds remote_registration_generation to the answer. Our tickets leave it out: no read requires it."
        ),
        f"{NIXL}.metadata:NixlConnectorMetadata.add_new_req_to_recv": (
            "0.33.0 reads remote_registration_generation, or takes 0 for it. It requires the same params."
        ),
        f"{SCHEDULING}._handle_blocked_waiting_request": (
            "0.33.0 keeps the error beside the request's id, for the answer. The request ends in the same way."
        ),
    }
}
"""Version → seam → why the connector works with what this version has otherwise than the installed one."""
