"""A pytest plugin for vLLM's entrypoint tests: they ask a server that runs already instead of one that they start.

It runs in a process where `tests` is vLLM's package, so that it is loaded by its bare name (`-p served_plugin`).
`UPSTREAM_URL` is the server's address; outcomes are written to the file that `UPSTREAM_OUTCOMES` names, as JSON.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

STARTS = "RemoteOpenAIServer("
"""The text by which a test or a fixture that starts a server is known."""


class Outcomes:
    """Test id → passed, failed or skipped, and the error, cut; an error in a fixture is a failure."""

    def __init__(self) -> None:
        self._by_test: dict[str, tuple[str, str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            crash = getattr(report.longrepr, "reprcrash", None)
            why = " ".join(crash.message.split())[:400] if crash else ""
            self._by_test[report.nodeid] = report.outcome, why

    def pytest_sessionfinish(self) -> None:
        Path(os.environ["UPSTREAM_OUTCOMES"]).write_text(json.dumps(self._by_test, indent=0), encoding="utf-8")


def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Before anything of the tests is imported, fixtures in a `conftest.py` included."""
    early_config.pluginmanager.register(Outcomes(), "upstream_outcomes")
    utils = importlib.import_module("tests.utils")
    utils.RemoteOpenAIServer = _running(utils.RemoteOpenAIServer)  # type: ignore[attr-defined]
    hub = importlib.import_module("huggingface_hub")
    # Adapters and models are named on command lines alone, which nobody runs here: any folder will do.
    for holder in (hub, hub.HfApi):
        setattr(holder, "snapshot_download", _any_folder)  # noqa: B010 - untyped


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Only what asks a server: the other tests are of vLLM's own classes."""
    items[:] = [item for item in items if isinstance(item, pytest.Function) and _asks_a_server(item)]


def _asks_a_server(item: pytest.Function) -> bool:
    fixtures = item._fixtureinfo.name2fixturedefs.values()
    code: list[Callable[..., Any]] = [item.function, *(made.func for each in fixtures for made in each)]
    return any(STARTS in inspect.getsource(each) for each in code if inspect.isfunction(each))


def _any_folder(*_: object, **__: object) -> str:
    return os.environ["UPSTREAM_MODEL"]


def _running(server: type[Any]) -> type[Any]:
    """vLLM's class without its process: clients and addresses are made by its own methods."""
    host, _, port = os.environ["UPSTREAM_URL"].removeprefix("http://").partition(":")

    class RunningServer(server):  # type: ignore[misc]
        def __init__(self, model: str, vllm_serve_args: list[str], **more: Any) -> None:
            self.host, self.port, self.uds = host, int(port), None

        def __enter__(self) -> RunningServer:
            return self

        def __exit__(self, *error: object) -> None:
            """The server goes on."""

    return RunningServer
