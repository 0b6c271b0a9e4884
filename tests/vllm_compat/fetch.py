"""The source of a version of vLLM that is not installed, out of its wheel.

pip fetches the wheel, by its own settings: its index, its mirrors, its certificates. vLLM 0.33.0's has 336 MB (6 s on a
fast line) and only its Python files are kept, in `.run/`, which git ignores; so each machine fetches it once. Nothing
of it is installed, imported or run.
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

CACHE = Path(__file__).parents[2] / ".run" / "vllm"


class NotFetchedError(Exception):
    """The wheel could not be had; the text is what pip said last."""


def fetched(version: str, cache: Path = CACHE) -> Path:
    """A folder with `vllm/`, fetched unless it is there. Raises NotFetchedError."""
    folder = cache / version
    if not folder.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            unpack(_wheel(version, Path(scratch)), folder)
    return folder


def unpack(wheel: Path, folder: Path) -> None:
    """Put the Python files of a wheel into `folder`, at once: nobody sees half of them."""
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch, zipfile.ZipFile(wheel) as archive:
        half = Path(scratch) / "half"
        names = [name for name in archive.namelist() if name.startswith("vllm/") and name.endswith(".py")]
        archive.extractall(half, names)
        if not folder.is_dir():
            half.rename(folder)


def _wheel(version: str, scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--dest", str(scratch)]
    done = subprocess.run(
        [*command, f"vllm=={version}"], capture_output=True, text=True, check=False, timeout=900, cwd=scratch
    )
    found = list(scratch.glob("vllm-*.whl"))
    if done.returncode or not found:
        said = "\n".join((done.stdout + done.stderr).splitlines()[-15:])
        raise NotFetchedError(f"The wheel of vLLM {version} could not be fetched. pip said:\n{said}")
    return found[0]
