"""Start parts, notice when one ends, take all of them down; no part outlives this process, however it ends.

Each part runs under a watchdog (see watchdog.py), in a process group of its own, so that the terminal's Ctrl-C
reaches this process alone and the parts end in order. Not in a session of its own: Linux schedules a session as a
group, and a node that spins while it waits for another was seen to keep the other's session from running for 30 s
(Linux 6.18, two cores; docs/decisions/cpu-nodes.md).
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, Protocol, Self

WATCHDOG = Path(__file__).with_name("watchdog.py")
GRACE_S = 10.0
SLACK_S = 10.0
"""How much longer than its grace a watchdog may take before it is ended itself."""


class PartEndedError(Exception):
    """A part ended that was to stay up; the message holds its last log lines."""


class Stopped(Exception):
    """Somebody asked this process to end; `number` is the signal."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number


class Process(Protocol):
    """A watchdog's process, as `subprocess.Popen` shows it."""

    @property
    def pid(self) -> int: ...

    @property
    def stdin(self) -> IO[bytes] | None: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def send_signal(self, sig: int) -> None: ...

    def kill(self) -> None: ...


def watched(
    grace: float, command: Sequence[str], environment: Mapping[str, str], cwd: Path, output: IO[bytes]
) -> Process:
    """Start `command` under a watchdog, which ends it when its own standard input closes."""
    return subprocess.Popen(
        [sys.executable, "-I", "-S", str(WATCHDOG), str(grace), *command],
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=subprocess.STDOUT,
        env=dict(environment),
        cwd=cwd,
        process_group=0,
    )


@dataclass(frozen=True)
class Part:
    """One command under its watchdog. `process` is the watchdog: it ends when, and as, the command does."""

    name: str
    log: Path
    process: Process

    def last_lines(self, count: int = 25) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(f"  | {line}" for line in lines[-count:])

    def require_alive(self) -> None:
        """Raise PartEndedError if it has ended."""
        code = self.process.poll()
        if code is not None:
            raise PartEndedError(f"{self.name} ended with code {code}; the end of {self.log}:\n{self.last_lines()}")

    def let_go(self) -> None:
        """Tell the watchdog to end the command; returns at once."""
        if self.process.stdin is not None and not self.process.stdin.closed:
            self.process.stdin.close()

    def wait(self, grace: float) -> None:
        """Wait until nothing is left of it; a watchdog that does not manage in time is killed with what it started."""
        try:
            self.process.wait(grace + SLACK_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Supervisor(AbstractContextManager["Supervisor"]):
    """Holds the parts; leaving it ends them all, the last started first in line."""

    def __init__(self, logs: Path, grace: float = GRACE_S) -> None:
        self._logs = logs
        self._grace = grace
        self._parts: list[Part] = []

    def start(self, name: str, command: Sequence[str], environment: Mapping[str, str], cwd: Path) -> Part:
        """Start `command`; its output goes to `NAME.log` in the log folder."""
        self._logs.mkdir(parents=True, exist_ok=True)
        log = self._logs / f"{name}.log"
        with log.open("wb") as output:
            part = Part(name, log, watched(self._grace, command, environment, cwd, output))
        self._parts.append(part)
        return part

    def require_all_alive(self) -> None:
        """Raise PartEndedError if any part has ended."""
        for part in self._parts:
            part.require_alive()

    def stop(self, part: Part) -> None:
        """End one part and wait for it."""
        self._parts.remove(part)
        part.let_go()
        part.wait(self._grace)

    def close(self) -> None:
        """End all parts at once and wait for them."""
        for part in reversed(self._parts):
            part.let_go()
        while self._parts:
            self._parts.pop().wait(self._grace)

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __enter__(self) -> Self:
        return self


def stop(number: int, _frame: FrameType | None) -> None:
    """Turn a signal into an exception; once, so that the way down is not cut short by a second one."""
    for one in STOP_SIGNALS:
        signal.signal(one, signal.SIG_IGN)
    raise Stopped(number)


STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def stop_signals() -> Iterator[None]:
    """While inside, SIGINT, SIGTERM and SIGHUP raise Stopped, so that whatever was started is taken down."""
    before = {number: signal.signal(number, stop) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def inherited() -> dict[str, str]:
    """Return this process's environment, for a part to build its own on."""
    return dict(os.environ)
