"""Make `.venv` from the locks: `python3.11 deploy/local/bootstrap.py`.

Standard library only, since it runs before anything is installed. Does nothing when the environment is already what the
locks say, and brings it there in place when it is not.
"""

import argparse
import hashlib
import math
import os
import subprocess
import sys
import time
import venv
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path

WANTED = (3, 11)
STAMP = ".made-from"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
LOCKS = ("proxy", "cpu", "dev", "torch")
COMPILED_FROM = ("hatch_build.py", "pdproxy/stream/_scan.c")
"""Built when the project is installed, where there is a C compiler."""
TORCH_LOCK = "torch"
FASTEST = "--fastest"
CLEARLY_FASTER = 0.85
"""A share of the time that a loop takes the Python that was asked for: below it, another one is taken."""
ROUNDS = 3
"""The Pythons are timed in turns: a machine that others use is for seconds twice as slow."""
TIME_A_LOOP = """
import importlib.util, os, sys, sysconfig, timeit
pip_is_to_be_had = any(map(importlib.util.find_spec, ("ensurepip", "pip")))
header = os.path.join(sysconfig.get_path("include"), "Python.h")
if not pip_is_to_be_had or not os.path.exists(header):
    sys.exit(1)
class Point:
    def __init__(self, x): self.x = x
    def moved(self, by): return Point(self.x + by)
def loop():
    point, seen = Point(0), {}
    for number in range(8000):
        point = point.moved(number & 3)
        seen[number & 63] = point.x, str(number)
print(min(timeit.repeat(loop, number=1, repeat=15)))
"""


class BootstrapError(Exception):
    """The environment cannot be made; the message says what to do."""


@dataclass(frozen=True)
class Plan:
    """One environment to make: for which repository, and where."""

    root: Path
    venv: Path

    @property
    def python(self) -> Path:
        return self.venv / "bin" / "python"

    @property
    def projects(self) -> tuple[Path, Path]:
        """The proxy's distribution, and the nodes'."""
        return self.root, self.root / "connector"

    def lock(self, name: str) -> Path:
        return self.root / "requirements" / f"{name}.txt"

    def fingerprint(self) -> str:
        """Changes with the locks, with what both distributions declare of themselves, with what is compiled, and with
        the place."""
        import tomllib  # not there in older Pythons, which check_python is to turn away in words

        files = [folder / "pyproject.toml" for folder in self.projects]
        declared = [tomllib.loads(file.read_text(encoding="utf-8"))["project"] for file in files]
        read = [*map(self.lock, LOCKS), *(self.root / file for file in COMPILED_FROM)]
        parts = [str(self.root), repr(declared), *(file.read_text(encoding="utf-8") for file in read)]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def is_made(self) -> bool:
        stamp = self.venv / STAMP
        return self.python.exists() and stamp.exists() and stamp.read_text(encoding="utf-8") == self.fingerprint()


def check_python(version: tuple[int, ...], platform: str) -> None:
    """Raise BootstrapError where the pinned wheels do not fit."""
    if version[:2] != WANTED:
        found = ".".join(str(part) for part in version)
        raise BootstrapError(
            f"this needs Python {WANTED[0]}.{WANTED[1]}, for which its dependencies are pinned; found {found} "
            f"at {sys.executable}. Try: make PYTHON=python3.11"
        )
    if platform != "linux":
        raise BootstrapError(
            f"vLLM's CPU build and NIXL run on Linux; this is {platform}. Use a Linux VM, WSL or Docker."
        )


def pythons_on(path: str) -> list[str]:
    """Each Python of the wanted version in the folders of a PATH, one for each file."""
    found: dict[Path, str] = {}
    for each in (Path(folder) / f"python{WANTED[0]}.{WANTED[1]}" for folder in path.split(os.pathsep) if folder):
        if os.access(each, os.X_OK):
            found.setdefault(each.resolve(), str(each))
    return list(found.values())


def loop_time(python: str) -> float | None:
    """Seconds that a small loop takes it; None where it has no pip, or not the headers that torch compiles with."""
    asked = subprocess.run([python, "-c", TIME_A_LOOP], capture_output=True, text=True, check=False)
    return float(asked.stdout) if asked.returncode == 0 else None


def fastest(asked_for: str, others: Sequence[str], time_of: Callable[[str], float | None] = loop_time) -> str:
    """The one that was asked for, or another that is clearly faster.

    Built without optimisation, one takes half as long again for the loop, and a tenth to a fifth more for `make unit`.
    """
    timed = [(each, seconds) for _ in range(ROUNDS) for each in (asked_for, *others) if (seconds := time_of(each))]
    if not timed:
        return asked_for
    best, least = min(timed, key=itemgetter(1))
    own = min((seconds for each, seconds in timed if each == asked_for), default=math.inf)
    return best if least < own * CLEARLY_FASTER else asked_for


def go_on_with_the_fastest(arguments: Sequence[str]) -> None:
    """Replace this process where another Python on PATH is clearly faster."""
    best = fastest(sys.executable, pythons_on(os.environ.get("PATH", "")))
    if best != sys.executable:
        print(f"Of the Pythons here {best} is the fastest: it is taken (another: make PYTHON=PATH).", flush=True)
        os.execv(best, [best, __file__, *(each for each in arguments if each != FASTEST)])


def pip(plan: Plan, *arguments: str) -> list[str]:
    return [str(plan.python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet", *arguments]


def borrowed_pip(plan: Plan) -> list[str]:
    """Install pip into the environment with the pip of the Python that runs this."""
    return [sys.executable, "-m", "pip", "--python", str(plan.python), "install", "--quiet", "pip"]


def torch_commands(plan: Plan) -> list[list[str]]:
    """Ways to get torch's CPU build: from where pip is configured to look, else from PyTorch's own index."""
    pinned = pip(plan, "--no-deps", "-r", str(plan.lock(TORCH_LOCK)))
    return [pinned, [*pinned, "--index-url", TORCH_INDEX]]


def locked_command(plan: Plan) -> list[str]:
    files = [part for name in LOCKS if name != TORCH_LOCK for part in ("-r", str(plan.lock(name)))]
    return pip(plan, "--no-deps", *files)


def project_command(plan: Plan) -> list[str]:
    """Install the project itself, editable: vLLM finds our plugins by their entry points."""
    editable = [part for folder in plan.projects for part in ("--editable", str(folder))]
    return pip(plan, "--no-deps", "--no-build-isolation", *editable)


def run_first_that_works(commands: Sequence[Sequence[str]]) -> None:
    """Run the commands in turn until one succeeds; raise BootstrapError, with what each said, if none does."""
    said: list[str] = []
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return
        said.append(f"$ {' '.join(command)}\n{done.stderr.strip()[-2000:]}")
    raise BootstrapError("pip failed:\n" + "\n".join(said))


def make_empty(plan: Plan) -> None:
    """Create the environment, or take the one that is there; either way it counts as unfinished from here on."""
    (plan.venv / STAMP).unlink(missing_ok=True)
    if plan.python.exists():
        return
    try:
        venv.create(plan.venv, with_pip=True, clear=True)
    except subprocess.CalledProcessError:  # Debian splits ensurepip off; this Python's own pip can do it instead
        venv.create(plan.venv, with_pip=False, clear=True)
        run_first_that_works([borrowed_pip(plan)])


def steps(plan: Plan) -> list[tuple[str, Callable[[], None]]]:
    """The steps in order, each with the words that announce it."""
    return [
        ("an empty environment", lambda: make_empty(plan)),
        ("torch, CPU build", lambda: run_first_that_works(torch_commands(plan))),
        ("all other pinned packages", lambda: run_first_that_works([locked_command(plan)])),
        ("the project itself", lambda: run_first_that_works([project_command(plan)])),
    ]


def make_pinned(plan: Plan, pins: Path) -> None:
    """Install exactly the packages that a file of pins names, where the environment is not yet made of them."""
    stamp, wanted = plan.venv / STAMP, pins.read_text(encoding="utf-8")
    if stamp.exists() and stamp.read_text(encoding="utf-8") == wanted:
        return
    print(f"making {plan.venv} of {pins.name} (once) …", flush=True)
    make_empty(plan)
    run_first_that_works([pip(plan, "--no-deps", "-r", str(pins))])
    stamp.write_text(wanted, encoding="utf-8")


def make(plan: Plan) -> None:
    """Bring the environment to what the locks say."""
    began = time.monotonic()
    todo = steps(plan)
    print(f"Making {plan.venv} (once; takes some minutes and 5 GB):", flush=True)
    for number, (what, step) in enumerate(todo, 1):
        print(f"  [{number}/{len(todo)}] {what} …", flush=True)
        step()
    (plan.venv / STAMP).write_text(plan.fingerprint(), encoding="utf-8")
    print(f"  done in {time.monotonic() - began:.0f} s", flush=True)


def main(arguments: Sequence[str]) -> int:
    root = Path(__file__).resolve().parents[2]
    parser = argparse.ArgumentParser(description="Make the environment that the locks describe.")
    parser.add_argument("--venv", type=Path, default=root / ".venv", help="where (default: %(default)s)")
    parser.add_argument(FASTEST, action="store_true", help="with another Python on PATH, where that is clearly faster")
    asked = parser.parse_args(arguments)
    plan = Plan(root, asked.venv.absolute())
    try:
        check_python(sys.version_info[:3], sys.platform)
        if plan.is_made():
            return 0
        if asked.fastest and not plan.python.exists():
            go_on_with_the_fastest(arguments)
        make(plan)
    except BootstrapError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
