"""Parts and their watchdogs, with small Python programs for parts: nothing outlives its parent, however that ends."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deploy.local.paths import ROOT
from deploy.local.supervise import Part, PartEndedError, Stopped, Supervisor, inherited, stop_signals

WITHIN_S = 60.0
GRACE_S = 0.3
"""Until what ignores SIGTERM gets SIGKILL; PARENT has the same."""

FAMILY = """
import os, pathlib, subprocess, sys, time
# A child, and a grandchild in a session of its own, each leaving its process id.
here = pathlib.Path(sys.argv[1])
sleeper = "import os, pathlib, sys, time; pathlib.Path(sys.argv[1]).write_text(str(os.getpid())); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", sleeper, str(here / "grandchild")], start_new_session=True)
(here / "child").write_text(str(os.getpid()))
time.sleep(600)
"""

IGNORES_SIGTERM = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + FAMILY

SCRATCH = """
import pathlib, socket, sys, tempfile, time, uuid
# A file and a socket in the temporary folder, whose path is left for the test; then what the test asks for.
folder = pathlib.Path(tempfile.gettempdir())
(folder / "file").write_text("left")
socket.socket(socket.AF_UNIX).bind(str(folder / str(uuid.uuid4())))
here = pathlib.Path(sys.argv[1])
fresh = here / (sys.argv[2] + ".fresh")  # of its own: several parts write here at once
fresh.write_text(str(folder))
fresh.rename(here / sys.argv[2])
time.sleep(float(sys.argv[3]))
"""

PARENT = """
import sys
from pathlib import Path
from deploy.local.supervise import Supervisor, inherited, stop_signals
with stop_signals(), Supervisor(Path(sys.argv[1]), grace=0.3) as supervisor:
    supervisor.start("part", [sys.executable, "-c", sys.argv[2], sys.argv[1], *sys.argv[3:]], inherited(), Path.cwd())
    import time
    time.sleep(600)
"""


def wait_for(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not what():
        if time.monotonic() > deadline:
            pytest.fail(f"did not come about within {WITHIN_S:.0f} s")
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def pids(folder: Path) -> list[int]:
    """The family's process ids, once both have written theirs."""
    files = [folder / "child", folder / "grandchild"]
    wait_for(lambda: all(file.exists() and file.read_text(encoding="utf-8") for file in files))
    return [int(file.read_text(encoding="utf-8")) for file in files]


def temporary_folder(folder: Path, name: str) -> Path:
    """The temporary folder of a part that runs SCRATCH, once it has used it."""
    wait_for((folder / name).exists)
    return Path((folder / name).read_text(encoding="utf-8"))


def start(supervisor: Supervisor, code: str, *arguments: str) -> Part:
    return supervisor.start("part", [sys.executable, "-c", code, *arguments], inherited(), ROOT)


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Supervisor]:
    with Supervisor(tmp_path, grace=GRACE_S) as running:
        yield running


@pytest.mark.parametrize("code", [FAMILY, IGNORES_SIGTERM], ids=["ends on SIGTERM", "ignores SIGTERM"])
def test_close_ends_the_whole_family(supervisor: Supervisor, tmp_path: Path, code: str) -> None:
    start(supervisor, code, str(tmp_path))
    family = pids(tmp_path)
    assert all(is_alive(pid) for pid in family)
    supervisor.close()
    assert not any(is_alive(pid) for pid in family)


def test_a_part_is_out_of_reach_of_the_terminals_signals_but_scheduled_with_this_process(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    start(supervisor, FAMILY, str(tmp_path))
    child, _ = pids(tmp_path)
    assert os.getpgid(child) != os.getpgid(0)
    assert os.getsid(child) == os.getsid(0)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_parent_that_ends_by_any_signal_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path), IGNORES_SIGTERM], cwd=ROOT, stderr=subprocess.DEVNULL
    )
    family = pids(tmp_path)
    parent.send_signal(number)
    parent.wait(WITHIN_S)
    wait_for(lambda: not any(is_alive(pid) for pid in family))


def test_a_killed_watchdog_takes_its_command_along(
    supervisor: Supervisor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # nothing is left to remove the part's temporary folder
    part = start(supervisor, FAMILY, str(tmp_path))
    child, grandchild = pids(tmp_path)
    part.process.kill()
    wait_for(lambda: not is_alive(child))
    os.kill(grandchild, signal.SIGKILL)  # no process is left that would end such an orphan


def test_orphans_go_when_the_command_ends_by_itself(supervisor: Supervisor, tmp_path: Path) -> None:
    part = start(supervisor, FAMILY, str(tmp_path))
    child, grandchild = pids(tmp_path)
    os.kill(child, signal.SIGKILL)
    assert part.process.wait(WITHIN_S) == 128 + signal.SIGKILL
    assert not is_alive(grandchild)


def test_each_part_has_a_temporary_folder_that_goes_with_it(supervisor: Supervisor, tmp_path: Path) -> None:
    first, _ = (start(supervisor, SCRATCH, str(tmp_path), name, "600") for name in ("a", "b"))
    folders = [temporary_folder(tmp_path, name) for name in ("a", "b")]
    assert [len(list(folder.iterdir())) for folder in folders] == [2, 2]
    supervisor.stop(first)
    assert [folder.exists() for folder in folders] == [False, True]
    supervisor.close()
    assert not folders[1].exists()


def test_a_part_that_ends_by_itself_leaves_no_temporary_folder(supervisor: Supervisor, tmp_path: Path) -> None:
    part = start(supervisor, SCRATCH, str(tmp_path), "a", "0")
    assert part.process.wait(WITHIN_S) == 0
    assert not temporary_folder(tmp_path, "a").exists()


def test_a_parent_that_is_killed_leaves_no_temporary_folder(tmp_path: Path) -> None:
    line = [sys.executable, "-c", PARENT, str(tmp_path), SCRATCH, "a", "600"]
    parent = subprocess.Popen(line, cwd=ROOT, stderr=subprocess.DEVNULL)
    folder = temporary_folder(tmp_path, "a")
    assert folder.exists()
    parent.kill()
    parent.wait(WITHIN_S)
    wait_for(lambda: not folder.exists())


def test_an_ended_part_is_reported_with_its_code_and_last_lines(supervisor: Supervisor) -> None:
    part = start(supervisor, "import sys; print('last words', flush=True); sys.exit(7)")
    part.process.wait(WITHIN_S)
    with pytest.raises(PartEndedError, match=r"part ended with code 7(.|\n)*last words"):
        supervisor.require_all_alive()


def test_a_stopped_part_is_not_reported_as_ended(supervisor: Supervisor, tmp_path: Path) -> None:
    part = start(supervisor, FAMILY, str(tmp_path))
    family = pids(tmp_path)
    supervisor.require_all_alive()
    supervisor.stop(part)
    assert not any(is_alive(pid) for pid in family)
    supervisor.require_all_alive()


def test_a_signal_becomes_an_exception_once_and_the_old_handlers_come_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Stopped) as stopped, stop_signals():
        signal.raise_signal(signal.SIGTERM)
    assert stopped.value.number == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before
