"""Our connector with a saboteur, which on order spoils a read or stops the other node at an exact moment.

A node loads this module instead of `connector.nixl_connector`. The test writes orders into a file that an environment
variable names. Each order is carried out once, at the next read that reaches its moment, and then noted in a second
file for the test. Without orders the node behaves as usual.
"""

import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlBaseConnector

from connector.config import from_vllm
from connector.messages import Question
from connector.metadata import ConnectorMetadata
from connector.nixl_connector import NixlConnector as Honest
from connector.peers import Address
from connector.scheduler import ConnectorScheduler
from connector.verifier import Verifier
from connector.worker import ConnectorWorker
from deploy.local.node import NodeSpec
from tests.e2e.process_faults import ProcessFault, inject

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import ReqMeta
    from vllm.v1.kv_cache_interface import KVCacheConfig

ORDERS = "PDPROXY_TEST_SABOTAGE"
PATIENCE_S = 60.0


class Moment(StrEnum):
    """A moment in a read."""

    POSTING = "posting"
    """The handshake is made; the transfer is about to be posted."""
    POSTED = "posted"
    """The transfer is posted; its state has not been checked yet."""
    LANDED = "landed"
    """The last byte is here; the prefill node has not been asked whether the read counts."""
    VERIFIED = "verified"
    """The read counts; the request has not run yet."""
    PLANNED = "planned"
    """Any node's scheduler has planned a step."""


@dataclass(frozen=True)
class Order:
    """The action and its moment; empty fields do nothing.

    `group`, `block`: zero this block of this cache group, by its place in the read. `state`: only this one of its
    states (0: the convolution's, 1: the recurrent one). `signal`: goes to `pids`. `deaf`: end the node's own side
    channel.
    """

    moment: Moment
    group: int | None = None
    block: int = 0
    state: int | None = None
    signal: int = 0
    pids: tuple[int, ...] = ()
    deaf: bool = False


class Orders:
    """Two files of JSON lines: the orders, and the orders that were carried out."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._done = path.with_suffix(".done")

    def give(self, *orders: Order) -> None:
        """Write new orders and empty the list of those carried out. Called by the test."""
        self._done.unlink(missing_ok=True)
        self._write(orders)

    def await_done(self, count: int) -> list[dict[str, Any]]:
        """Wait until so many orders were carried out; returns the notes. Called by the test. Raises AssertionError."""
        limit = time.monotonic() + PATIENCE_S
        while len(lines := self._lines(self._done)) < count:
            assert time.monotonic() < limit, f"{len(lines)} of {count} orders were carried out"
            time.sleep(0.05)
        return lines

    def done(self, count: int) -> bool:
        """Whether so many orders were carried out by now. Called by the test after an answer."""
        return len(self._lines(self._done)) >= count

    def take(self, moment: Moment) -> Order | None:
        """The next order if its moment is this one. Called by the node."""
        orders = [Order(**line) for line in self._lines(self._path)]
        if not orders or orders[0].moment != moment:
            return None
        self._write(orders[1:])
        return orders[0]

    def note(self, order: Order, **seen: object) -> None:
        """Note that an order is carried out. Called by the node."""
        with self._done.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**asdict(order), **seen}) + "\n")

    def _write(self, orders: Iterable[Order]) -> None:
        fresh = self._path.with_suffix(".fresh")
        fresh.write_text("".join(json.dumps(asdict(order)) + "\n" for order in orders), encoding="utf-8")
        fresh.replace(self._path)

    @staticmethod
    def _lines(path: Path) -> list[dict[str, Any]]:
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def sabotaged(spec: NodeSpec, orders: Path) -> NodeSpec:
    """The same node with a saboteur. `orders`: the file of its orders."""
    return replace(
        spec,
        connector_module=__name__,
        more_environment={**spec.more_environment, ORDERS: str(orders)},
    )


class _Asking(Verifier):
    def __init__(self, timeout: float, worker: "_Worker") -> None:
        super().__init__(timeout)
        self._worker = worker

    def ask(self, questions: Mapping[Address, Sequence[Question]]) -> None:
        if questions:
            self._worker.obey(Moment.LANDED)
        super().ask(questions)


class _Worker(ConnectorWorker):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._orders = Orders(Path(os.environ[ORDERS]))
        self._local: dict[str, Any] = {}
        self._verifier.close()
        self._verifier = _Asking(arguments[-1].verify_timeout, self)

    def start_load_kv(self, metadata: ConnectorMetadata) -> None:
        self._local.update((name, meta.local_block_ids) for name, meta in metadata.reqs_to_recv.items())
        super().start_load_kv(metadata)

    def _read_blocks_for_req(self, req_id: str, meta: "ReqMeta") -> None:
        known = meta.remote.engine_id in self._remote_agents
        if known:
            self.obey(Moment.POSTING)
        super()._read_blocks_for_req(req_id, meta)
        if known:
            self.obey(Moment.POSTED, req_id)

    def get_transfer_results(self) -> "KVConnectorTransferResults":
        results = super().get_transfer_results()
        for request_id in results.finished_recving - results.failed_recving:
            self.obey(Moment.VERIFIED, request_id)
        return results

    def obey(self, moment: Moment, request_id: str = "") -> None:
        order = self._orders.take(moment)
        if order is None:
            return
        states = [str(self.nixl_wrapper.check_xfer_state(one)) for one in self._recving_transfers.get(request_id, [])]
        if order.group is not None:
            self._zero(order.group, self._local[request_id][order.group][order.block], order.state)
        if order.signal:
            inject(order.pids, ProcessFault(order.signal))
        self._orders.note(order, states=states)

    def _zero(self, group: int, block: int, state: int | None) -> None:
        for layer in self.kv_cache_config.transfer_groups[group].layer_names:
            held = self.device_kv_caches[layer]
            for cache in held if isinstance(held, list | tuple) else [held]:
                ratio = len(cache) // self.kv_cache_config.num_blocks
                assert ratio, f"{layer} has {len(cache)} blocks"
                page = cache[block * ratio : (block + 1) * ratio]
                (page if state is None else self._state(page, state)).zero_()

    def _state(self, page: Any, state: int) -> Any:
        """The bytes of one of a page's two states, which lie one after the other."""
        sizes = self._mamba_ssm_size
        begin = sum(sizes[:state])
        return page.view(-1).view(torch.uint8)[begin : begin + sizes[state]]


class _Scheduler(ConnectorScheduler):
    def build_connector_meta(self, scheduler_output: Any) -> ConnectorMetadata:
        orders = Orders(Path(os.environ[ORDERS]))
        order = orders.take(Moment.PLANNED)
        if order is not None and order.deaf and self._listener is not None:
            self._listener.stop()
            orders.note(order)
        return super().build_connector_meta(scheduler_output)


class NixlConnector(Honest):
    """The connector with a saboteur on both sides."""

    def __init__(self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig") -> None:
        NixlBaseConnector.__init__(self, vllm_config, role, kv_cache_config)
        config = from_vllm(vllm_config.kv_transfer_config, os.environ)
        if role == KVConnectorRole.SCHEDULER:
            self.connector_scheduler = _Scheduler(vllm_config, self.engine_id, kv_cache_config, config)
        else:
            self.connector_worker = _Worker(vllm_config, self.engine_id, kv_cache_config, config)
