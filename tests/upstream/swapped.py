"""Our classes as vLLM's tests make and use vLLM's: without our settings, without a side channel at the other end.

Those tests also make an object past its constructor and set what vLLM's own would have set. What ours would have set
beside it is then made when it is first missed, so that more than the making is tested.
"""

from __future__ import annotations

import copy
import dataclasses
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from vllm.config import DeviceConfig, KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPullConnector
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import NixlPullConnectorScheduler
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

from connector import nixl_connector, scheduler, worker, worker_base
from connector.config import ConnectorConfig, Role, from_vllm
from connector.fingerprint import Fingerprint
from connector.kv_groups import NO_CAPACITY, ReadSize
from connector.messages import Question, Verdict
from connector.metadata import ConnectorMetadata, ReadOrder
from connector.peer_engines import EngineMetadata, MayRead, MetadataRequest, PeerEngines
from connector.peers import Address
from connector.transfer_params import ReadTicket
from connector.verifier import ReadVerdict
from connector.worker_base import ReadSource, is_awaited


class Orders(dict[str, ReadOrder]):
    """Also those of reads that a test has ordered without a nonce."""

    def __missing__(self, request_id: str) -> ReadOrder:
        return ReadOrder(f"{request_id:0>16}")


class Metadata(ConnectorMetadata):
    """As the tests make vLLM's."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = Orders()


@dataclasses.dataclass(frozen=True, slots=True)
class StockTicket:
    """A ticket of vLLM's own connector."""

    raw: Mapping[str, Any]
    issued_at: float = 0.0

    def params(self) -> dict[str, Any]:
        return dict(self.raw)


class Trusting:
    """Replaces the validator for tickets of vLLM's own connector, which it would refuse; all else is validated."""

    def __init__(self, validator: Any) -> None:
        self._validator = validator

    def validate(self, raw: Any, facts: Any) -> Any:
        stock = isinstance(raw, dict) and raw.get("do_remote_prefill") and "pdproxy" not in raw
        return ReadTicket(StockTicket(raw)) if stock else self._validator.validate(raw, facts)  # type: ignore[arg-type]


class Introduced(PeerEngines):
    """Every prefill node has introduced itself: what vLLM's handshake with it says is the tests' to decide."""

    def next_step(self, request: MetadataRequest, now: float, *, loaded: bool) -> MayRead:
        return MayRead()

    def take_offer(self, engine_id: str) -> EngineMetadata:
        return EngineMetadata("", {})


@contextmanager
def no_relay(payloads: object) -> Iterator[int]:
    """In the place of the relay that answers vLLM's handshake: the tests answer it themselves."""
    yield 1


class Held:
    """In the place of the verifier: every prefill node says that it held the blocks. The tests have no other node."""

    def __init__(self) -> None:
        self._verdicts: list[ReadVerdict] = []

    def ask(self, questions: Mapping[Any, Any]) -> None:
        self._verdicts += [ReadVerdict(asked.nonce, Verdict.HELD) for batch in questions.values() for asked in batch]

    give_back = ask

    def verdicts(self, wait_seconds: float = 0.0) -> list[ReadVerdict]:
        verdicts, self._verdicts = self._verdicts, []
        return verdicts

    def metadata_results(self) -> Iterable[tuple[MetadataRequest, EngineMetadata]]:
        return ()

    def lost_addresses(self) -> Iterable[Address]:
        return ()

    def close(self) -> None:
        """Nothing is open."""


class Scheduler(scheduler.ConnectorScheduler):
    """Made with vLLM's three arguments, or past its constructor."""

    def __init__(self, vllm_config: Any, engine_id: str, kv_cache_config: Any, config: Any = None) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config, config or settings(vllm_config))
        self._validator: Any = Trusting(self._validator)

    def __getattr__(self, name: str) -> Any:
        return _late(self, name, scheduler.ConnectorScheduler, NixlPullConnectorScheduler)


class Worker(worker.ConnectorWorker):
    """The same; and a read or notice that a test has begun by hand is known like one that was ordered."""

    def __init__(self, vllm_config: Any, engine_id: str, kv_cache_config: Any, config: Any = None) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config, config or settings(vllm_config))
        self._verifier.close()
        self._verifier: Any = Held()
        self._peer_engines = Introduced()

    def __getattr__(self, name: str) -> Any:
        return _late(self, name, worker.ConnectorWorker, NixlPullConnectorWorker)

    def get_transfer_results(self) -> Any:
        for request_id in vars(self).get("_recving_metadata", {}):
            self._know(request_id)
        return super().get_transfer_results()

    def _read_blocks_for_req(self, req_id: str, meta: Any) -> None:
        if req_id in self.__dict__.setdefault("_recving_metadata", {req_id: meta}):
            self._know(req_id)
        if is_awaited(meta):
            super()._read_blocks_for_req(req_id, meta)
        else:  # never called by ours: such tickets go back over the side channel
            NixlPullConnectorWorker._read_blocks_for_req(self, req_id, meta)

    def _request_for(self, meta: Any) -> MetadataRequest:
        return MetadataRequest(meta.remote.engine_id, ("host", 1), ((0, 0),))

    def _know(self, request_id: str) -> None:
        remote = self._recving_metadata[request_id].remote
        if request_id not in self._pending_reads._reads and remote is not None:
            asked = Question(remote.engine_id, str(remote.request_id), f"{request_id:0>16}")
            self._sources[request_id] = ReadSource(MetadataRequest(remote.engine_id, ("host", 1), ()))
            self._pending_reads.on_ordered(request_id, asked, ("host", 1), ReadSize(), time.monotonic())
            self._pending_reads.on_posted(request_id, time.monotonic())


class Connector(nixl_connector.NixlConnector):
    """With a setting that the tests leave at vLLM's default, with which our connector does not start."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(_recomputing(vllm_config), role, kv_cache_config)


def ours() -> Mapping[type[Any], type[Any]]:
    """vLLM's class → ours."""
    substitutes: dict[Any, dict[str, Any]] = {
        nixl_connector: {"from_vllm": lambda transfer, environ: _quiet(transfer)},
        scheduler: {"ConnectorMetadata": Metadata, "ConnectorScheduler": Scheduler},
        worker: {"ConnectorWorker": Worker},
        worker_base: {"metadata_relay": no_relay},
    }
    for module, names in substitutes.items():
        for name, substitute in names.items():
            if hasattr(module, name):
                setattr(module, name, substitute)
    return {
        NixlConnectorMetadata: Metadata,
        NixlPullConnector: Connector,
        NixlPullConnectorScheduler: Scheduler,
        NixlPullConnectorWorker: Worker,
    }


def settings(vllm_config: Any) -> ConnectorConfig:
    """Out of a test's configuration of vLLM."""
    return _quiet(_recomputing(vllm_config).kv_transfer_config)


def _quiet(transfer: Any) -> ConnectorConfig:
    """A configuration of both roles, without a progress delay, which would replace the tests' agent by a real one."""
    return dataclasses.replace(from_vllm(transfer, os.environ), role=Role.BOTH, progress_delay=0.0)


def _recomputing(vllm_config: Any) -> Any:
    changed = copy.copy(vllm_config)
    changed.kv_transfer_config = copy.copy(vllm_config.kv_transfer_config)
    changed.kv_transfer_config.kv_load_failure_policy = "recompute"
    return changed


def _late(made: Any, name: str, side: type[Any], stock: type[Any]) -> Any:
    """The value that the constructor of `side` sets under `name` beside what that of `stock` does."""
    if name in vars(made).setdefault("_asked_late", set()):
        raise AttributeError(name)
    made._asked_late.add(name)
    with (
        patch.object(stock, "__init__", lambda self, *args: None),
        patch.object(scheduler, "node_capacity", lambda *args: NO_CAPACITY),
        patch.object(scheduler, "node_fingerprint", lambda *args: Fingerprint()),
    ):
        scratch = object.__new__(_as_vllm_makes_it(side))
        scratch.__init__(_plain_config(), "engine", _plain_cache(), settings(_plain_config()))
    if "_verifier" in vars(scratch):
        scratch._verifier.close()
        scratch._verifier = Held()
    if "_validator" in vars(scratch):
        scratch._validator = Trusting(scratch._validator)
    for key, value in vars(scratch).items():
        vars(made).setdefault(key, value)
    if name not in vars(made):
        raise AttributeError(name)
    return vars(made)[name]


def _as_vllm_makes_it(side: type[Any]) -> type[Any]:
    return type(side.__name__, (side,), {"device_type": "cuda", "attn_backends": [], "shutdown": lambda self: None})


def _plain_config() -> VllmConfig:
    transfer = KVTransferConfig(kv_connector="NixlConnector", kv_role="kv_both")
    return VllmConfig(kv_transfer_config=transfer, device_config=DeviceConfig("cpu"))


def _plain_cache() -> KVCacheConfig:
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=1, dtype=torch.float32)
    return KVCacheConfig(num_blocks=16, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
