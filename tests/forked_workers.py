"""Tests in several processes that share what was imported: `pytest -p tests.forked_workers --workers 3`.

Workers of pytest-xdist each import the tests and list them, which takes vLLM's nine seconds of CPU every time. Here the
process that has done so forks, and its workers go through the modules: whoever is free takes the next one that nobody
has taken, in the order in which they were collected. A module's reports reach the first process when the module ends,
so its output reads like that of one process. Modules with the same mark ``together`` count as one: what a session's
fixtures make for them is made once. Other fixtures of a session are made in each worker that asks for them.
"""

import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, cast

import pytest
from _pytest.capture import CaptureManager

INDEX = struct.Struct("<H")
Group = list[pytest.Item]
"""The tests of one module, or of all that have the same mark ``together``: one worker runs them."""
Reports = dict[str, list[dict[str, Any]]]
"""By the test's name, as pytest serialises them."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--workers", type=int, default=0, help="processes to fork once all tests are listed")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> object:
    """Run the tests in workers; None, which has pytest run them itself, without the option or where none can run."""
    count = session.config.getoption("workers")
    if not count or session.testsfailed or session.config.option.collectonly:
        return None
    return Run(session).in_workers(count)


@dataclass
class Worker:
    """A forked process. ``group``: what it runs now; ``failed``: whether a test of it has failed."""

    pid: int
    group: Group | None = None
    failed: bool = False


class Run:
    """The tests of a session and who runs them."""

    def __init__(self, session: pytest.Session) -> None:
        self._session = session
        self._groups = by_group(session.items)
        self._queue, queued = os.pipe()
        # All indices fit into the pipe, and each is read from it by whoever comes first.
        os.write(queued, b"".join(map(INDEX.pack, range(len(self._groups)))))
        os.close(queued)
        self._workers: dict[Connection, Worker] = {}
        self._lost: list[str] = []

    def in_workers(self, count: int) -> bool:
        """Fork the workers and report what they find. In a worker this returns when no group is left to take."""
        self._session.config.get_terminal_writer().flush()
        for _ in range(count):
            receiver, sender = Pipe(duplex=False)
            if not (pid := os.fork()):
                self._work(sender)
                return True
            sender.close()
            self._workers[receiver] = Worker(pid)
        while self._workers:
            for receiver in cast(list[Connection], wait(list(self._workers))):
                self._receive(receiver)
        os.close(self._queue)
        if self._lost:
            pytest.exit("; ".join(self._lost), pytest.ExitCode.INTERNAL_ERROR)
        return True

    def _work(self, sender: Connection) -> None:
        be_a_worker(self._session.config)
        while taken := os.read(self._queue, INDEX.size):
            (index,) = INDEX.unpack(taken)
            sender.send(index)
            sender.send(run_group(self._session, self._groups[index]))
        sender.close()

    def _receive(self, receiver: Connection) -> None:
        """A worker says which group it takes, then what came of it; at last it ends."""
        worker = self._workers[receiver]
        try:
            message = receiver.recv()
        except EOFError:
            self._ended(self._workers.pop(receiver))
            receiver.close()
            return
        if isinstance(message, int):
            worker.group = self._groups[message]
        else:
            self._report(worker, message)

    def _report(self, worker: Worker, found: Reports) -> None:
        hook = self._session.config.hook
        for item in worker.group or ():
            hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
            for data in found[item.nodeid]:
                report = hook.pytest_report_from_serializable(config=self._session.config, data=data)
                hook.pytest_runtest_logreport(report=report)
                worker.failed |= report.failed
            hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        worker.group = None

    def _ended(self, worker: Worker) -> None:
        """Where a worker died, or failed after its tests, the session fails with it. Its own words are on stderr."""
        _, status = os.waitpid(worker.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        expected = pytest.ExitCode.TESTS_FAILED if worker.failed else pytest.ExitCode.OK
        if worker.group or code != expected:
            where = f"in {worker.group[0].location[0]}" if worker.group else "after its tests"
            self._lost.append(f"a worker ended with status {code} {where}")


def by_group(items: Iterable[pytest.Item]) -> list[Group]:
    """In the order of their first tests."""
    groups: dict[object, Group] = {}
    for item in items:
        mark = item.get_closest_marker("together")
        groups.setdefault(mark.args if mark else item.path, []).append(item)
    return list(groups.values())


def be_a_worker(config: pytest.Config) -> None:
    """Print nothing, and capture output apart from the others: until now all share one file."""
    config.pluginmanager.unregister(name="terminalreporter")
    capture = cast(CaptureManager, config.pluginmanager.getplugin("capturemanager"))
    capture.stop_global_capturing()
    capture.start_global_capturing()
    capture.suspend_global_capture()


class _Reported:
    """Collects what tests report."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self.found: Reports = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self.found.setdefault(report.nodeid, []).append(data)


def run_group(session: pytest.Session, group: Group) -> Reports:
    """Run the tests and end all fixtures but those of the session."""
    reported = _Reported(session.config)
    session.config.pluginmanager.register(reported)
    try:
        for item, following in zip(group, [*group[1:], session], strict=True):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
    finally:
        session.config.pluginmanager.unregister(reported)
    return reported.found
