"""Write `requirements/*.txt` from the environment this runs in: the pins are what was tested, no more and no less.

An environment is tried out first (`make lock` says how to make one), then frozen by this script into four files:

- `proxy.txt`: the light core and what it needs; enough for a machine that only runs the proxy. With the extras
  `events`, `kubernetes` and `otel`: the proxy's image is made from this lock, and there every setting must work.
- `torch.txt`: torch alone, since its CPU build comes from another index than the rest.
- `cpu.txt`: everything else that a vLLM node without a GPU needs.
- `dev.txt`: what tests, lint and types need on top of those three.

All are complete, so they are installed with `--no-deps`: the resolver would otherwise pull in CUDA builds of the torch
family. Three of that family are left out on purpose: a text model needs none of them, and their CUDA builds break
`import transformers` on a machine without CUDA. Triton is left out too: without a GPU vLLM does not use it, and it is a
gigabyte.
"""

from collections.abc import Iterable, Mapping
from importlib.metadata import Distribution, distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from deploy.local.paths import REQUIREMENTS

PROJECT = "pdproxy"
NODES = "pdproxy-connector"
TORCH = frozenset({"torch"})
LEFT_OUT = frozenset({PROJECT, NODES, "pip", "torchvision", "torchaudio", "torchcodec", "triton"})

Installed = Mapping[str, Distribution]


def installed() -> Installed:
    """Every distribution of this environment, by its canonical name."""
    return {canonicalize_name(found.metadata["Name"]): found for found in distributions()}


def needs(found: Distribution, extras: Iterable[str]) -> set[tuple[str, frozenset[str]]]:
    """The requirements of one distribution here, each with the extras it asks for."""
    wanted = [Requirement(line) for line in found.requires or []]
    return {
        (canonicalize_name(one.name), frozenset(one.extras))
        for one in wanted
        if one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in ("", *extras))
    }


def closure(here: Installed, root: str, extras: frozenset[str]) -> set[str]:
    """`root` and all that it needs with `extras`, as far as it is installed."""
    seen: set[tuple[str, frozenset[str]]] = set()
    todo = {(root, extras)}
    while todo:
        name, asked = todo.pop()
        seen.add((name, asked))
        if name in here:
            todo |= needs(here[name], asked) - seen
    return {name for name, _ in seen if name in here}


def split(here: Installed) -> dict[str, set[str]]:
    """Names by lock; each name stands in one lock alone."""
    proxy = closure(here, PROJECT, frozenset({"kubernetes", "otel"}))
    node = closure(here, NODES, frozenset({"cpu"}))
    dev = closure(here, PROJECT, frozenset({"dev"})) - node - proxy
    locks = {"proxy": proxy, "torch": set(TORCH), "cpu": node - proxy - TORCH, "dev": dev}
    return {lock: names - LEFT_OUT for lock, names in locks.items()}


def render(here: Installed, names: Iterable[str]) -> str:
    """One pin a line, in the order of the names."""
    return "".join(f"{name}=={here[name].version}\n" for name in sorted(names))


def write(folder: Path) -> None:
    """Write the four locks."""
    here = installed()
    folder.mkdir(exist_ok=True)
    for lock, names in split(here).items():
        (folder / f"{lock}.txt").write_text(render(here, names), encoding="utf-8")
        print(f"requirements/{lock}.txt: {len(names)} pins")


if __name__ == "__main__":
    write(REQUIREMENTS)
