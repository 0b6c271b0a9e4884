"""The demonstration as a person runs it, with real engines: it answers, and whatever ends it leaves nothing behind."""

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deploy.local.demo import SEED, TOKENS
from deploy.local.model.quiz import quiz
from deploy.local.paths import ROOT
from deploy.local.supervise import WATCHDOG
from deploy.local.watchdog import descendants

pytestmark = [pytest.mark.e2e, pytest.mark.own_engines]

WHOLE_RUN_S = 500.0
DOWN_WITHIN_S = 90.0
MARK = "PDPROXY_TEST_RUN"
ENGINE = "deploy.local.server"
OF_MAKE = {"MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "ONCE"}
"""Variables that a `make` which runs this test hands down, and another one is not to take up."""
CORE = "VLLM::EngineCore"
DEMO = [sys.executable, "-m", "deploy.local.demo"]


@pytest.fixture
def mark() -> str:
    """A word that all processes of one run carry in their environment."""
    return uuid.uuid4().hex


def marked(mark: str) -> set[int]:
    """All living processes that carry the mark."""
    found: set[int] = set()
    for entry in Path("/proc").glob("[0-9]*/environ"):
        try:
            carries = f"{MARK}={mark}".encode() in entry.read_bytes()
        except (PermissionError, FileNotFoundError, ProcessLookupError):
            continue  # another user's, or it just ended
        if carries:
            found.add(int(entry.parent.name))
    return found


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def engines(parent: int) -> list[int]:
    """The API servers below a process, their watchdogs not counted."""
    lines = {pid: command_line(pid) for pid in descendants(parent)}
    return sorted(pid for pid, line in lines.items() if f"-m {ENGINE}" in line and WATCHDOG.name not in line)


def cores(parent: int) -> list[int]:
    """The engine cores below a process; vLLM names them so once they are on their way."""
    return sorted(pid for pid in descendants(parent) if command_line(pid).startswith(CORE))


def wait_for(what: Callable[[], bool], within: float) -> None:
    deadline = time.monotonic() + within
    while not what():
        if time.monotonic() > deadline:
            pytest.fail(f"did not come about within {within:.0f} s")
        time.sleep(0.1)


@pytest.fixture
def launched(mark: str, tmp_path: Path) -> Iterator[Callable[[list[str]], subprocess.Popen[str]]]:
    """Start a command that carries the mark, in a process group of its own, as a shell would."""
    started: list[subprocess.Popen[str]] = []

    def launch(command: list[str]) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**{name: value for name, value in os.environ.items() if name not in OF_MAKE}, MARK: mark},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            process_group=0,
        )
        started.append(process)
        return process

    yield launch
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def test_the_demo_answers_explains_itself_and_leaves_no_process(
    mark: str, launched: Callable[[list[str]], subprocess.Popen[str]]
) -> None:
    process = launched(["make", "demo", "ONCE=1"])
    output, _ = process.communicate(timeout=WHOLE_RUN_S)
    assert process.returncode == 0, output
    for turn in (1, 2):
        assert f"answer: {quiz(SEED, TOKENS).at_turn(turn).answer.strip()}" in output
    assert output.count("server-timing: ") == 2
    assert "first token after" in output
    assert "curl -N http://127.0.0.1:" in output
    assert re.search(r"live: http://127\.0\.0\.1:\d+/ui\n$", output)
    first, second = output.split("Turn 2")
    assert "x-pdproxy-route: disaggregated; reason=nothing_cached" in first
    assert re.search(r"decode node, attention blocks: .*[1-9]\d* pulled", first)
    assert re.search(r"decode node, state blocks: .*[1-9]\d* pulled", first)
    assert "x-pdproxy-route: local; reason=cached" in second
    assert re.search(r"decode node, prompt tokens: .*[1-9]\d* hit", second)
    assert not marked(mark)


def test_ctrl_c_while_starting_takes_everything_down(
    mark: str, launched: Callable[[list[str]], subprocess.Popen[str]]
) -> None:
    process = launched(["make", "demo"])
    wait_for(lambda: len(cores(process.pid)) >= 2, WHOLE_RUN_S)
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=DOWN_WITHIN_S)
    assert "nothing is left running" in output
    wait_for(lambda: not marked(mark), DOWN_WITHIN_S)


@pytest.mark.parametrize(
    ("number", "grown"), [(signal.SIGTERM, engines), (signal.SIGKILL, cores)], ids=["SIGTERM early", "SIGKILL late"]
)
def test_a_signal_to_the_launcher_takes_everything_down(
    mark: str,
    launched: Callable[[list[str]], subprocess.Popen[str]],
    number: signal.Signals,
    grown: Callable[[int], list[int]],
) -> None:
    process = launched(DEMO)
    wait_for(lambda: len(grown(process.pid)) >= 2, WHOLE_RUN_S)
    process.send_signal(number)
    process.communicate(timeout=DOWN_WITHIN_S)
    wait_for(lambda: not marked(mark), DOWN_WITHIN_S)


def test_the_crash_of_a_part_takes_everything_down_and_is_reported(
    mark: str, launched: Callable[[list[str]], subprocess.Popen[str]]
) -> None:
    process = launched(DEMO)
    wait_for(lambda: len(engines(process.pid)) >= 2, DOWN_WITHIN_S)
    os.kill(engines(process.pid)[0], signal.SIGKILL)
    output, _ = process.communicate(timeout=DOWN_WITHIN_S)
    assert process.returncode == 1
    assert re.search(r"error: (prefill|decode) ended with code 137", output)
    assert not marked(mark)
