"""A pytest plugin for vLLM's tests: our connector classes under vLLM's names, and a file with what became of each test.

It runs in a process where `tests` is vLLM's package, so that it is loaded by its bare name (`-p swap_plugin`).
`UPSTREAM_CLASSES` is `ours` or `stock`; outcomes are written to the file that `UPSTREAM_OUTCOMES` names, as JSON.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

NIXL = "vllm.distributed.kv_transfer.kv_connector.v1.nixl"


class Outcomes:
    """Test id → passed, failed or skipped; an error in a fixture is a failure."""

    def __init__(self) -> None:
        self._by_test: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            path, _, test = report.nodeid.partition("::")
            self._by_test[f"{Path(path).name}::{test}"] = report.outcome

    def pytest_sessionfinish(self) -> None:
        Path(os.environ["UPSTREAM_OUTCOMES"]).write_text(json.dumps(self._by_test, indent=0), encoding="utf-8")


def pytest_configure(config: pytest.Config) -> None:
    """Swap before any test module is imported."""
    config.pluginmanager.register(Outcomes(), "upstream_outcomes")
    if os.environ["UPSTREAM_CLASSES"] == "ours":
        from swapped import ours  # type: ignore[import-not-found]

        swap(ours())


@pytest.fixture
def default_vllm_config() -> Iterator[Any]:
    """As in `tests/conftest.py` of vLLM, whose imports want more than these tests do."""
    from vllm.config import VllmConfig, set_current_vllm_config

    config = VllmConfig()
    with set_current_vllm_config(config):
        yield config


@pytest.fixture
def dist_init(default_vllm_config: Any, tmp_path: Path) -> Iterator[None]:
    """A world of one rank, as in `tests/conftest.py` of vLLM."""
    from vllm.distributed import cleanup_dist_env_and_memory, init_distributed_environment, initialize_model_parallel

    init_distributed_environment(1, 0, f"file://{tmp_path / 'store'}", 0, backend="gloo")
    initialize_model_parallel(1, 1)
    yield
    cleanup_dist_env_and_memory()


def swap(classes: Mapping[type[Any], type[Any]]) -> None:
    """Put each class in the other's place in every module of vLLM's NIXL connector that names it."""
    for module in _modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, type) and value in classes:
                setattr(module, name, classes[value])


def _modules() -> Iterator[ModuleType]:
    importlib.import_module(f"{NIXL}.push_worker")
    for name, module in list(sys.modules.items()):
        if name == NIXL or name.startswith(f"{NIXL}."):
            yield module
