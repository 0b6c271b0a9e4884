"""A process that has imported a Python module's imports, and forks to run the module.

`python -m tests.e2e.template DESCRIPTOR MODULE IMPORT…`. Orders come over the socket DESCRIPTOR (`forked_parts`). For
each order this process forks a watchdog, and the watchdog forks the command. Both drop the descriptors, signal handlers
and variables of this process, as a started program has none of them.
"""

import array
import atexit
import fcntl
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import struct
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from setproctitle import getproctitle, setproctitle

from deploy.local.watchdog import die_with_watchdog, main

PID = struct.Struct("=i")
CODE = struct.Struct("=B")
LONGEST = 1 << 20
"""The most bytes of an order: a command line and an environment."""
INPUT, OUTPUT, STATUS = range(3)
"""The descriptors that come with an order: its lifeline, its output, and its exit status."""


@dataclass
class Forked:
    """A child with the interface that the watchdog uses of `subprocess.Popen`."""

    pid: int
    returncode: int = field(default=-1, init=False)
    _ended: bool = field(default=False, init=False)

    def poll(self) -> None:
        """Collect it if it has ended."""
        self._collect(os.WNOHANG)

    def wait(self) -> None:
        """Collect it when it ends."""
        self._collect(0)

    def _collect(self, options: int) -> None:
        if not self._ended:
            pid, status = os.waitpid(self.pid, options)
            if pid:
                self.returncode, self._ended = os.waitstatus_to_exitcode(status), True


def serve(orders: socket.socket, module: str) -> None:
    """Fork a watchdog for each order until nobody can send one, and answer with its process id."""
    while True:
        space = socket.CMSG_SPACE(3 * array.array("i").itemsize)
        message, ancillary, _, _ = orders.recvmsg(LONGEST, space, socket.MSG_CMSG_CLOEXEC)
        if not message:
            return
        descriptors = array.array("i", ancillary[0][2])
        if not (pid := os.fork()):
            orders.close()
            be_a_watchdog(json.loads(message), descriptors, module)
        for each in descriptors:
            os.close(each)
        orders.sendall(PID.pack(pid))


def be_a_watchdog(order: dict[str, Any], descriptors: Sequence[int], module: str) -> None:
    """Watch over the ordered command, write its exit status, and end."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    status = descriptors[STATUS]
    for target, source in ((0, INPUT), (1, OUTPUT), (2, OUTPUT)):
        os.dup2(descriptors[source], target)
    os.close(descriptors[INPUT])
    os.close(descriptors[OUTPUT])

    def fork_command(command: Sequence[str], temporary: str) -> Forked:
        if not (pid := os.fork()):
            run(module, command, {**order["environment"], "TMPDIR": temporary}, order["folder"])
        return Forked(pid)

    code = 1
    try:
        code = main([order["grace"], *order["command"]], fork_command)
    finally:
        os.write(status, CODE.pack(code))
        end(code)


def run(module: str, command: Sequence[str], environment: dict[str, str], folder: str) -> None:
    """Run `python -m MODULE …` as the command line says, and end with its exit status."""
    be_fresh()
    sys.path[: 1 + len(_more_path(os.environ))] = [folder, *_more_path(environment)]  # as `-m` sets it
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    setproctitle(" ".join(command))
    sys.argv[:] = command[2:]
    code: object = 1
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as ended:
        code = 0 if ended.code is None else ended.code
    finally:
        if sys.exc_info()[0]:
            traceback.print_exc()
        end(code if isinstance(code, int) else 1)


def _more_path(environment: Mapping[str, str]) -> list[str]:
    """More folders that modules are looked for in."""
    return [os.path.abspath(each) for each in environment.get("PYTHONPATH", "").split(os.pathsep) if each]


def be_fresh() -> None:
    """Reset what a started program would not have: a watchdog's signal handlers, and open descriptors."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.setpgid(0, 0)
    die_with_watchdog()
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    for number in map(int, os.listdir("/proc/self/fd")):
        if number > 2 and _closes_at_start(number):
            os.close(number)
    tempfile.tempdir = None


def _closes_at_start(number: int) -> bool:
    try:
        return bool(fcntl.fcntl(number, fcntl.F_GETFD) & fcntl.FD_CLOEXEC)
    except OSError:  # the descriptor of the listing itself is closed
        return False


def end(code: int) -> None:
    """End this process as a program ends, without returning to the fork."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def prepare(imports: Sequence[str]) -> None:
    """Import the modules, and check that no thread runs: threads would be missing in a fork."""
    getproctitle()  # notes where the title is, which a process with other variables would not find
    for each in imports:
        importlib.import_module(each)
    assert len(os.listdir("/proc/self/task")) == 1, "an import has started a thread"
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # watchdogs are not waited for


if __name__ == "__main__":
    descriptor, what, *needed = sys.argv[1:]
    prepare(needed)
    serve(socket.socket(fileno=int(descriptor)), what)
