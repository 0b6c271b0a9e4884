"""What befalls a node: its processes are killed or stopped, and go on."""

import enum
import signal

from deploy.local.supervise import Part
from deploy.local.warden import descendants, send

GONE_WITHIN_S = 60.0


class Fate(enum.Enum):
    """How a node fails; the value is the signal that all its processes get: server, engine core, workers."""

    KILLED = signal.SIGKILL
    STOPPED = signal.SIGSTOP


def strike(part: Part, fate: Fate) -> None:
    """Let it happen now; a killed node is gone when this returns."""
    send(descendants(part.process.pid), fate.value)
    if fate is Fate.KILLED:
        part.process.wait(GONE_WITHIN_S)


def go_on(part: Part) -> None:
    """Wake what was stopped; good for any node."""
    send(descendants(part.process.pid), signal.SIGCONT)
