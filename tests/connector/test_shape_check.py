"""A vLLM that differs from the contracts is refused when a node starts, whatever has changed."""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Callable
from dataclasses import make_dataclass
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import metadata, pull_worker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker import NixlBaseConnectorWorker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import GET_META_MSG
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import NixlPullConnectorScheduler
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker
from vllm.v1.request import Request

from connector import shape_check
from connector.config import ConfigError
from connector.messages import HANDSHAKE
from connector.nixl_connector import NixlConnector
from connector.shape_check import require_fit, vllm_names
from connector.vllm_contracts import DELIVERIES, HAND_OVERS, SEEDED_CPU, STREAMS, TIERS
from tests.vllm_compat.check import seams
from tests.vllm_compat.our_use import Touches
from tests.vllm_compat.vllm_source import Shape

# vLLM's source is parsed once a process, which takes it seconds.
pytestmark = pytest.mark.together("vLLM's source")

Drift = Callable[[pytest.MonkeyPatch], None]


@pytest.mark.parametrize("contract", [HAND_OVERS, TIERS, SEEDED_CPU])
def test_the_installed_vllm_fits(contract: Any, caplog: pytest.LogCaptureFixture) -> None:
    require_fit(contract)
    assert not caplog.records


def test_the_check_is_cheap() -> None:
    """Measured 40 ms for hand-overs, 3 ms for tiers; a node's start takes 20 s and more."""
    require_fit(HAND_OVERS)
    began = time.process_time()
    require_fit(HAND_OVERS)
    assert time.process_time() - began < 0.1


def an_entry_has_another_part(patch: pytest.MonkeyPatch) -> None:
    def update_state_after_alloc(self: Any, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._reqs_need_recv[request.request_id] = (request, [], (), False, "compressed")

    patch.setattr(NixlPullConnectorScheduler, "update_state_after_alloc", update_state_after_alloc)


def notices_are_separated_otherwise(patch: pytest.MonkeyPatch) -> None:
    def _read_blocks(self: Any, remote_request_id: str, expected_consumers: int) -> bytes:
        return f"{remote_request_id}|{expected_consumers}".encode()

    patch.setattr(NixlPullConnectorWorker, "_read_blocks", _read_blocks)


def notices_are_the_other_way_round(patch: pytest.MonkeyPatch) -> None:
    def _read_blocks(self: Any, remote_request_id: str, expected_consumers: int) -> bytes:
        return f"{expected_consumers}:{remote_request_id}".encode()

    patch.setattr(NixlPullConnectorWorker, "_read_blocks", _read_blocks)


def heartbeats_begin_otherwise(patch: pytest.MonkeyPatch) -> None:
    def _send_heartbeats(self: Any, metadata: Any) -> None:
        for info in metadata.heartbeat_by_engine.values():
            self.nixl_wrapper.send_notif("agent", notif_msg=("HEARTBEAT:" + ",".join(info.req_ids)).encode())

    patch.setattr(NixlBaseConnectorWorker, "_send_heartbeats", _send_heartbeats)


def a_hook_is_renamed(patch: pytest.MonkeyPatch) -> None:
    hook = NixlPullConnectorWorker._read_blocks_for_req
    patch.setattr(NixlPullConnectorWorker, "_read_request", hook, raising=False)
    patch.delattr(NixlPullConnectorWorker, "_read_blocks_for_req")


def a_hook_takes_more(patch: pytest.MonkeyPatch) -> None:
    def request_finished(self: Any, request: Any, block_ids: Any, partial: bool = False) -> Any: ...

    patch.setattr(NixlPullConnectorScheduler, "request_finished", request_finished)


def a_parameter_has_another_name(patch: pytest.MonkeyPatch) -> None:
    def on_new_request(self: Any, new_request: Any) -> None: ...

    patch.setattr(NixlPullConnectorScheduler, "on_new_request", on_new_request)


def what_we_call_wants_more(patch: pytest.MonkeyPatch) -> None:
    def _handle_heartbeat(self: Any, payload: str, engine_id: str) -> None: ...

    patch.setattr(NixlPullConnectorWorker, "_handle_heartbeat", _handle_heartbeat)


def the_handshake_asks_for_more(patch: pytest.MonkeyPatch) -> None:
    def _nixl_handshake(
        self: Any, host: str, port: int, remote_tp_size: int, expected_engine_id: str, remote_dcp_size: int = 1
    ) -> Any:
        reply_parts = [b"", b""]
        assert len(reply_parts) == 2
        return (GET_META_MSG, 0, 0, expected_engine_id)

    patch.setattr(NixlPullConnectorWorker, "_nixl_handshake", _nixl_handshake)


def the_handshake_is_answered_in_three_frames(patch: pytest.MonkeyPatch) -> None:
    def _nixl_handshake(
        self: Any, host: str, port: int, remote_tp_size: int, expected_engine_id: str, remote_dcp_size: int = 1
    ) -> Any:
        reply_parts = [b"", b"", b""]
        assert len(reply_parts) == 3
        return (GET_META_MSG, 0, 0)

    patch.setattr(NixlPullConnectorWorker, "_nixl_handshake", _nixl_handshake)


def the_handshake_has_another_name(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(metadata, "GET_META_MSG", b"get_metadata")


def results_lack_a_set(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(base, "KVConnectorTransferResults", make_dataclass("R", ["finished_sending", "finished_recving"]))


def results_have_another_set(patch: pytest.MonkeyPatch) -> None:
    kinds = ["finished_sending", "finished_recving", "failed_recving", "partly_recved"]
    patch.setattr(base, "KVConnectorTransferResults", make_dataclass("R", kinds))


def a_set_of_the_worker_is_renamed(patch: pytest.MonkeyPatch) -> None:
    def constructor(self: Any, vllm_config: Any, engine_id: str, kv_cache_config: Any) -> None:
        self._leased_requests = {}

    patch.setattr(NixlBaseConnectorWorker, "__init__", constructor)


def an_attribute_of_requests_is_gone(patch: pytest.MonkeyPatch) -> None:
    def constructor(self: Any, request_id: str) -> None:
        self.request_id = request_id

    patch.setattr(Request, "__init__", constructor)


def a_read_needs_a_param_that_tickets_lack(patch: pytest.MonkeyPatch) -> None:
    def add_new_req_to_recv(self: Any, request_id: str, local_block_ids: Any, kv_transfer_params: Any) -> Any:
        return kv_transfer_params["remote_block_ids"], kv_transfer_params["remote_layout"]

    patch.setattr(metadata.NixlConnectorMetadata, "add_new_req_to_recv", add_new_req_to_recv)


def the_answer_lacks_a_field(patch: pytest.MonkeyPatch) -> None:
    def request_finished(self: Any, request: Any, block_ids: Any) -> Any:
        return True, dict(remote_engine=self.engine_id, remote_block_ids=block_ids)  # noqa: C408 - as vLLM writes it

    patch.setattr(NixlPullConnectorScheduler, "request_finished", request_finished)


def a_class_is_gone(patch: pytest.MonkeyPatch) -> None:
    patch.delattr(pull_worker, "NixlPullConnectorWorker")


DRIFTS: list[tuple[Drift, str]] = [
    (an_entry_has_another_part, "found 5, expected 4"),
    (notices_are_separated_otherwise, "found {request_id}|{}, expected {request_id}:{}"),
    (notices_are_the_other_way_round, "found {}:{request_id}"),
    (heartbeats_begin_otherwise, "the heartbeat"),
    (a_hook_is_renamed, "there is no pull_worker.NixlPullConnectorWorker._read_blocks_for_req"),
    (a_hook_takes_more, "is called with (self, request, block_ids, partial=)"),
    (a_parameter_has_another_name, "is called with (self, new_request)"),
    (what_we_call_wants_more, "takes (self, payload, engine_id)"),
    (the_handshake_asks_for_more, "found 4, expected 3"),
    (the_handshake_is_answered_in_three_frames, "the frames of the handshake's reply"),
    (the_handshake_has_another_name, "metadata.GET_META_MSG is b'get_metadata'"),
    (results_lack_a_set, "consists of finished_sending, finished_recving instead of"),
    (results_have_another_set, "partly_recved"),
    (a_set_of_the_worker_is_renamed, "has no _reqs_to_send"),
    (an_attribute_of_requests_is_gone, "Request has no kv_transfer_params"),
    (a_read_needs_a_param_that_tickets_lack, "remote_layout"),
    (the_answer_lacks_a_field, "the answer to a prefill leg"),
    (a_class_is_gone, "there is no pull_worker.NixlPullConnectorWorker"),
]


@pytest.mark.parametrize(("drift", "words"), DRIFTS, ids=[drift.__name__ for drift, _ in DRIFTS])
def test_a_vllm_that_drifted_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, drift: Drift, words: str) -> None:
    drift(monkeypatch)
    with pytest.raises(ConfigError) as refused:
        require_fit(HAND_OVERS)
    assert words in str(refused.value)
    assert str(refused.value).startswith("vLLM 0.32.0 does not fit this connector")
    assert "Install one of those versions" in str(refused.value)


def test_the_name_of_the_handshake_is_ours() -> None:
    assert list(HAND_OVERS.constants.values()) == [repr(HANDSHAKE)]


def test_what_tiers_rely_on_is_checked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

    monkeypatch.delattr(MultiConnector, "sub_connectors")
    with pytest.raises(ConfigError, match="MultiConnector has no sub_connectors"):
        require_fit(TIERS)


@pytest.mark.parametrize("role", list(KVConnectorRole))
def test_a_node_does_not_start_on_it(monkeypatch: pytest.MonkeyPatch, role: KVConnectorRole) -> None:
    """Neither half is made: the constructor ends before it looks at the configuration."""
    an_entry_has_another_part(monkeypatch)
    nothing: Any = None
    with pytest.raises(ConfigError, match="_reqs_need_recv"):
        NixlConnector(nothing, role, nothing)


def test_an_untried_version_that_fits_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shape_check, "running_version", lambda: "0.34.0")
    with caplog.at_level(logging.WARNING, shape_check.log.name):
        require_fit(HAND_OVERS)
    assert ["vLLM 0.34.0 has not been tried" in record.getMessage() for record in caplog.records] == [True]


def test_a_name_that_vllm_no_longer_has_is_refused_too() -> None:
    with pytest.raises(ConfigError, match="NixlPullConnectorV2"), vllm_names():
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPullConnectorV2  # noqa: F401
    with pytest.raises(ConfigError, match=r"vllm\.distributed\.nixl_tools"), vllm_names():
        import vllm.distributed.nixl_tools  # noqa: F401


def test_another_package_that_is_missing_is_not_vllms_fault() -> None:
    with pytest.raises(ModuleNotFoundError), vllm_names():
        importlib.import_module("a_package_that_is_not_there")


def test_every_seam_is_in_a_contract(touched: Touches, installed: Shape) -> None:
    """What `python -m tests.vllm_compat` lists is checked at start; nothing is checked that is no seam of ours."""
    known = seams(touched, installed)
    contracts = (HAND_OVERS, DELIVERIES, STREAMS, TIERS, SEEDED_CPU)
    hooks = {(owner, name) for each in contracts for owner, methods in each.hooks.items() for name in methods}
    calls = {(owner, name) for each in contracts for owner, methods in each.calls.items() for name in methods}
    attributes = {(owner, name) for each in contracts for owner, names in each.attributes.items() for name in names}
    fields = {(owner, name) for each in contracts for owner, names in each.fields.items() for name in names}
    assert {(touch.owner, touch.chain[0]) for touch in known.overrides} == hooks
    used = {(touch.owner, touch.chain[0]) for touch in (*known.uses, *known.reads)}
    assert used - hooks - calls - attributes - fields == set()
