"""Make `.venv` from the locks: `python3.11 deploy/local/bootstrap.py [proxy|node|dev]`.

Standard library only, since it runs before anything is installed. Does nothing when the environment is already what the
locks say; starts over when it is not.
"""

import argparse
import hashlib
import shutil
import subprocess
import sys
import time
import venv
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

WANTED = (3, 11)
STAMP = ".made-from"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
LOCKS = {"proxy": ("proxy",), "node": ("proxy", "cpu"), "dev": ("proxy", "cpu", "dev")}
"""What each kind of environment is made of, torch aside."""


class BootstrapError(Exception):
    """The environment cannot be made; the message says what to do."""


@dataclass(frozen=True)
class Plan:
    """One environment to make: where, of which locks, for which repository."""

    root: Path
    venv: Path
    kind: str

    @property
    def python(self) -> Path:
        return self.venv / "bin" / "python"

    @property
    def locks(self) -> tuple[Path, ...]:
        names = LOCKS[self.kind] if self.kind == "proxy" else (*LOCKS[self.kind], "torch")
        return tuple(self.root / "requirements" / f"{name}.txt" for name in names)

    @property
    def fingerprint(self) -> str:
        """Changes with the locks, with what the project declares, with the kind and with the place."""
        parts = [self.kind.encode(), str(self.root).encode(), (self.root / "pyproject.toml").read_bytes()]
        return hashlib.sha256(b"\0".join([*parts, *(lock.read_bytes() for lock in self.locks)])).hexdigest()

    def is_made(self) -> bool:
        stamp = self.venv / STAMP
        return self.python.exists() and stamp.exists() and stamp.read_text(encoding="utf-8") == self.fingerprint


def check_python(version: Sequence[int], platform: str) -> None:
    """Raise BootstrapError where the pinned wheels do not fit."""
    if tuple(version[:2]) != WANTED:
        found = ".".join(str(part) for part in version[:3])
        raise BootstrapError(
            f"this needs Python {WANTED[0]}.{WANTED[1]}, for which its dependencies are pinned; found {found} "
            f"at {sys.executable}. Try: make PYTHON=python3.11"
        )
    if platform != "linux":
        raise BootstrapError(f"vLLM's CPU build and NIXL run on Linux; this is {platform}. Use a Linux VM, WSL or Docker.")


def pip(plan: Plan, *arguments: str) -> list[str]:
    return [str(plan.python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet", *arguments]


def torch_commands(plan: Plan) -> list[list[str]]:
    """Ways to get torch's CPU build: from where pip is configured to look, else from PyTorch's own index."""
    lock = str(plan.root / "requirements" / "torch.txt")
    return [pip(plan, "--no-deps", "-r", lock), pip(plan, "--no-deps", "--index-url", TORCH_INDEX, "-r", lock)]


def locked_command(plan: Plan) -> list[str]:
    files = [part for lock in plan.locks if lock.stem != "torch" for part in ("-r", str(lock))]
    return pip(plan, "--no-deps", *files)


def project_command(plan: Plan) -> list[str]:
    """Install the project itself, editable: vLLM finds our plugin by its entry point."""
    isolation = ["--no-build-isolation"] if plan.kind == "dev" else []
    return pip(plan, "--no-deps", *isolation, "--editable", str(plan.root))


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
    if plan.venv.exists():
        shutil.rmtree(plan.venv)
    venv.create(plan.venv, with_pip=True)


def steps(plan: Plan) -> list[tuple[str, Callable[[], None]]]:
    """What to do, in order, each with the words that announce it."""
    told = [
        ("an empty environment", lambda: make_empty(plan)),
        (f"pinned packages ({plan.kind})", lambda: run_first_that_works([locked_command(plan)])),
        ("torch, CPU build", lambda: run_first_that_works(torch_commands(plan))),
        ("the project itself", lambda: run_first_that_works([project_command(plan)])),
    ]
    return [step for step in told if plan.kind != "proxy" or not step[0].startswith("torch")]


def make(plan: Plan) -> None:
    """Make the environment, from nothing."""
    began = time.monotonic()
    todo = steps(plan)
    print(f"Making {plan.venv} (once; some minutes and 4 GB for a node):", flush=True)
    for number, (what, step) in enumerate(todo, 1):
        print(f"  [{number}/{len(todo)}] {what} …", flush=True)
        step()
    (plan.venv / STAMP).write_text(plan.fingerprint, encoding="utf-8")
    print(f"  done in {time.monotonic() - began:.0f} s", flush=True)


def main(arguments: Sequence[str]) -> int:
    root = Path(__file__).resolve().parents[2]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", nargs="?", default="dev", choices=sorted(LOCKS))
    parser.add_argument("--venv", type=Path, default=root / ".venv")
    asked = parser.parse_args(arguments)
    plan = Plan(root, asked.venv.absolute(), asked.kind)
    try:
        check_python(sys.version_info, sys.platform)
        if not plan.is_made():
            make(plan)
    except BootstrapError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
