"""A vLLM that is only read, asked what `shape_check` asks the one that runs."""

import ast

from connector.contract import PROPERTY, Contract, VersionFacts, misfits
from connector.shape_check import facts
from connector.vllm_contracts import DELIVERIES, HAND_OVERS, SEEDED_CPU, STREAMS, TIERS
from tests.vllm_compat.our_use import Function
from tests.vllm_compat.vllm_source import Library, Shape

CONTRACTS: dict[str, Contract] = {
    "hand-overs": HAND_OVERS,
    "deliveries": DELIVERIES,
    "streams": STREAMS,
    "tiers": TIERS,
    "seeded CPU nodes": SEEDED_CPU,
}


class Unloaded:
    """`shape_check.Source` out of source text. `shape` must have the members of every class that is asked about."""

    def __init__(self, library: Library, shape: Shape) -> None:
        self._library, self._shape = library, shape

    def parameters(self, owner: str, name: str) -> str | None:
        found = self._method(owner, name)
        if found is None:
            return None
        if any("property" in ast.unparse(mark) for mark in found.decorator_list):
            return PROPERTY
        return " ".join(_parameters(found.args))

    def members(self, owner: str) -> frozenset[str]:
        return frozenset(self._shape.classes.get(owner, {}))

    def fields(self, owner: str) -> tuple[str, ...]:
        found = self._library.find(*owner.split(":"))
        body = found[1].body if found is not None and isinstance(found[1], ast.ClassDef) else []
        named = [item.target for item in body if isinstance(item, ast.AnnAssign)]
        return tuple(target.id for target in named if isinstance(target, ast.Name))

    def constant(self, name: str) -> str:
        found = self._library.find(*name.split(":"))
        value = found[1].value if found is not None and isinstance(found[1], ast.Assign | ast.AnnAssign) else None
        return "None" if value is None else repr(ast.literal_eval(value))

    def tree(self, owner: str, name: str) -> ast.FunctionDef | None:
        found = self._method(owner, name)
        return found if isinstance(found, ast.FunctionDef) else None

    def _method(self, owner: str, name: str) -> Function | None:
        module, kind = owner.split(":")
        return self._library.method(module, kind, name)


def facts_of(library: Library, shape: Shape) -> dict[str, VersionFacts]:
    """By the name of the contract that asks."""
    return {name: facts(contract, Unloaded(library, shape)) for name, contract in CONTRACTS.items()}


def unfit(found: dict[str, VersionFacts]) -> list[str]:
    """What this version has otherwise than the contracts say."""
    return [text for name, contract in CONTRACTS.items() for text in misfits(contract, found[name])]


def asked_about() -> frozenset[str]:
    """The classes and names that must be known of a version."""
    parts = [part for each in CONTRACTS.values() for part in (each.hooks, each.calls, each.attributes, each.fields)]
    constants = {name for each in CONTRACTS.values() for name in each.constants}
    return frozenset({owner for part in parts for owner in part} | constants)


def _parameters(given: ast.arguments) -> list[str]:
    plain = [argument.arg for argument in [*given.posonlyargs, *given.args]]
    first = len(plain) - len(given.defaults)
    names = [name + ("=" if index >= first else "") for index, name in enumerate(plain)]
    names += [f"*{given.vararg.arg}"] if given.vararg else []
    pairs = zip(given.kwonlyargs, given.kw_defaults, strict=True)
    names += [argument.arg + ("" if default is None else "=") for argument, default in pairs]
    return [*names, *([f"**{given.kwarg.arg}"] if given.kwarg else [])]
