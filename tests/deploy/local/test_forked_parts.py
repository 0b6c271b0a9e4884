"""Programs that end-to-end tests fork from a process with their imports are as if they had been started."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import pytest

from deploy.local.paths import ROOT
from deploy.local.supervise import Process, inherited, watched
from deploy.local.watchdog import descendants
from tests.e2e.forked_parts import ForkedWatchdog, Template

WITHIN_S = 60.0
GRACE_S = 0.3
MODULE = "tests.deploy.local.shown"
Watched = Callable[[float, Sequence[str], Mapping[str, str], Path, IO[bytes]], Process]


@pytest.fixture(scope="module", autouse=True)
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Temporary files go where pytest removes them: a watchdog that is killed leaves its folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(tmp_path_factory.mktemp("scratch")))
        yield


@pytest.fixture(scope="module")
def template(scratch: None) -> Iterator[Template]:
    template = Template(MODULE, ("email.message",), inherited())
    yield template
    template.close()


def run(begin: Watched, log: Path, *words: str, **variables: str) -> Process:
    """Start or fork the module; returns once it has shown itself."""
    with log.open("wb") as output:
        environment = {**inherited(), **variables}
        process = begin(GRACE_S, [sys.executable, "-m", MODULE, *words], environment, log.parent, output)
    wait_for(lambda: log.read_text().endswith("\n"))
    return process


def wait_for(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.02)


def close(process: Process) -> None:
    assert process.stdin is not None
    process.stdin.close()


def status(process: Process) -> int:
    """The exit status of a program that ends by itself."""
    try:
        return process.wait(WITHIN_S)
    finally:
        close(process)


def said(log: Path) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(log.read_text())
    del told["variables"]["TMPDIR"]
    return told


def test_it_sees_what_it_would_see_had_it_been_started(template: Template, tmp_path: Path) -> None:
    logs = tmp_path / "started", tmp_path / "forked"
    for begin, log in zip((watched, template.watched), logs, strict=True):
        assert status(run(begin, log, "end", "0", PDPROXY_ODD="1", PYTHONPATH=str(tmp_path))) == 0
    started, forked = map(said, logs)
    assert forked == started
    assert (forked["variables"]["PDPROXY_ODD"], forked["temporary"]) == ("1", True)
    assert str(tmp_path) in forked["path"]


def test_its_exit_status_is_told(template: Template, tmp_path: Path) -> None:
    assert status(run(template.watched, tmp_path / "log", "end", "7")) == 7


def test_it_ends_when_its_lifeline_closes(template: Template, tmp_path: Path) -> None:
    process = run(template.watched, tmp_path / "log", "stay")
    family = descendants(process.pid)
    assert (len(family), process.poll()) == (1, None)
    close(process)
    assert process.wait(WITHIN_S) == 128 + signal.SIGTERM
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in (process.pid, *family)))


def test_a_command_that_is_killed_and_a_watchdog_that_is_killed(template: Template, tmp_path: Path) -> None:
    process = run(template.watched, tmp_path / "command", "stay")
    os.kill(min(descendants(process.pid)), signal.SIGKILL)
    assert process.wait(WITHIN_S) == 128 + signal.SIGKILL
    close(process)

    process = run(template.watched, tmp_path / "watchdog", "stay")
    [command] = descendants(process.pid)
    process.kill()
    assert process.wait(WITHIN_S) == -signal.SIGKILL
    close(process)
    wait_for(lambda: not Path(f"/proc/{command}").exists())


def test_it_stays_when_the_template_ends(tmp_path: Path) -> None:
    template = Template(MODULE, (), inherited())
    process = run(template.watched, tmp_path / "log", "stay")
    template.close()
    assert process.poll() is None
    close(process)
    assert process.wait(WITHIN_S) == 128 + signal.SIGTERM


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "VLLM_USE_V2_MODEL_RUNNER"])
def test_other_variables_have_it_started(template: Template, tmp_path: Path, name: str) -> None:
    process = run(template.watched, tmp_path / "log", "end", "0", **{name: f"{ROOT}"})
    assert not isinstance(process, ForkedWatchdog)
    assert status(process) == 0
