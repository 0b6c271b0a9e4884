"""One worker rank without an engine: vLLM's own pull worker code over a small working NIXL agent."""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.tp_mapping import TPMapping
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

from connector.config import ConnectorConfig, Role
from connector.metadata import ConnectorMetadata, ReadOrder

PEER = "P"
COMPATIBLE = "the same settings"
HOST = "127.0.0.1"
BLOCK_TOKENS = 16


class Agent:
    """The used part of a NIXL agent. Transfers run until the test ends them; their notif is sent then."""

    def __init__(self) -> None:
        self.states: dict[int, str] = {}
        self.notifs: dict[int, bytes] = {}
        self.blocks: dict[int, tuple[list[int], list[int]]] = {}
        self.sent: list[bytes] = []
        self.inbox: list[bytes] = []
        self.path = "DONE"
        self.probed: list[int] = []
        self.registered: list[Any] = []

    def make_prepped_xfer(
        self, kind: str, local: int, local_ids: Any, remote: int, remote_ids: Any, notif_msg: bytes
    ) -> int:
        handle = len(self.blocks)
        self.blocks[handle] = ([int(one) for one in local_ids], [int(one) for one in remote_ids])
        self.notifs[handle] = notif_msg
        return handle

    def transfer(self, handle: int) -> None:
        self.states[handle] = self.path if handle in self.probed else "PROC"

    def end(self, handle: int, state: str = "DONE") -> None:
        """End a transfer, for the test."""
        self.states[handle] = state
        if state == "DONE":
            self.sent.append(self.notifs[handle])

    def check_xfer_state(self, handle: int) -> str:
        return self.states[handle]

    def get_xfer_telemetry(self, handle: int) -> Any:
        return SimpleNamespace(xferDuration=10, postDuration=1, totalBytes=1, descCount=1)

    def release_xfer_handle(self, handle: int) -> None:
        if self.states.get(handle) == "PROC":
            raise RuntimeError("a live transfer was released")
        self.states.pop(handle, None)

    def check_remote_metadata(self, agent: str) -> bool:
        return True

    def send_notif(self, agent: str, notif_msg: bytes) -> None:
        self.sent.append(notif_msg)

    def release_dlist_handle(self, handle: int) -> None:
        pass

    def remove_remote_agent(self, agent: str) -> None:
        pass

    def get_reg_descs(self, descs: Any, kind: str) -> Any:
        return descs

    def get_xfer_descs(self, descs: Any, kind: str) -> Any:
        return descs

    def register_memory(self, descs: Any, backends: Any = ()) -> None:
        self.registered.append(descs)

    def initialize_xfer(self, kind: str, local: Any, remote: Any, agent: str) -> int:
        """A small read of a probe. It ends at once, as `path` says: "PROC" for a cut, "ERR" for a broken connection."""
        if self.path == "refused":
            raise RuntimeError("the remote agent was disconnected")
        handle = len(self.blocks)
        self.blocks[handle], self.notifs[handle] = ([], []), b""
        self.probed.append(handle)
        return handle

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        found, self.inbox = self.inbox, []
        return {"peer": found} if found else {}


def cache_config() -> KVCacheConfig:
    spec = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=8, dtype=torch.bfloat16)
    return KVCacheConfig(num_blocks=64, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])


def vllm_config() -> Any:
    """The part of the configuration that a rank reads by itself."""
    parallel = SimpleNamespace(decode_context_parallel_size=1, cp_kv_cache_interleave_size=1)
    return SimpleNamespace(parallel_config=parallel)


def settings(**changes: Any) -> ConnectorConfig:
    return ConnectorConfig(role=Role.BOTH, **{"verify_timeout": 30.0, "probe_timeout": 30.0, **changes})


def vllm_state(worker: Any) -> None:
    """The state that vLLM's `__init__`, `register_kv_caches` and handshake leave, as far as reads and notices go."""
    remote = SimpleNamespace(
        remote_tp_size=1, remote_dcp_size=1, remote_block_size=BLOCK_TOKENS, remote_physical_blocks_per_logical=1
    )
    plan = TPMapping(
        source_ranks_per_group=((0,),), all_source_ranks=(0,), rank_to_attention_slot={0: 0}, rank_offset_factor=0
    )

    def add_remote_agent(metadata: Any, *_: Any) -> str:
        """The entries that vLLM's own leaves behind for an engine whose metadata was read."""
        engine = metadata.engine_id
        worker.met.append(engine)
        worker.tp_mappings[engine], worker.dst_region_group_ids[engine] = plan, [0]
        worker.dst_num_blocks[engine], worker.dst_uses_region_group_mapping[engine] = 64, False
        worker.dst_xfer_side_handles[engine] = {0: 1}
        return f"agent of {engine}"

    worker.__dict__.update(
        met=[],
        attn_backends=[SimpleNamespace(get_name=lambda: "GDN_ATTN"), SimpleNamespace(get_name=lambda: "FLASH_ATTN")],
        add_remote_agent=add_remote_agent,
        compat_hash=COMPATIBLE,
        enforce_compat_hash=True,
        pcp_size=1,
        _is_csa_linear=False,
        nixl_wrapper=Agent(),
        device_type="cuda",
        nixl_memory_type="VRAM",
        nixl_backends=["UCX"],
        transfer_topo=SimpleNamespace(
            get_engine_info=lambda engine: remote,
            tp_ratio=lambda size: 1,
            block_size_ratio=lambda size: 1,
            handshake_target_ranks=lambda tp, dcp: [0],
            unregister_remote_engine=lambda engine: None,
        ),
        kv_cache_config=cache_config(),
        engine_id="D",
        tp_rank=0,
        pcp_rank=0,
        pcp_dcp_sharded=False,
        dcp_size=1,
        dcp_rank=0,
        use_mla=False,
        use_host_buffer=False,
        device_id=0,
        enable_permute_local_kv=False,
        enable_heterogeneous_attn_post_process=False,
        block_size=BLOCK_TOKENS,
        num_regions=1,
        block_len_per_layer=[1],
        region_group_ids=[0],
        tp_mappings={PEER: plan},
        dst_region_group_ids={PEER: [0]},
        dst_region_num_blocks={},
        dst_region_mem_types={},
        kv_caches_base_addr={},
        dst_num_blocks={PEER: 64, "D": 64},
        dst_uses_region_group_mapping={PEER: False},
        dst_xfer_side_handles=defaultdict(dict, {PEER: {0: 1}}),
        src_xfer_handles_by_block_size={BLOCK_TOKENS: 2},
        src_xfer_handles_by_tp_ratio={},
        _transfer_layer_group_ids=(),
        _uses_region_group_mapping=False,
        _mixed_mem_types=False,
        _has_mamba=False,
        _is_hma_required=False,
        _bidirectional_kv_xfer_enabled=False,
        _physical_blocks_per_logical_kv_block=1,
        _lease_extension=20,
        _dram_src_handles_by_tp_ratio={},
        _dram_src_handles_by_block_size={},
        _remote_agents=defaultdict(dict, {PEER: {(0, 0): "peer"}}),
        _engine_by_address={(HOST, 1): PEER},
        _failed_remote_engines=set(),
        _invalid_remote_engines=set(),
        _invalid_engine_backoff={},
        _engine_last_active={},
        _engine_clock_offset={},
        _engine_ttl=0,
        _hb_handshake_notif_only=False,
        _recving_metadata={},
        _recving_transfers=defaultdict(list),
        _reqs_to_send={},
        _reqs_to_process=set(),
        _replicated_pcp_done_sending=set(),
        _invalid_block_ids=queue.Queue(),
        _failed_recv_reqs=queue.Queue(),
        _recv_failures=set(),
        _pending_recv_notifs={},
        _ready_requests=queue.Queue(),
        _handshake_futures={},
        _handshake_lock=threading.RLock(),
        _handshake_initiation_executor=ThreadPoolExecutor(1),
        _registered_descs=[],
        consumer_notification_counts_by_req=defaultdict(int),
        expected_consumer_notifications_by_req={},
        device_kv_caches={},
        host_xfer_buffers={},
    )


def read_step(
    request_id: str, nonce: str, port: int, *, local: list[int], remote: list[int], engine: str = PEER
) -> ConnectorMetadata:
    """The metadata of a step that orders one read; with no local blocks, a notif alone."""
    metadata = ConnectorMetadata()
    params = {
        "remote_block_ids": [remote],
        "remote_engine_id": engine,
        "remote_request_id": "remote-" + request_id,
        "remote_host": HOST,
        "remote_port": port,
        "tp_size": 1,
    }
    metadata.add_new_req_to_recv(request_id, ([*local],) if local else (), params, awaiting_kvs=bool(local))
    metadata.reads = {request_id: ReadOrder(nonce, hit_tokens=BLOCK_TOKENS)}
    return metadata


def alias_of(request_id: str) -> str:
    """The alias by which tickets call a request of the rank's own node."""
    return f"alias-of-{request_id}"


def lease_step(request_id: str, *, readers: int = 1, expires: float = 1e12) -> ConnectorMetadata:
    """The metadata of a step that leases one finished prefill."""
    metadata = ConnectorMetadata()
    metadata.aliases = {alias_of(request_id): request_id}
    metadata.reqs_in_batch = {request_id}
    metadata.reqs_to_send = {request_id: expires}
    metadata.readers = {request_id: readers}
    return metadata
