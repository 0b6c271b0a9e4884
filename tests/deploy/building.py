"""An image's `build` stage, gone through line by line without a container engine."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from deploy.local.paths import ROOT
from tests.deploy.dockerfile import stages

MADE = ("/opt/pdproxy", "/wheels")
"""Where build stages put what they make."""
WORKDIR = "src"
WITHIN_S = 500.0


class BuildError(Exception):
    """A line failed; the message has the line and its stderr."""


def build(dockerfile: Path, folder: Path) -> Path:
    """The result of the build stage, a virtual environment or wheels: made in `folder`. Raises BuildError."""
    stage = next(stage for stage in stages(dockerfile) if stage.name == "build")
    environment, source = stage.environment(dict(os.environ)), folder / WORKDIR
    source.mkdir()
    for line in stage.lines:
        match line.word:
            case "COPY":
                _copy(line.rest, source)
            case "RUN":
                _run(_moved(line.rest, folder), source, environment)
            case "WORKDIR" | "ENV":
                pass
            case _:
                raise BuildError(f"no test builds {line.word} lines")
    [made] = [folder / path.rpartition("/")[2] for path in MADE if path in str(stage.all("RUN"))]
    return made


def _moved(line: str, folder: Path) -> str:
    for path in MADE:
        line = line.replace(path, str(folder / path.rpartition("/")[2]))
    return line


def installed_bytes(environment: Path) -> int:
    """Bytes that it takes on disk, the interpreter's links aside."""
    return sum(each.lstat().st_size for each in (environment / "lib").rglob("*") if each.is_file())


def _copy(rest: str, target: Path) -> None:
    *sources, to = rest.split()
    for source in sources:
        if (ROOT / source).is_dir():
            shutil.copytree(ROOT / source, target / to, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            path = target / to / Path(source).name if to.endswith("/") else target / to
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / source, path)


def _run(line: str, cwd: Path, environment: dict[str, str]) -> None:
    ours = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    done = subprocess.run(
        ["/bin/sh", "-c", line], cwd=cwd, env={**environment, "PATH": ours}, capture_output=True, text=True,
        timeout=WITHIN_S, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        raise BuildError(f"{line}\n{done.stderr}")
