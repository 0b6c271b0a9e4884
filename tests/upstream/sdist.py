"""vLLM's tests of one version, out of its source distribution; kept, so that they are fetched once."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

KEPT = ("tests/__init__.py", "tests/v1", "tests/utils.py", "tests/entrypoints")


class NotFetchedError(Exception):
    """The source distribution could not be had; the text is what pip said last."""


def tests_of(version: str, cache: Path) -> Path:
    """A folder with vLLM's `tests`, fetched unless it is there. Raises NotFetchedError."""
    folder = cache / version
    if not (folder / "tests").is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            _keep(_unpacked(version, Path(scratch)), folder)
    return folder


def _unpacked(version: str, scratch: Path) -> Path:
    """The source tree, where pip has unpacked it.

    pip then tries to make metadata and fails, for that takes torch and a compiler; the tree is all that is wanted. So
    pip's own settings hold: its index, its mirrors, its certificates.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-clean", "--no-binary", ":all:", "--no-deps"]
    command += ["--no-build-isolation", "--dest", str(scratch / "done"), f"vllm=={version}"]
    environment = {**os.environ, "TMPDIR": str(scratch)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=900)
    found = [path.parents[3] for path in scratch.glob("pip-*/*/tests/v1/kv_connector/unit")]
    if not found:
        raise NotFetchedError("\n".join((done.stdout + done.stderr).splitlines()[-15:]))
    return found[0]


def _keep(tree: Path, folder: Path) -> None:
    """Only the tests are copied: of vLLM's package only the installed one may be found."""
    half = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(half, ignore_errors=True)
    for name in KEPT:
        if (tree / name).is_dir():
            shutil.copytree(tree / name, half / name)
        elif (tree / name).is_file():
            half.joinpath(name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(tree / name, half / name)
    half.rename(folder)
