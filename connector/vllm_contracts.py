"""What this package relies on of vLLM: hooks, calls, attributes, constants, and shapes inside of methods. Pure.

vLLM promises none of it: hooks change their parameters between releases, and so do tuples and messages that only its
own classes exchange. `shape_check` compares it with the running vLLM when a node starts. `tests.vllm_compat` lists what
the package touches, and a test holds that everything on that list is described here.
"""

from __future__ import annotations

from connector.contract import (
    PROPERTY,
    AtLeast,
    AtMost,
    Contract,
    Exactly,
    Inner,
    calls_of,
    dict_keywords,
    entry_sizes,
    mentions,
    message_sizes,
    notif_texts,
    reply_frames,
    required_keys,
    texts,
)

TESTED = ("0.32.0", "0.33.0")
"""Versions of vLLM. 0.32.0 is run by the tests; 0.33.0 was read, and its shapes are compared by a test."""

V1 = "vllm.distributed.kv_transfer.kv_connector.v1"
CONNECTOR = f"{V1}.nixl.connector:NixlPullConnector"
SCHEDULER = f"{V1}.nixl.pull_scheduler:NixlPullConnectorScheduler"
WORKER = f"{V1}.nixl.pull_worker:NixlPullConnectorWorker"
METADATA = f"{V1}.nixl.metadata:NixlConnectorMetadata"
RESULTS = f"{V1}.base:KVConnectorTransferResults"
MULTI = f"{V1}.multi_connector:MultiConnector"
PROM_METRICS = f"{V1}.metrics:KVConnectorPromMetrics"
RUNNER = "vllm.v1.worker.cpu_model_runner:CPUModelRunner"
CPU_WORKER = "vllm.v1.worker.cpu_worker:CPUWorker"
SCHEDULING = "vllm.v1.core.sched.scheduler:Scheduler"
ENGINE = "vllm.v1.engine.core:EngineCore"
REQUEST = "vllm.v1.request:Request"
SCHEDULING_INTERFACE = "vllm.v1.core.sched.interface:SchedulerInterface"
GRAMMARS = "vllm.v1.structured_output:StructuredOutputManager"
STRUCTURED = "vllm.v1.structured_output.request:StructuredOutputRequest"
SAMPLER = "vllm.v1.sample.ops.topk_topp_sampler:TopKTopPSampler"

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
"""Fields of vLLM's answer to a prefill leg that `prefill_tickets` reads, and that `Ticket.params` has again."""

HAND_OVERS = Contract(
    hooks={
        CONNECTOR: {
            "__init__": "self vllm_config role kv_cache_config",
            "bind_gpu_block_pool": "self gpu_block_pool",
            "build_connector_worker_meta": "self",
            "build_kv_connector_stats": "cls data=",
            "build_prom_metrics": "cls vllm_config metric_types labelnames per_engine_labelvalues",
            "get_kv_connector_stats": "self",
        },
        SCHEDULER: {
            "__init__": "self vllm_config engine_id kv_cache_config",
            "_prefill_backoff": "self",
            "_truncate_request_for_prefill": "self request",
            "build_connector_meta": "self scheduler_output",
            "get_num_new_matched_tokens": "self request num_computed_tokens",
            "has_pending_push_work": "self",
            "on_new_request": "self request",
            "request_finished": "self request block_ids",
            "set_xfer_handshake_metadata": "self metadata",
            "shutdown": "self",
            "update_connector_output": "self connector_output",
            "update_state_after_alloc": "self request blocks num_external_tokens",
        },
        WORKER: {
            "__init__": "self vllm_config engine_id kv_cache_config",
            "_engines_with_inflight_transfers": "self",
            "_get_new_notifs": "self",
            "_nixl_handshake": "self host port remote_tp_size expected_engine_id ...",
            "_pop_done_transfers": "self transfers",
            "_read_blocks_for_req": "self req_id meta",
            "get_transfer_results": "self",
            "register_kv_caches": "self kv_caches",
            "shutdown": "self",
            "start_load_kv": "self metadata",
        },
        f"{V1}.base:KVConnectorWorkerMetadata": {"aggregate": "self other"},
        f"{V1}.nixl.stats:NixlKVConnectorStats": {"is_empty": "self", "reduce": "self", "reset": "self"},
        f"{V1}.nixl.stats:NixlPromMetrics": {
            "__init__": "self vllm_config metric_types labelnames per_engine_labelvalues",
            "observe": "self transfer_stats_data engine_idx=",
        },
    },
    calls={
        SCHEDULER: {"get_exchange_clipped_blocks": "self block_ids"},
        WORKER: {
            "_cleanup_remote_engine": "self engine_id log_eviction=",
            "_handle_heartbeat": "self payload",
            "get_kv_connector_stats": "self",
            "_log_failure": "self failure_type req_id msg= error= meta=",
        },
        "vllm.v1.core.kv_cache_manager:KVCacheBlocks": {"get_unhashed_block_ids_all_groups": "self"},
        REQUEST: {"append_output_token_ids": "self token_ids"},
        GRAMMARS: {"accept_tokens": "self request new_token_ids"},
        SCHEDULING_INTERFACE: {"get_kv_connector": "self"},
        ENGINE: {"preprocess_add_request": "self request"},
    },
    attributes={
        CONNECTOR: ("connector_scheduler", "connector_worker", "engine_id"),
        SCHEDULER: (
            "side_channel_host",
            "side_channel_port",
        ),
        METADATA: ("reqs_not_processed", "reqs_to_recv"),
        WORKER: (
            "_handshake_futures",
            "_invalid_remote_engines",
            "_recv_failures",
            "_recving_metadata",
            "_recving_transfers",
            "_remote_agents",
            "_reqs_to_process",
            "_reqs_to_send",
            "attn_backends",
            "device_type",
            "kv_transfer_config",
            "nixl_backends",
            "nixl_memory_type",
            "nixl_wrapper",
            "transfer_topo",
            "xfer_handshake_metadata",
            "xfer_stats",
        ),
        f"{V1}.nixl.stats:NixlKVConnectorStats": ("data", "record_notification_after_expiry"),
        f"{V1}.nixl.metadata:RemoteMeta": ("block_ids", "engine_id", "host", "port", "request_id"),
        f"{V1}.nixl.metadata:ReqMeta": (
            "awaiting_kvs",
            "dcp_size",
            "local_block_ids",
            "pp_size",
            "remote",
            "tp_size",
        ),
        f"{V1}.nixl.metadata:NixlAgentMetadata": ("attn_backend_name", "block_lens", "block_size", "kv_cache_layout"),
        f"{V1}.nixl.metadata:NixlHandshakePayload": ("agent_metadata_bytes", "compatibility_hash"),
        "vllm.config:CacheConfig": ("enable_prefix_caching", "prefix_caching_hash_algo", "prefix_match_unit"),
        "vllm.config:LoadConfig": ("download_dir", "load_format"),
        "vllm.config:ModelConfig": (
            "architecture",
            "disable_sliding_window",
            "dtype",
            "get_total_num_kv_heads",
            "hf_config",
            "max_model_len",
            "model",
            "model_weights",
            "multimodal_config",
            "quantization",
            "quantization_config",
            "revision",
            "tokenizer",
            "tokenizer_mode",
            "tokenizer_revision",
        ),
        "vllm.config:VllmConfig": (
            "cache_config",
            "kv_transfer_config",
            "load_config",
            "lora_config",
            "max_concurrent_batches",
            "model_config",
            "num_speculative_tokens",
            "parallel_config",
            "scheduler_config",
            "speculative_config",
            "use_v2_model_runner",
        ),
        "vllm.sampling_params:SamplingParams": ("max_tokens", "sampling_type", "thinking_token_budget"),
        "vllm.v1.core.kv_cache_manager:KVCacheBlocks": ("blocks",),
        "vllm.v1.core.sched.output:NewRequestData": ("prefill_token_ids", "req_id"),
        "vllm.v1.core.sched.output:SchedulerOutput": ("scheduled_new_reqs", "total_num_scheduled_tokens"),
        SCHEDULING: ("requests", "structured_output_manager"),
        ENGINE: ("scheduler",),
        "vllm.v1.kv_cache_interface:AttentionSpec": (
            "block_size",
            "dtype",
            "head_size",
            "head_size_v",
            "kv_quant_mode",
            "num_kv_heads",
            "page_size_bytes",
            "state_content_size_bytes",
            "tokens_per_state",
        ),
        "vllm.v1.kv_cache_interface:KVCacheConfig": (
            "kv_cache_groups",
            "num_blocks",
            "transfer_group_ids",
            "transfer_groups",
        ),
        "vllm.v1.kv_cache_interface:MambaSpec": (
            "block_size",
            "mamba_cache_mode",
            "num_prefill_checkpoint_blocks",
            "num_speculative_blocks",
            "shapes",
            "tp_replicated",
        ),
        "vllm.v1.outputs:KVConnectorOutput": (
            "failed_recving",
            "finished_recving",
            "finished_sending",
            "kv_connector_worker_meta",
        ),
        GRAMMARS: ("executor",),
        STRUCTURED: ("_grammar", "grammar", "reasoner", "reasoning_ended", "reasoning_parser_kwargs"),
        REQUEST: (
            "abort_immediately",
            "all_token_ids",
            "block_hashes",
            "is_finished",
            "kv_transfer_params",
            "lora_request",
            "num_computed_tokens",
            "num_output_tokens",
            "num_preemptions",
            "num_prompt_tokens",
            "prefill_stats",
            "prompt_embeds",
            "prompt_is_token_ids",
            "prompt_token_ids",
            "request_id",
            "resumable",
            "sampling_params",
            "skip_reading_prefix_cache",
            "status",
            "structured_output_request",
        ),
    },
    fields={RESULTS: ("finished_sending", "finished_recving", "failed_recving")},
    # As `messages` has it.
    constants={f"{V1}.nixl.metadata:GET_META_MSG": "b'get_meta_msg'"},
    inner=(
        # If an entry has another number of parts, vLLM's reads themselves have changed.
        Inner(
            "the parts of an entry of _reqs_need_recv",
            f"{SCHEDULER}.update_state_after_alloc",
            entry_sizes("_reqs_need_recv"),
            Exactly(("4",)),
        ),
        Inner(
            "the parts of an entry of _reqs_need_recv",
            f"{SCHEDULER}.build_connector_meta",
            entry_sizes("_reqs_need_recv"),
            Exactly(("4",)),
        ),
        # `messages` parses the message, `side_channel` sends the reply.
        Inner(
            "the parts of the handshake's message",
            f"{WORKER}._nixl_handshake",
            message_sizes("GET_META_MSG"),
            Exactly(("3",)),
        ),
        Inner("the frames of the handshake's reply", f"{WORKER}._nixl_handshake", reply_frames, Exactly(("2",))),
        # `messages` parses all three.
        Inner("the notice of a read", f"{WORKER}._read_blocks", notif_texts, Exactly(("{request_id}:{}",))),
        Inner("the notice of a read", f"{WORKER}._read_blocks_for_req", notif_texts, Exactly(("{request_id}:{}",))),
        Inner("the heartbeat", f"{WORKER}._send_heartbeats", texts, AtLeast(("HB:", ","))),
        Inner("the answer to a prefill leg", f"{SCHEDULER}.request_finished", dict_keywords, AtLeast(TICKET_FIELDS)),
        Inner(
            "the params that a read must have",
            f"{METADATA}.add_new_req_to_recv",
            required_keys("kv_transfer_params"),
            AtMost(TICKET_FIELDS),
        ),
        # `resumed_requests` ends a request so, whose order it refuses or whose grammar refuses its tokens.
        Inner(
            "what becomes of a grammar that failed",
            f"{SCHEDULING}._handle_blocked_waiting_request",
            mentions("self.grammar_compile_error_reqs"),
            Exactly(("self.grammar_compile_error_reqs",)),
        ),
    ),
)
"""Of `nixl_connector`, `scheduler` and `worker`."""

DELIVERIES = Contract(
    hooks={
        "vllm.plugins.endpoint_plugins.interface:EndpointPlugin": {
            "attach_router": "self app",
            "init_state": "self engine_client state args",
        },
    },
    calls={},
    attributes={
        "vllm.config:KVTransferConfig": ("is_kv_consumer",),
        "vllm.config:VllmConfig": ("kv_transfer_config",),
        "vllm.engine.protocol:EngineClient": ("vllm_config",),
    },
    fields={},
)
"""Of `endpoints`."""

OUTPUTS = "vllm.v1.engine.output_processor"

STREAMS = Contract(
    hooks={},
    calls={
        "vllm.config:ModelConfig": {"get_vocab_size": "self"},
        "vllm.entrypoints.openai.responses.protocol:ResponsesRequest": {"is_include_output_logprobs": "self"},
        "vllm.entrypoints.openai.responses.serving:OpenAIServingResponses": {
            "create_responses": "self request raw_request="
        },
        "vllm.v1.engine.async_llm:AsyncLLM": {
            "_add_request": "self request prompt parent_req index queue",
            "add_request": "self request_id prompt params",
            "generate": "self prompt sampling_params request_id",
            "notify_kv_transfer_request_rejected": "self request_id kv_transfer_params data_parallel_rank=",
        },
        "vllm.v1.engine.core_client:AsyncMPClient": {"add_request_async": "self request"},
        "vllm.v1.engine.detokenizer:IncrementalDetokenizer": {"num_output_tokens": "self"},
        f"{OUTPUTS}:OutputProcessor": {
            "abort_requests": "self request_ids internal",
            "process_outputs": "self engine_core_outputs",
        },
        f"{OUTPUTS}:RequestOutputCollector": {"close": "self", "get": "self", "get_nowait": "self"},
    },
    attributes={
        "vllm.entrypoints.anthropic.serving:AnthropicServingMessages": ("engine_client",),
        "vllm.entrypoints.openai.chat_completion.serving:OpenAIServingChat": ("engine_client",),
        "vllm.entrypoints.openai.completion.serving:OpenAIServingCompletion": ("engine_client",),
        "vllm.entrypoints.openai.responses.protocol:ResponsesRequest": (
            "background",
            "previous_response_id",
            "store",
            "tools",
        ),
        "vllm.entrypoints.openai.responses.serving:OpenAIServingResponses": (
            "enable_store",
            "engine_client",
            "tool_server",
        ),
        "vllm.outputs:CompletionOutput": ("finish_reason", "index", "stop_reason", "token_ids"),
        "vllm.outputs:RequestOutput": ("num_cache_creation_tokens", "num_cached_tokens", "outputs"),
        "vllm.sampling_params:SamplingParams": ("extra_args", "max_tokens", "n", "output_kind", "prompt_logprobs"),
        "vllm.v1.engine.async_llm:AsyncLLM": ("engine_core", "model_config", "output_processor"),
        "vllm.v1.engine.logprobs:LogprobsProcessor": ("num_logprobs",),
        f"{OUTPUTS}:OutputProcessor": ("request_states", "tracing_enabled"),
        f"{OUTPUTS}:RequestOutputCollector": ("request_id",),
        f"{OUTPUTS}:RequestState": (
            "detokenizer",
            "is_prefilling",
            "logprobs_processor",
            "num_cache_creation_tokens",
            "num_cached_tokens",
            "parent_req",
            "queue",
            "remote_prefill_cached_tokens",
            "request_id",
            "request_index",
            "sent_tokens_offset",
            "stream_interval",
        ),
        "vllm.v1.engine.parallel_sampling:ParentRequest": ("child_requests",),
        "vllm.v1.engine:EngineCoreOutput": (
            "finish_reason",
            "new_logprobs",
            "new_token_ids",
            "request_id",
            "stop_reason",
        ),
        "vllm.v1.engine:EngineCoreRequest": ("request_id", "sampling_params"),
        "vllm.v1.outputs:LogprobsLists": ("logprob_token_ids", "logprobs", "sampled_token_ranks"),
    },
    fields={},
    # `journal` names those that a stream can go on after; an `EngineCoreOutput` has the number.
    constants={"vllm.v1.engine:FINISH_REASON_STRINGS": "('stop', 'length', 'abort', 'error', 'repetition')"},
)
"""Of `streams` and `replay`."""

TIERS = Contract(
    hooks={
        MULTI: {
            "__init__": "self vllm_config role kv_cache_config",
            "bind_connector_metadata": "self connector_metadata",
            "bind_kv_cache_manager": "self kv_cache_manager",
            "build_connector_meta": "self scheduler_output",
            "build_connector_worker_meta": "self",
            "build_kv_connector_stats": "cls data=",
            "build_prom_metrics": "cls vllm_config metric_types labelnames per_engine_labelvalues",
            "get_block_ids_with_load_errors": "self",
            "get_kv_connector_stats": "self",
            "get_num_new_matched_tokens": "self request num_computed_tokens",
            "get_required_kvcache_layout": "cls vllm_config",
            "get_transfer_results": "self finished_req_ids",
            "handle_preemptions": "self kv_connector_metadata",
            "has_pending_push_work": "self",
            "request_finished_all_groups": "self request block_ids",
            "requires_piecewise_for_cudagraph": "cls extra_config",
            "set_xfer_handshake_metadata_pp_aware": "self metadata",
            "supports_divergent_local_hybrid_hits": PROPERTY,
            "update_connector_output": "self connector_output",
            "update_state_after_alloc": "self request blocks num_external_tokens",
        },
        f"{V1}.multi_connector:MultiKVConnectorStats": {"aggregate": "self other", "to_dict": "self"},
        PROM_METRICS: {
            "__init__": "self vllm_config metric_types labelnames per_engine_labelvalues",
            "observe": "self transfer_stats_data engine_idx=",
        },
    },
    calls={MULTI: {"_get_connector_classes_and_configs": "cls vllm_config"}},
    attributes={
        MULTI: ("_connector_metadata", "_requests_to_connector", "sub_connectors"),
        f"{V1}.multi_connector:MultiKVConnectorMetadata": ("extra_async_saves", "metadata"),
        f"{V1}.multi_connector:MultiKVConnectorStats": ("data",),
        "vllm.config:VllmConfig": ("kv_transfer_config",),
        "vllm.v1.core.kv_cache_manager:KVCacheBlocks": ("blocks",),
        "vllm.v1.core.kv_cache_manager:KVCacheManager": ("block_pool",),
        "vllm.v1.core.sched.output:SchedulerOutput": ("preempted_req_ids",),
        "vllm.v1.kv_cache_interface:KVCacheConfig": ("kv_cache_groups",),
        "vllm.v1.outputs:KVConnectorOutput": (
            "failed_recving",
            "finished_recving",
            "invalid_block_ids",
            "kv_connector_worker_meta",
        ),
        "vllm.v1.request:Request": ("num_tokens", "request_id"),
    },
    fields={RESULTS: ("finished_sending", "finished_recving", "failed_recving")},
)
"""Of `tiers`."""

SEEDED_CPU = Contract(
    hooks={
        RUNNER: {
            "_bookkeeping_sync": "self scheduler_output sampler_output logits hidden_states num_scheduled_tokens",
            "_sample": "self logits spec_decode_metadata",
            "_update_states": "self scheduler_output",
        },
        CPU_WORKER: {"init_device": "self"},
    },
    calls={},
    attributes={
        RUNNER: ("discard_request_mask", "input_batch", "sampler"),
        CPU_WORKER: ("device", "model_runner", "use_v2_model_runner", "vllm_config"),
        "vllm.v1.core.sched.output:NewRequestData": ("prefill_token_ids", "prompt_len", "req_id"),
        "vllm.v1.core.sched.output:SchedulerOutput": ("scheduled_new_reqs",),
        "vllm.v1.worker.gpu_input_batch:CachedRequestState": ("generator", "output_token_ids", "req_id"),
    },
    fields={},
    inner=(
        # Where a new request gets its output tokens: after its state is made, before the batch has read it.
        Inner(
            "how requests enter the batch",
            f"{RUNNER}._update_states",
            calls_of("self.input_batch.add_request"),
            Exactly(("self.input_batch.add_request(request)",)),
        ),
        Inner(
            "the random numbers of a token",
            f"{SAMPLER}.forward_cpu",
            calls_of("torch.randint"),
            Exactly(
                (
                    "torch.randint(0, 2 ** 31, (1,), generator=gen, dtype=torch.long)",
                    "torch.randint(0, 2 ** 31, (batch_size,), dtype=torch.long)",
                )
            ),
        ),
    ),
)
"""Of `cpu_worker`."""
