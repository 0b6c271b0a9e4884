"""Tests that run in forked workers end as they do in one process."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.local.paths import ROOT

CONFTEST = """
import os, pytest

def pytest_configure(config):
    config.addinivalue_line("markers", "together(name): one process")

@pytest.fixture(scope="session")
def made():
    with open("made", "a") as file:
        file.write(f"{os.getpid()} ")
    yield os.getpid()
    with open("ended", "a") as file:
        file.write(f"{os.getpid()} ")
"""
GOOD = """
import os, time

def test_it():
    time.sleep(0.3)
    with open("ran-by", "a") as file:
        file.write(f"{os.getpid()} ")
"""
BAD = """
import pytest

def test_it(capfd):
    assert True

@pytest.mark.parametrize("word", ["spoken", "unspoken"])
def test_that(word):
    print(f"it was {word}")
    assert word == "unspoken"

def test_left_out():
    pytest.skip("not today")
"""
SHARED = """
import time, pytest

pytestmark = pytest.mark.together("what is made")

def test_it(made):
    time.sleep(0.3)
"""
NOISY = """
import time

def test_it():
    for _ in range(2):
        print(f"said in {__name__}")
        time.sleep(0.3)
    assert False
"""


class Suite:
    """A folder with tests."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def have(self, **modules: str) -> None:
        for name, text in modules.items():
            (self._folder / f"{name}.py").write_text(text)

    def run(self, *options: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "pytest", "-p", "tests.forked_workers", "--rootdir=.", "-c", os.devnull, "."]
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        return subprocess.run(
            [*command, *options], cwd=self._folder, env=environ, capture_output=True, text=True, check=False, timeout=60
        )

    def pids(self, name: str) -> list[str]:
        """The ids of the processes that left a word in this file."""
        return (self._folder / name).read_text().split()


@pytest.fixture
def suite(tmp_path: Path) -> Suite:
    suite = Suite(tmp_path)
    suite.have(conftest=CONFTEST)
    return suite


def outcome(ran: subprocess.CompletedProcess[str]) -> str:
    """The last line of the output without its time."""
    return re.sub(" in .*", "", ran.stdout.splitlines()[-1].strip("= "))


@pytest.mark.parametrize("workers", ["0", "2"])
def test_what_fails_is_shown_with_its_output(suite: Suite, workers: str) -> None:
    suite.have(test_bad=BAD, test_good=GOOD)
    ran = suite.run("--workers", workers)
    assert ran.returncode == pytest.ExitCode.TESTS_FAILED
    assert outcome(ran) == "1 failed, 3 passed, 1 skipped"
    assert "test_bad.py .F.s" in ran.stdout
    assert "it was spoken" in ran.stdout
    assert "it was unspoken" not in ran.stdout
    assert "FAILED test_bad.py::test_that[spoken]" in ran.stdout


def test_modules_are_shared_out(suite: Suite) -> None:
    suite.have(test_first=GOOD, test_second=GOOD)
    assert outcome(suite.run("--workers", "2")) == "2 passed"
    assert len(set(suite.pids("ran-by"))) == 2


def test_what_two_workers_print_at_once_is_not_mixed(suite: Suite) -> None:
    suite.have(test_a=NOISY, test_b=NOISY)
    printed = suite.run("--workers", "2").stdout
    assert all(f"said in {name}\nsaid in {name}\n" in printed for name in ("test_a", "test_b"))


def test_those_that_are_marked_run_in_one_process(suite: Suite) -> None:
    suite.have(test_a=SHARED, test_b=SHARED)
    assert outcome(suite.run("--workers", "2")) == "2 passed"
    assert len(suite.pids("made")) == 1
    assert suite.pids("ended") == suite.pids("made")


def test_a_worker_that_dies_fails_the_session(suite: Suite) -> None:
    suite.have(test_a="import os\n\ndef test_it(): os._exit(0)\n", test_b=GOOD)
    ran = suite.run("--workers", "2")
    assert ran.returncode == pytest.ExitCode.INTERNAL_ERROR
    assert "a worker ended with status 0 in test_a.py" in ran.stdout
    assert "test_b.py ." in ran.stdout


def test_a_fixture_that_fails_at_the_end_fails_the_session(suite: Suite) -> None:
    suite.have(conftest=f"{CONFTEST}\n    raise OSError('the disk is full')", test_a=SHARED)
    ran = suite.run("--workers", "1")
    assert ran.returncode == pytest.ExitCode.INTERNAL_ERROR
    assert "a worker ended with status 1 after its tests" in ran.stdout
    assert "the disk is full" in ran.stderr


def test_modules_that_cannot_be_imported_are_named(suite: Suite) -> None:
    suite.have(test_a="import nothing_of_that_name", test_b=GOOD)
    ran = suite.run("--workers", "2")
    assert ran.returncode == pytest.ExitCode.INTERRUPTED
    assert "nothing_of_that_name" in ran.stdout
