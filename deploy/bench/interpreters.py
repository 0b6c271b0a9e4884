"""Python interpreters: how each was built, and an environment with the proxy's own packages for each.

A build with ``--enable-optimizations`` (profile-guided) takes a quarter fewer instructions for the same work, so the
bench says which one ran. Debian's Pythons are built so without that flag: therefore each one is timed, too.
"""

import hashlib
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from deploy.local.bootstrap import STAMP, run_first_that_works
from deploy.local.paths import REQUIREMENTS, RUNS

LOCK = REQUIREMENTS / "proxy.txt"
_ASK = r"""
import json, platform, sysconfig, time

def work():
    found = {}
    for number in range(100_000):
        found[number % 997] = (number, str(number))
    return len(found)

def seconds():
    began = time.process_time()
    work()
    return time.process_time() - began

args = sysconfig.get_config_var("CONFIG_ARGS") or ""
print(json.dumps([platform.python_version(), args, 1000 * min(seconds() for _ in range(7)),
                  "deb_system" in sysconfig.get_scheme_names()]))
"""


class Interpreter(NamedTuple):
    """One Python.

    Attributes:
        python: its executable.
        arguments: of ``configure``, when it was built.
        milliseconds: CPU time of a small program, the least of some runs.
        debian: whether it is a build of Debian's, whose arguments do not say how it is optimised.
    """

    python: Path
    version: str
    arguments: tuple[str, ...]
    milliseconds: float
    debian: bool = False

    @property
    def optimised(self) -> bool:
        """Whether it was configured to be built with a profile of how it runs (PGO)."""
        return "--enable-optimizations" in self.arguments

    @property
    def linked(self) -> bool:
        """Whether it was configured to be optimised as a whole when it was linked (LTO)."""
        return any(word.partition("=")[0] == "--with-lto" and not word.endswith("=no") for word in self.arguments)

    def describe(self) -> str:
        """A line for people."""
        told = f"configured with PGO {_yes(self.optimised)}, LTO {_yes(self.linked)}"
        how = "a build of Debian's, whose flags do not tell PGO and LTO" if self.debian else told
        return f"Python {self.version}; {how}; a loop took {self.milliseconds:.1f} ms"


def _yes(flag: bool) -> str:
    return "yes" if flag else "no"


def interpreter(python: Path) -> Interpreter:
    """Ask a Python about itself.

    Raises:
        BootstrapError: it does not run.
    """
    command = [str(python), "-I", "-S", "-c", _ASK]
    run_first_that_works([[str(python), "-I", "-S", "-c", "pass"]])
    version, arguments, milliseconds, debian = json.loads(subprocess.check_output(command, text=True))
    return Interpreter(python, version, tuple(shlex.split(arguments)), milliseconds, debian)


def environment(python: Path, packages: tuple[str, ...] = ()) -> Path:
    """An environment of that Python with the proxy's locked packages and these; made once. Its executable.

    Raises:
        BootstrapError: it cannot be made; the message has pip's output.
    """
    wanted = "\0".join([str(python.absolute()), LOCK.read_text(encoding="utf-8"), *packages])
    venv = RUNS / f"python-{hashlib.sha256(wanted.encode()).hexdigest()[:12]}"
    made, stamp = venv / "bin" / "python", venv / STAMP
    if stamp.exists():
        return made
    print(f"making {venv} for {python} (once) …", flush=True)
    run_first_that_works([[str(python), "-m", "venv", "--without-pip", "--clear", str(venv)]])
    # The project's pip may be too old to run on that Python, but it can install wheels for it.
    where = "import sysconfig; print(sysconfig.get_path('purelib'), sysconfig.get_python_version(), sep='\\n')"
    folder, version = subprocess.check_output([str(made), "-c", where], text=True).splitlines()
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
    wheels = ["--only-binary", ":all:", "--python-version", version, "--target", folder]
    run_first_that_works([[*pip, *wheels, "-r", str(LOCK), *packages]])
    stamp.write_text(wanted, encoding="utf-8")
    return made
