"""Run one command so that nothing of it outlives its parent, no temporary file either: `watchdog.py GRACE COMMAND …`.

The parent holds the other end of our standard input and writes nothing to it. When that end closes, because the parent
said so or because it is gone (however it went: a pipe closes under SIGKILL too), the whole family goes: first SIGTERM,
after GRACE seconds SIGKILL. A descendant that left the process group is found all the same: this process is the
subreaper, so every orphan of the family becomes its child. Linux and standard library only.

The command's temporary files go to a folder of its own (TMPDIR), which is removed when the family has ended: an engine
that is killed leaves its sockets and files behind. The folder lies in the system's temporary folder, whose path is
short: the path of a unix socket may have 107 characters, of which vLLM's names take 36.
"""

import ctypes
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
POLL_S = 0.05
LIFELINE = 0
"""Standard input: the end of the pipe whose other end the parent holds."""


class Child(Protocol):
    """The command's process, as `subprocess.Popen` shows it."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int: ...

    def poll(self) -> object: ...

    def wait(self) -> object: ...


def prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl failed")


def die_with_watchdog() -> None:
    """Runs in the child before it becomes the command: should this watchdog be killed outright, the child is told."""
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def start(command: Sequence[str], temporary: str) -> Child:
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "TMPDIR": temporary},
        process_group=0,
        preexec_fn=die_with_watchdog,  # noqa: PLW1509 - the danger is in threads; this process has one
    )


def wait_for_an_end(child: Child, stop: int) -> None:
    """Return when the child has ended, the parent has gone, or somebody wrote to `stop`."""
    with selectors.DefaultSelector() as watched:
        ended = os.pidfd_open(child.pid)
        for source in (ended, LIFELINE, stop):
            watched.register(source, selectors.EVENT_READ)
        watched.select()
        os.close(ended)


def parents() -> dict[int, int]:
    """Return the parent of every process, by process id."""
    found: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            after_name = entry.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended while we looked
        if after_name[0] != "Z":
            found[int(entry.parent.name)] = int(after_name[1])
    return found


def descendants(root: int) -> set[int]:
    """Return all living processes below `root`."""
    family, tree = {root}, parents()
    while grown := {pid for pid, parent in tree.items() if parent in family} - family:
        family |= grown
    return family - {root}


def send(pids: set[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def reap(child: Child) -> None:
    """Collect what ended, orphans of the family too; the child's own exit status goes to its Popen."""
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if ended is None:
            return
        if ended.si_pid == child.pid:
            child.poll()
        else:
            os.waitpid(ended.si_pid, 0)


def end_family(child: Child, grace: float) -> None:
    """Ask everybody below to end, then make them."""
    deadline = time.monotonic() + grace
    told: set[int] = set()
    while family := descendants(os.getpid()):
        if time.monotonic() < deadline:
            send(family - told, signal.SIGTERM)
            told |= family
        else:
            send(family, signal.SIGKILL)
        time.sleep(POLL_S)
        reap(child)
    child.wait()


def stop_pipe() -> int:
    """Return a descriptor that becomes readable when this process is asked to end."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, lambda *_: None)  # not SIG_IGN, which the command would inherit
    return reader


def main(arguments: Sequence[str], begin: Callable[[Sequence[str], str], Child] = start) -> int:
    grace, *command = arguments
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    stop = stop_pipe()
    with tempfile.TemporaryDirectory(prefix="pdproxy-", ignore_cleanup_errors=True) as temporary:
        child = begin(command, temporary)
        wait_for_an_end(child, stop)
        end_family(child, float(grace))
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
