"""The proxy's distribution in a clean environment; what both say of themselves."""

import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from deploy.local.paths import ROOT
from deploy.local.ports import HOST, free_ports
from pdproxy import __version__

FOLDERS = (ROOT, ROOT / "connector")
PYTHONS = [sys.executable, *filter(None, os.environ.get("PYTHONS", "").split())]
"""This one, and others that the environment names."""


def project(folder: Path) -> dict[str, Any]:
    return dict(tomllib.loads((folder / "pyproject.toml").read_text())["project"])


def test_both_say_the_same_of_the_project() -> None:
    proxy, nodes = (project(folder) for folder in FOLDERS)
    for field in ("license", "requires-python", "authors", "urls"):
        assert proxy[field] == nodes[field]
    assert (ROOT / "connector/LICENSE").read_text() == (ROOT / "LICENSE").read_text()


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_what_a_package_index_shows_needs_nothing_from_beside_it(folder: Path) -> None:
    """No links to files of the repository, and no diagrams that only some sites draw."""
    text = (folder / project(folder)["readme"]).read_text()
    repository = project(folder)["urls"]["Repository"]
    links = [part.partition(")")[0] for part in text.split("](")[1:]]
    assert all(link.startswith(repository) for link in links)
    assert "```mermaid" not in text


@contextmanager
def served(command: Path, folder: Path) -> Iterator[str]:
    """The operators' port of `pdproxy serve`, by its address, until it is told to end; it then has to end in order."""
    port, admin = free_ports(2)
    words = ["serve", "--decode=http://127.0.0.1:9", f"--port={port}", f"--admin-port={admin}"]
    with (folder / "log").open("wb") as log, subprocess.Popen([command, *words], cwd=folder, stderr=log) as proxy:
        try:
            yield f"http://{HOST}:{admin}"
            proxy.send_signal(signal.SIGTERM)
            assert proxy.wait(60) == 0, (folder / "log").read_text()
        finally:
            proxy.kill()


def built(folder: Path, **environment: str) -> list[str]:
    """The files of the proxy's wheel, its own name first."""
    hatch = [sys.executable, "-m", "hatchling", "build", "--directory", str(folder), "--target", "wheel"]
    subprocess.run(hatch, cwd=ROOT, check=True, capture_output=True, env={**os.environ, **environment})
    [wheel] = folder.glob("pdproxy-*.whl")
    with zipfile.ZipFile(wheel) as files:
        return [wheel.name, *files.namelist()]


def test_a_wheel_is_pure_python_where_there_is_no_compiler(tmp_path: Path) -> None:
    name, *files = built(tmp_path, CC=str(tmp_path / "none"))
    assert name.endswith("-py3-none-any.whl")
    assert "pdproxy/stream/scan.py" in files
    assert not any(file.endswith((".so", ".c")) for file in files)


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no compiler")
def test_a_wheel_has_the_compiled_scan_for_all_versions_of_python_where_there_is_one(tmp_path: Path) -> None:
    name, *files = built(tmp_path)
    assert "-cp311-abi3-linux_" in name
    assert [file for file in files if file.endswith((".so", ".c"))] == ["pdproxy/stream/_scan.abi3.so"]


@pytest.mark.long
@pytest.mark.parametrize("python", PYTHONS)
def test_the_wheel_serves_from_a_clean_environment(python: str, tmp_path: Path) -> None:
    """With the dependencies that a resolver finds today, which is what `pipx` installs."""
    hatch = [sys.executable, "-m", "hatchling", "build", "--directory", str(tmp_path), "--target", "wheel"]
    subprocess.run(hatch, cwd=ROOT, check=True, capture_output=True)
    [wheel] = tmp_path.glob("pdproxy-*.whl")
    subprocess.run([python, "-m", "venv", tmp_path / "clean"], check=True, capture_output=True)
    bin_ = tmp_path / "clean" / "bin"
    subprocess.run([bin_ / "python", "-m", "pip", "install", "--quiet", wheel], check=True, timeout=500)
    version = subprocess.run([bin_ / "pdproxy", "--version"], cwd=tmp_path, check=True, capture_output=True, text=True)
    assert version.stdout == f"pdproxy {__version__}\n"
    with served(bin_ / "pdproxy", tmp_path) as address, httpx.Client(trust_env=False) as client:
        deadline = time.monotonic() + 60
        while True:
            try:
                if client.get(f"{address}/health").status_code == httpx.codes.OK:
                    break
            except httpx.TransportError:
                assert time.monotonic() < deadline, (tmp_path / "log").read_text()
            time.sleep(0.1)
