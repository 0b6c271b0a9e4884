"""CPU time of the proxy's start, until its ports are said to be open: `python -m deploy.bench.start_time [PATH …]`.

The least of some starts of each Python (default: the project's), with two nodes that are not there.
"""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from deploy.bench.cpu import seconds_of_tree
from deploy.bench.interpreters import environment, interpreter
from deploy.local.paths import ROOT, VENV
from deploy.local.supervise import inherited

STARTS = 8
WORDS = ["--prefill", "http://127.0.0.1:9", "--decode", "http://127.0.0.1:9", "--port", "0", "--admin-port", "0"]


def start_seconds(python: Path) -> float:
    """Seconds of one start. Bytecode is kept, as in an image, whatever this process is told."""
    command = [str(python), "-m", "pdproxy", "serve", *WORDS]
    told = {**inherited(), "PYTHONDONTWRITEBYTECODE": ""}
    with subprocess.Popen(command, cwd=ROOT, env=told, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            next(line for line in process.stderr if "clients:" in line)
            return seconds_of_tree(process.pid)
        finally:
            process.kill()


def main(arguments: Sequence[str]) -> int:
    """Print a line for each Python; the process's exit status."""
    for python in [environment(Path(each)) for each in arguments] or [VENV / "bin" / "python"]:
        least = min(start_seconds(python) for _ in range(STARTS))
        print(f"{interpreter(python).describe()}: a start takes {1000 * least:.0f} ms of CPU", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
