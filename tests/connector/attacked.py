"""A side channel in a process of its own, so that what an attack costs it can be measured from outside.

It is forked from a process that has imported all that it needs: to start Python and to import costs more processor time
than most attacks. It sends its port; then what was counted for each word that it receives, until nobody is there.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

from connector.counters import Counters
from connector.messages import Verdict
from connector.side_channel import Listener
from connector.tcp_server import ServerLimits
from tests.connector.strangers import memory_of

PAYLOAD = bytes(50_000)


@dataclass(frozen=True)
class Victim:
    """The process of the side channel and its port, for the test."""

    process: ForkServerProcess
    pipe: Connection
    port: int

    @property
    def pid(self) -> int:
        """The process's."""
        assert self.process.pid is not None
        return self.process.pid

    def memory(self) -> int:
        """Resident bytes."""
        return memory_of(self.pid)

    def cpu(self) -> float:
        """Seconds of processor time so far."""
        fields = Path(f"/proc/{self.pid}/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def descriptors(self) -> int:
        """How many are open."""
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def counts(self) -> dict[str, int]:
        """What was counted since the last call, as `counter/label`."""
        return self.tell("counts")

    def tell(self, word: str) -> dict[str, int]:
        """The same, after a word to the process."""
        self.pipe.send(word)
        found: dict[str, int] = self.pipe.recv()
        return found

    def close(self) -> None:
        """End it."""
        self.pipe.close()
        self.process.join(30)
        assert self.process.exitcode == 0
        self.process.close()


def start(limits: dict[str, Any] | None = None, descriptors: int = 0, left: int = -1) -> Victim:
    """Start one and wait until it listens. It may have so many descriptors, where they are not 0; all but as many as
    are ``left``, where that is not negative, are taken until it is told to release them."""
    ours, theirs = multiprocessing.Pipe()
    process = _mother().Process(target=serve, args=(theirs, limits or {}, descriptors, left))
    process.start()
    theirs.close()
    return Victim(process, ours, ours.recv())


def _mother() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def take_descriptors(left: int) -> list[int]:
    taken: list[int] = []
    with contextlib.suppress(OSError):
        while True:
            taken.append(os.open(os.devnull, os.O_RDONLY))
    for _ in range(left):
        os.close(taken.pop())
    return taken


def serve(pipe: Connection, limits: dict[str, Any], descriptors: int, left: int) -> None:
    """Be attacked."""
    if descriptors:
        resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))
    counters = Counters()
    listener = Listener(
        "127.0.0.1", 0, {(0, 0): PAYLOAD}, lambda *_: Verdict.HELD, counters, limits=ServerLimits(**limits)
    )
    listener.start()
    taken = take_descriptors(left) if left >= 0 else []
    pipe.send(listener.port)
    with contextlib.suppress(EOFError):
        while True:
            if pipe.recv() == "release":
                while taken:
                    os.close(taken.pop())
            pipe.send({"/".join((name, *labels)): n for name, labels, n in counters.drain().counts})
    listener.stop()
