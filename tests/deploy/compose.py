"""compose.yaml as a compose implementation understands it.

podman-compose resolves variables, anchors and profiles; all that it wants of podman for that is a version.
"""

import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from deploy.local.paths import ROOT

COMPOSE = ROOT / "compose.yaml"
EXAMPLE = ROOT / ".env.example"
PROFILES = [word for profile in ("prefill", "decode", "node", "cpu", "watch") for word in ("--profile", profile)]
Service = dict[str, Any]
RUN = """
import podman_compose as compose
fill_in = compose.var_interpolate
compose.var_interpolate = lambda text, *more: fill_in(text, *more) if "$" in text else text
compose.main()
"""
"""podman-compose, which defines four classes for each string that it looks for variables in: here only where one is,
in a third of the time."""


def path_with_podman(folder: Path) -> str:
    """A PATH with a podman that knows its version and nothing else; it is put into `folder`."""
    stub = folder / "podman"
    stub.write_text("#!/bin/sh\necho 'podman version 5.0.0'\n", encoding="utf-8")
    stub.chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


def resolved(profile: str, **variables: str) -> dict[str, Service]:
    """The services of a profile, every variable filled in; no `.env` file is read."""
    services = yaml.load(_config(frozenset(variables.items())), yaml.CSafeLoader)["services"]
    return {name: each for name, each in services.items() if profile in each.get("profiles", [])}


@cache
def _config(variables: frozenset[tuple[str, str]]) -> str:
    """The output of ``podman-compose config``, of all profiles; kept."""
    line = [sys.executable, "-c", RUN, "-f", str(COMPOSE), "--env-file", os.devnull]
    with tempfile.TemporaryDirectory() as folder:
        environment = {"PATH": path_with_podman(Path(folder)), "HOME": "/nonexistent", **dict(variables)}
        ran = subprocess.run(
            [*line, *PROFILES, "config"], env=environment, cwd=ROOT, capture_output=True, text=True,
            timeout=120, check=False,
        )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return ran.stdout
