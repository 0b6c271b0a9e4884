"""A node whose vLLM is not one of the tested versions does not start, unless a setting says so."""

from __future__ import annotations

import importlib
import logging
from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import vllm
from starlette.datastructures import State
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.worker.cpu_worker import CPUWorker

from connector import vllm_version
from connector.config import ALLOW_UNTESTED_VLLM, ConfigError, allows_untested_vllm
from connector.cpu_worker import SeededCPUWorker
from connector.endpoints import NodeRoutes
from connector.nixl_connector import NixlConnector
from connector.tiers.multi_connector import WeightedMultiConnector
from connector.vllm_version import TESTED, release_of, require_tested, vllm_names

ALLOWED = {ALLOW_UNTESTED_VLLM: True}


@pytest.fixture
def untested(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(vllm, "__version__", "0.34.0+cpu")
    return "0.34.0+cpu"


@pytest.mark.parametrize("version", [*TESTED, "0.32.0+cpu", "0.33.0rc2", "0.33.0.dev7+g1a2b3c", "0.32.0.post2"])
def test_a_tested_version_starts_without_a_word(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, version: str
) -> None:
    monkeypatch.setattr(vllm, "__version__", version)
    require_tested({})
    require_tested(ALLOWED)
    assert not caplog.records


@pytest.mark.parametrize("version", ["0.31.9", "0.32.1", "0.33.1.dev3", "0.34.0", "0.320.0", "1.0.32.0", "dev", ""])
def test_another_version_is_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(vllm, "__version__", version)
    with pytest.raises(ConfigError) as refused:
        require_tested({})
    said = str(refused.value)
    assert said.startswith(f"vLLM {version} has not been tested with this connector")
    assert "0.32.0 and 0.33.0" in said
    assert "set pdproxy_allow_untested_vllm to true in kv_connector_extra_config" in said


def test_the_setting_turns_the_refusal_into_a_warning(untested: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, vllm_version.log.name):
        require_tested(ALLOWED)
    [said] = [record.getMessage() for record in caplog.records]
    assert f"vLLM {untested} has not been tested" in said
    assert "0.32.0 and 0.33.0" in said
    assert ALLOW_UNTESTED_VLLM in said


@pytest.mark.parametrize(
    ("extra", "allowed"),
    [
        ({}, False),
        ({ALLOW_UNTESTED_VLLM: False}, False),
        (ALLOWED, True),
        ({"connectors": [{"kv_connector": "A"}, {"kv_connector_extra_config": ALLOWED}]}, True),
        ({"connectors": [{"kv_connector_extra_config": {}}, "not an entry"]}, False),
        ({"connectors": "not a list"}, False),
    ],
)
def test_the_setting_counts_for_the_node_or_for_one_of_its_connectors(extra: dict[str, Any], allowed: bool) -> None:
    assert allows_untested_vllm(extra) is allowed


@pytest.mark.parametrize("value", ["true", 1, None])
def test_a_setting_that_is_no_boolean_is_refused(untested: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=r"pdproxy_allow_untested_vllm is .*: use true or false"):
        require_tested({ALLOW_UNTESTED_VLLM: value})


def configured(extra: dict[str, Any]) -> Any:
    """As much of vLLM's configuration as is looked at before the version is checked."""
    transfer = KVTransferConfig(kv_connector="NixlConnector", kv_role="kv_consumer", kv_connector_extra_config=extra)
    return SimpleNamespace(kv_transfer_config=transfer, use_v2_model_runner=True)


@pytest.mark.parametrize("connector", [NixlConnector, WeightedMultiConnector])
@pytest.mark.parametrize("role", list(KVConnectorRole))
def test_no_half_of_a_connector_starts_on_another_version(untested: str, connector: Any, role: KVConnectorRole) -> None:
    with pytest.raises(ConfigError, match=ALLOW_UNTESTED_VLLM):
        connector(configured({}), role, None)


def test_a_cpu_worker_does_not_start_on_another_version(monkeypatch: pytest.MonkeyPatch, untested: str) -> None:
    """Not without a connector either, where no setting could allow it."""
    began: list[CPUWorker] = []

    def init_device(worker: CPUWorker) -> None:
        began.append(worker)

    monkeypatch.setattr(CPUWorker, "init_device", init_device)
    worker = SeededCPUWorker.__new__(SeededCPUWorker)
    for config in (configured({}), SimpleNamespace(kv_transfer_config=None)):
        worker.vllm_config = config
        with pytest.raises(ConfigError, match=untested.replace("+", r"\+")):
            worker.init_device()
    assert not began
    worker.vllm_config = configured(ALLOWED)
    worker.init_device()
    assert began == [worker]


async def test_a_decode_node_s_routes_do_not_start_on_another_version(untested: str) -> None:
    engine: Any = SimpleNamespace(vllm_config=configured({}))
    with pytest.raises(ConfigError, match=ALLOW_UNTESTED_VLLM):
        await NodeRoutes().init_state(engine, State(), Namespace())


def test_a_name_that_vllm_does_not_have_is_refused_with_the_version(untested: str) -> None:
    with pytest.raises(ConfigError, match=r"vLLM 0\.34\.0.*NixlPullConnectorV2"), vllm_names():
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPullConnectorV2  # noqa: F401
    with pytest.raises(ConfigError, match=r"vllm\.distributed\.nixl_tools"), vllm_names():
        import vllm.distributed.nixl_tools  # noqa: F401


def test_another_package_that_is_missing_is_not_vllms_fault() -> None:
    with pytest.raises(ModuleNotFoundError), vllm_names():
        importlib.import_module("a_package_that_is_not_there")


@pytest.mark.parametrize(
    ("version", "release"),
    [
        ("0.33.0+cu130", "0.33.0"),
        ("0.33.0.post1", "0.33.0"),
        ("0.33.0rc1", "0.33.0"),
        ("x", "x"),
    ],
)
def test_a_version_counts_as_its_release(version: str, release: str) -> None:
    assert release_of(version) == release
