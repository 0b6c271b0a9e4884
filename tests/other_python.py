"""The proxy's own tests with another Python: `python -m tests.other_python PATH [ARGUMENT OF PYTEST …]`.

Engines are pinned to Python 3.11; the proxy runs on newer ones, and its image does. So those tests that need no engine
run in an environment of that Python, with the proxy's locked packages and what the tests themselves import.
"""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from deploy.bench.interpreters import environment, interpreter
from deploy.local.bootstrap import BootstrapError
from deploy.local.paths import REQUIREMENTS, ROOT

TESTED = (
    *("admin", "app", "events", "intake", "legs", "nodes", "observe", "orchestration", "planning", "server"),
    *("settings", "stream", "transport"),
)
NEED_AN_ENGINE = ("tests/events/test_vllm_publisher.py",)
PACKAGES = frozenset(
    (
        *("cffi", "cryptography", "hypothesis", "iniconfig", "jsonschema-rs", "packaging", "pluggy", "pycparser"),
        *("pygments", "pytest", "pytest-asyncio", "pytest-timeout", "pyzmq", "sortedcontainers", "websockets"),
    )
)
"""Packages of the other locks."""


def pins() -> tuple[str, ...]:
    """The packages with their versions, as the project's own environment has them."""
    lines = [line for name in ("cpu", "dev") for line in (REQUIREMENTS / f"{name}.txt").read_text().splitlines()]
    return tuple(sorted(line for line in lines if line.partition("==")[0] in PACKAGES))


def main(arguments: Sequence[str]) -> int:
    """Run the tests; pytest's exit status."""
    if not arguments:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        python = environment(Path(arguments[0]), pins())
    except BootstrapError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(interpreter(python).describe(), flush=True)
    folders = [f"tests/{each}" for each in TESTED] + sorted(
        f"tests/{each.name}" for each in (ROOT / "tests").glob("test_*.py")
    )
    ignored = [f"--ignore={each}" for each in NEED_AN_ENGINE]
    command = [str(python), "-m", "pytest", "-q", "-m", "not e2e and not long", *ignored, *folders, *arguments[1:]]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
