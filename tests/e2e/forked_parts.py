"""Fork nodes from a process that has imported vLLM (`template`). A small node's start takes ten seconds of CPU, of
which imports take six and a half.

Nodes with other variables at import time are started, not forked. So are those of `make demo`, of compose and of the
chart, which have tests of their own (`test_launcher`, `test_compose_cpu`, `test_rollouts`).
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import pytest

from deploy.local import supervise
from deploy.local.node import SERVER, NodeSpec, Role, environment
from deploy.local.paths import ROOT
from deploy.local.supervise import Process, inherited, watched
from tests.e2e.template import CODE, PID

IMPORTS = ("vllm.entrypoints.launchers.api_server.entry", "vllm.v1.engine.async_llm", "vllm.v1.worker.cpu_worker")
READ_LATER = frozenset(
    {"VLLM_NIXL_SIDE_CHANNEL_PORT", "VLLM_PLUGINS", "VLLM_SERVER_DEV_MODE", "PYTHONPATH", "PYTEST_CURRENT_TEST"}
)
"""Variables that no import reads, beside our own (`OURS`). Folders of modules hold plugins, which are loaded later."""
OURS = "PDPROXY_"
LOOK_EVERY_S = 0.02


class ForkedWatchdog:
    """A watchdog that is not a child of this process. `stdin`: its lifeline. `status`: where its exit status comes."""

    def __init__(self, pid: int, stdin: IO[bytes], status: int) -> None:
        self.pid = pid
        self.stdin = stdin
        self._status = status
        self._code: int | None = None
        self._turn = threading.Lock()

    def poll(self) -> int | None:
        with self._turn:
            if self._code is None and select.select([self._status], [], [], 0)[0]:
                with os.fdopen(self._status, "rb") as status:
                    said = status.read()  # until it has ended
                # a process that was killed sends nothing
                self._code = CODE.unpack(said)[0] if said else -signal.SIGKILL
            return self._code

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its exit. Raises subprocess.TimeoutExpired."""
        limit = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            left = None if limit is None else limit - time.monotonic()
            if left is not None and left <= 0:
                raise subprocess.TimeoutExpired("a forked watchdog", timeout or 0.0)
            time.sleep(LOOK_EVERY_S)  # without a wait at the descriptor, which another thread may close
        return code

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, sig)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@dataclass
class Template:
    """Forks processes that run `module`. Commands of other modules or with other variables are started.

    Attributes:
        module: as in `python -m`.
        imports: modules that are imported before a fork.
        variables: the environment of the imports.
    """

    module: str
    imports: Sequence[str]
    variables: Mapping[str, str]
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False)
    _orders: socket.socket | None = field(default=None, init=False)
    _turn: threading.Lock = field(default_factory=threading.Lock, init=False)

    def watched(
        self, grace: float, command: Sequence[str], environment: Mapping[str, str], cwd: Path, output: IO[bytes]
    ) -> Process:
        """As `supervise.watched`."""
        if list(command[:3]) != [sys.executable, "-m", self.module] or not self._fits(environment):
            return watched(grace, command, environment, cwd, output)
        order = {"grace": str(grace), "command": list(command), "environment": dict(environment), "folder": str(cwd)}
        (theirs, ours), (status, told) = os.pipe(), os.pipe()
        with self._turn:
            orders = self._orders or self._started()
            socket.send_fds(orders, [json.dumps(order).encode()], [theirs, output.fileno(), told])
            (pid,) = PID.unpack(orders.recv(PID.size))
        os.close(theirs)
        os.close(told)
        return ForkedWatchdog(pid, os.fdopen(ours, "wb", buffering=0), status)

    def close(self) -> None:
        """End the template process. Processes that were forked from it stay."""
        if self._orders and self._process:
            self._orders.close()
            self._process.wait()

    def _fits(self, environment: Mapping[str, str]) -> bool:
        different = {name for name, _ in set(environment.items()) ^ set(self.variables.items())}
        return all(name in READ_LATER or name.startswith(OURS) for name in different)

    def _started(self) -> socket.socket:
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        line = [sys.executable, "-m", "tests.e2e.template", str(theirs.fileno()), self.module, *self.imports]
        with theirs:
            self._process = subprocess.Popen(
                line,
                stdin=subprocess.DEVNULL,
                env=dict(self.variables),
                cwd=ROOT,
                pass_fds=[theirs.fileno()],
                process_group=0,
            )
        return self._orders


@contextmanager
def forked_nodes() -> Iterator[None]:
    """While inside, supervisors fork nodes where they can."""
    template = Template(SERVER, IMPORTS, environment(NodeSpec("template", Role.DECODE, 0, 0), inherited()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(supervise, "watched", template.watched)
        try:
            yield
        finally:
            template.close()
