"""Notes which tests passed on which vLLM, for the tables of `deploy.tested`: `pytest -p tests.recorded --record …`.

A test that passed is noted under the version that this process imports, and one that failed is struck out. Tests that
no table asks for are not noted. `--features` leaves all others out. `make record` runs them on each version.
"""

from __future__ import annotations

import pytest

from deploy.tested import RESULTS, Results, asked_for, of_features, printed, read


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", action="store_true", help="note in docs/tested.json what passes")
    parser.addoption("--features", action="store_true", help="run what the matrix of docs/tested.md asks for alone")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("record"):
        config.pluginmanager.register(Recorder())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("features"):
        left = [item for item in items if not of_features(item.nodeid)]
        items[:] = [item for item in items if of_features(item.nodeid)]
        config.hook.pytest_deselected(items=left)


class Recorder:
    """The outcomes of one run. A test has passed when its call has, and nothing of it has failed."""

    def __init__(self) -> None:
        self.passed: dict[str, bool] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        called = report.when == "call"
        if called or report.failed:
            self.passed[report.nodeid] = called and report.passed

    def pytest_sessionfinish(self) -> None:
        RESULTS.write_text(printed(with_run(read(), running(), self.passed)), encoding="utf-8")


def with_run(results: Results, version: str, passed: dict[str, bool]) -> Results:
    """The results with a run on this version; `passed`: of each test that ran."""
    noted = set(results.get(version, ())) - passed.keys()
    return {**results, version: noted | {name for name, good in passed.items() if good and asked_for(name)}}


def running() -> str:
    """The release of the vLLM that is imported here."""
    from connector.vllm_version import release_of, running_version

    return release_of(running_version())
