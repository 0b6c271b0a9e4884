"""Driving a rank step by step, and the side channel of the prefill node that it reads from."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlAgentMetadata, NixlHandshakePayload

from connector.counters import Counters
from connector.messages import Verdict
from connector.metadata import ConnectorMetadata, WorkerReport
from connector.side_channel import Listener
from connector.worker import ConnectorWorker
from deploy.local.ports import free_ports
from tests.connector.rank import BLOCK_TOKENS, COMPATIBLE, HOST, PEER, Agent

PATIENCE = 30.0
NONCE = "0123456789abcdef"
NEW = "new"
"""An engine with which no handshake was made."""
BLOCK_BYTES = 16 * 1 * 8 * 2 * 2
"""Tokens, heads, head size, bytes of bfloat16, key and value."""


def payload(engine_id: str, compatibility_hash: str) -> bytes:
    """The `NixlHandshakePayload` of a rank without an engine."""
    agent = NixlAgentMetadata(
        engine_id=engine_id,
        agent_metadata=b"agent",
        kv_caches_base_addr=[0],
        device_id=0,
        num_blocks=64,
        block_lens=[1],
        block_strides=[1],
        kv_cache_layout="NHD",
        block_size=BLOCK_TOKENS,
        ssm_sizes=(0, 0),
        attn_backend_name="none",
        physical_blocks_per_logical_kv_block=1,
    )
    return msgspec.msgpack.encode(NixlHandshakePayload(compatibility_hash, msgspec.msgpack.encode(agent)))


class Prefill:
    """A prefill node's side channel. `verdict`: its answer to every question; `asked`: the questions so far;
    `returned`: the tickets that were given back."""

    def __init__(self, engine_id: str = PEER, *, compatible: bool = True, keys: tuple[bytes, ...] = ()) -> None:
        self.port = free_ports(1)[0]
        self.verdict = Verdict.HELD
        self.asked: list[tuple[str, str, str]] = []
        self.returned: list[tuple[str, str, str]] = []
        self._engine_id, self._keys = engine_id, keys
        self._payload = payload(engine_id, COMPATIBLE if compatible else "another hash")
        self.restart()

    def restart(self, port: int | None = None) -> None:
        """Another run of the node; `listener` must have been stopped."""
        self.port = port or self.port
        payloads = {(0, 0): self._payload}
        self.listener = Listener(
            HOST,
            self.port,
            payloads,
            self._verify,
            Counters(),
            engine_id=self._engine_id,
            keys=self._keys,
            take_back=self._take_back,
        )
        self.listener.start()

    def _take_back(self, engine_id: str, request_id: str, nonce: str) -> Verdict:
        self.returned.append((engine_id, request_id, nonce))
        return self.verdict

    def _verify(self, engine_id: str, request_id: str, nonce: str) -> Verdict:
        self.asked.append((engine_id, request_id, nonce))
        return self.verdict


MakeRank = Callable[..., ConnectorWorker]


def agent(worker: ConnectorWorker) -> Agent:
    found = worker.nixl_wrapper
    assert isinstance(found, Agent)
    return found


def handshakes(worker: ConnectorWorker) -> list[str]:
    """The engines with which handshakes were made, in order."""
    found: list[str] = worker.__dict__["met"]
    return found


def step(worker: ConnectorWorker, metadata: ConnectorMetadata | None = None) -> KVConnectorTransferResults:
    worker.start_load_kv(ConnectorMetadata() if metadata is None else metadata)
    return worker.get_transfer_results()


def until_received(worker: ConnectorWorker, metadata: ConnectorMetadata | None = None) -> KVConnectorTransferResults:
    """The first results with a read in them, from the very step that orders it (`metadata`) on."""
    deadline = time.monotonic() + PATIENCE
    while True:
        results = step(worker, metadata)
        if results.finished_recving:
            return results
        metadata = None
        assert time.monotonic() < deadline, "no read came to its end"
        time.sleep(0.005)


T = TypeVar("T")


def until(act: Callable[[], T], enough: Callable[[T], bool]) -> T:
    """The first result of `act`, called again and again, that is `enough`."""
    deadline = time.monotonic() + PATIENCE
    while not enough(found := act()):
        assert time.monotonic() < deadline, "it did not come to its end"
        time.sleep(0.005)
    return found


def report(worker: ConnectorWorker) -> WorkerReport:
    return worker.build_connector_worker_meta() or WorkerReport()


def counts(worker: ConnectorWorker) -> dict[tuple[str, ...], int]:
    worker.drain_counters()
    stats = worker.get_kv_connector_stats()
    return {} if stats is None else {(name, *labels): value for name, labels, value in stats.data["pdproxy_counts"]}
