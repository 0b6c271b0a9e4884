"""A side channel in a process of its own, so that what an attack costs it can be measured from outside.

    python -m tests.connector.attacked '{"connections": 64, "opening": 1.0}' 200 3

prints its port; then a line of what was counted for each line that it reads, and ends with its input. The second
argument limits its descriptors, 0 leaves them; all but as many as the third says are taken, until it reads "release".
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from connector.counters import Counters
from connector.messages import Verdict
from connector.side_channel import Listener
from connector.tcp_server import Limits
from tests.connector.strangers import memory_of

ROOT = Path(__file__).parents[2]
PAYLOAD = bytes(50_000)


@dataclass(frozen=True)
class Victim:
    """The process of the side channel and its port, for the test."""

    process: subprocess.Popen[str]
    port: int

    def memory(self) -> int:
        """Resident bytes."""
        return memory_of(self.process.pid)

    def cpu(self) -> float:
        """Seconds of processor time so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def descriptors(self) -> int:
        """How many are open."""
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def counts(self) -> dict[str, int]:
        """What was counted since the last call, as `counter/label`."""
        return self.tell("counts")

    def tell(self, word: str) -> dict[str, int]:
        """The same, after a word to the process."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()
        found: dict[str, int] = json.loads(self.process.stdout.readline())
        return found

    def close(self) -> None:
        """End it."""
        self.process.communicate(timeout=30)


def start(limits: dict[str, float] | None = None, descriptors: int = 0, left: int = -1) -> Victim:
    """Start one and wait until it listens."""
    command = [sys.executable, "-m", "tests.connector.attacked", json.dumps(limits or {}), str(descriptors), str(left)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    return Victim(process, int(process.stdout.readline()))


def take_descriptors(left: int) -> list[int]:
    taken: list[int] = []
    with contextlib.suppress(OSError):
        while True:
            taken.append(os.open(os.devnull, os.O_RDONLY))
    for _ in range(left):
        os.close(taken.pop())
    return taken


def main(limits: str, descriptors: str, left: str) -> None:
    if int(descriptors):
        resource.setrlimit(resource.RLIMIT_NOFILE, (int(descriptors), int(descriptors)))
    counters = Counters()
    listener = Listener(
        "127.0.0.1", 0, {(0, 0): PAYLOAD}, lambda *_: Verdict.HELD, counters, limits=Limits(**json.loads(limits))
    )
    listener.start()
    taken = take_descriptors(int(left)) if int(left) >= 0 else []
    print(listener.port, flush=True)
    for line in sys.stdin:
        if line == "release\n":
            while taken:
                os.close(taken.pop())
        print(json.dumps({"/".join((name, *labels)): n for name, labels, n in counters.drain().counts}), flush=True)
    listener.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
