"""The connector class that a stock vLLM node loads, and the map of this package.

Scheduler process (one per engine; all of it on the engine's thread but the listener's answers):

    Scheduler.add_request ─ on_new_request ──► SchedulerSide: `admission` judges whatever kv_transfer_params hold;
        valid → a fresh, clean dict on the request; refused → None, a log line, a count. Only then does vLLM's own
        on_new_request run (truncation on the prefill node, heartbeats on the decode node).
    schedule ─ get_num_new_matched_tokens, update_state_after_alloc, build_connector_meta ──► vLLM's, and then
        `metadata.ConnectorMetadata` with a `ReadOrder` per read, `readers` per new lease, `releases`.
    update_from_output ─ update_connector_output ──► first the `metadata.WorkerReport` (reads seen → lease table;
        reads ended → accounts and retry; stalled → quarantine), then `finished_sending` → `LeaseTable.end`,
        all of it before vLLM frees a block.
    request end ─ request_finished_all_groups ──► the signed ticket; a lease is opened.
    set_xfer_handshake_metadata ──► `side_channel.Listener(host, port, encoded, judge)`, started and stopped by us:
        `encoded: Mapping[tuple[int, int], bytes]` by (pp rank, tp rank), as vLLM encodes them;
        `judge: Callable[[str, str, str], Verdict]` takes (engine id, request id, nonce), from the listener's thread;
        `start()` raises SideChannelError when the address is taken (vLLM's own hangs); `stop()` joins.

Worker process (per rank): `worker_side.WorkerSide`, a subclass of vLLM's pull worker, made here as
`WorkerSide(vllm_config, engine_id, kv_cache_config, config)` with `config: ConnectorConfig`.
    bind_connector_metadata/start_load_kv(ConnectorMetadata) → reads, leases, releases.
    get_transfer_results → holds a finished read back until its verdict; then finished or failed.
    build_connector_worker_meta() → `WorkerReport | None`, called by the model runner after get_transfer_results.
    get_kv_connector_stats → `stats.ConnectorStats | None`.

Accounts: `stats.Accounts().add(name, amount=1, **labels)` on either side, `take() -> ConnectorStats | None`
empties them for `get_kv_connector_stats`.

On the wire (HTTP), all under `kv_transfer_params`:
    prefill leg   {"do_remote_decode": true, "pdproxy_hand_over": ID, "pdproxy_readers": n}; both of ours optional
    its answer    vLLM's ticket + {"pdproxy": {"v": 1, "digest", "block_sizes", "readers", "issued_at", "signature"}}
    decode leg    the answer's dict, as it is
    release       {"pdproxy_release": ID} with any one-token request to the same node and data-parallel rank
"""
