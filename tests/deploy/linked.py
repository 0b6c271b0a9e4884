"""What a lock installs, as links to the files of this environment: a clean one in a second, without a network.

The bytecode beside the files is linked too: compiling the proxy's packages takes longer than its start.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import distribution
from pathlib import Path

from deploy.local.paths import REQUIREMENTS


def pinned(lock: str) -> list[str]:
    """The names that `requirements/LOCK.txt` pins."""
    return [line.partition("==")[0] for line in (REQUIREMENTS / f"{lock}.txt").read_text().splitlines()]


def link(names: list[str], folder: Path) -> Path:
    """Put these distributions into `folder`, by links; returns it. Raises PackageNotFoundError."""
    for name in names:
        for inside, file in _files(name):
            target = folder / inside
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(file)
    return folder


@contextmanager
def without(name: str, folder: Path) -> Iterator[None]:
    """While inside, `folder`, to which it was linked, has no file of this distribution, nor an empty folder of it."""
    places = [folder / inside for inside, _ in _files(name)]
    for place in places:
        place.unlink()
    for parent in sorted({parent for place in places for parent in place.parents}, reverse=True):
        if folder in parent.parents and not any(parent.iterdir()):
            parent.rmdir()
    try:
        yield
    finally:
        link([name], folder)


def _files(name: str) -> Iterator[tuple[str, Path]]:
    """What it has below site-packages; scripts lie elsewhere."""
    for file in distribution(name).files or ():
        if ".." not in file.parts:
            yield str(file), Path(str(file.locate()))
