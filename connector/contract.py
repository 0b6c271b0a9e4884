"""How what we rely on of vLLM is described (`Contract`), and in what a version of vLLM differs from it. Pure.

`vllm_contracts` has the descriptions; `shape_check` collects a version's facts and compares. Signatures show most of
it; for what stands inside of a method of vLLM's (tuples, messages, keys) there are functions of its syntax tree: each
finds one kind of thing and returns its variants as text, sorted, without repetition, or `()`.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

Find = Callable[[ast.FunctionDef], tuple[str, ...]]


def entry_sizes(attribute: str) -> Find:
    """The sizes of tuples that are assigned to `self.<attribute>[…]`, or unpacked from its `items()`."""

    def find(function: ast.FunctionDef) -> tuple[str, ...]:
        return _sorted(str(len(entry.elts)) for entry in _entries(function, attribute))

    return find


def message_sizes(kind: str) -> Find:
    """The sizes of tuples that begin with the constant `kind`."""

    def find(function: ast.FunctionDef) -> tuple[str, ...]:
        tuples = [node for node in ast.walk(function) if isinstance(node, ast.Tuple) and node.elts]
        return _sorted(str(len(node.elts)) for node in tuples if ast.unparse(node.elts[0]) == kind)

    return find


def reply_frames(function: ast.FunctionDef) -> tuple[str, ...]:
    """The lengths that are asserted: `assert len(…) == n`."""
    asserted = [node.test for node in ast.walk(function) if isinstance(node, ast.Assert)]
    return _sorted(
        ast.unparse(test.comparators[0])
        for test in asserted
        if isinstance(test, ast.Compare) and ast.unparse(test.left).startswith("len(")
    )


def notif_texts(function: ast.FunctionDef) -> tuple[str, ...]:
    """Formatted strings that are encoded; a placeholder is shown as {}, or as {request_id} if it is one."""
    calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
    encoded = [call.func.value for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == "encode"]
    return _sorted(_template(text) for text in encoded if isinstance(text, ast.JoinedStr))


def texts(function: ast.FunctionDef) -> tuple[str, ...]:
    """Every literal string."""
    constants = [node.value for node in ast.walk(function) if isinstance(node, ast.Constant)]
    return _sorted(value for value in constants if isinstance(value, str))


def dict_keywords(function: ast.FunctionDef) -> tuple[str, ...]:
    """The keys of every `dict(key=…)`."""
    calls = [node for node in ast.walk(function) if isinstance(node, ast.Call) and ast.unparse(node.func) == "dict"]
    return _sorted(keyword.arg for call in calls for keyword in call.keywords if keyword.arg is not None)


def calls_of(name: str) -> Find:
    """Every call of `name`, with its arguments."""

    def find(function: ast.FunctionDef) -> tuple[str, ...]:
        made = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
        return _sorted(ast.unparse(call) for call in made if ast.unparse(call.func) == name)

    return find


def mentions(name: str) -> Find:
    """The attribute `name`, with all that stands before it, if it is used."""

    def find(function: ast.FunctionDef) -> tuple[str, ...]:
        used = [ast.unparse(node) for node in ast.walk(function) if isinstance(node, ast.Attribute)]
        return _sorted(each for each in used if each == name)

    return find


def required_keys(name: str) -> Find:
    """The keys in every `<name>["key"]`."""

    def find(function: ast.FunctionDef) -> tuple[str, ...]:
        subscripts = [node for node in ast.walk(function) if isinstance(node, ast.Subscript)]
        keys = [node.slice for node in subscripts if ast.unparse(node.value) == name]
        return _sorted(key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str))

    return find


def _entries(function: ast.FunctionDef, attribute: str) -> Iterator[ast.Tuple]:
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            if any(_is_item(target, attribute) for target in node.targets):
                yield node.value
        elif isinstance(node, ast.For) and ast.unparse(node.iter) == f"self.{attribute}.items()":
            parts = node.target.elts if isinstance(node.target, ast.Tuple) else []
            yield from (part for part in parts if isinstance(part, ast.Tuple))


def _is_item(target: ast.expr, attribute: str) -> bool:
    return isinstance(target, ast.Subscript) and ast.unparse(target.value) == f"self.{attribute}"


def _template(text: ast.JoinedStr) -> str:
    return "".join(str(part.value) if isinstance(part, ast.Constant) else _place(part) for part in text.values)


def _place(part: ast.expr) -> str:
    return "{request_id}" if ast.unparse(part).rstrip("'}").endswith("request_id") else "{}"


def _sorted(found: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(set(found)))


ANY = "..."
"""At the end of a hook's parameters: ours accepts any that follow."""
PROPERTY = "property"


@dataclass(frozen=True, slots=True)
class Exactly:
    """These values and no others."""

    values: tuple[str, ...]

    def holds(self, found: tuple[str, ...]) -> bool:
        return found == self.values


@dataclass(frozen=True, slots=True)
class AtLeast:
    """These values, and perhaps others."""

    values: tuple[str, ...]

    def holds(self, found: tuple[str, ...]) -> bool:
        return set(self.values) <= set(found)


@dataclass(frozen=True, slots=True)
class AtMost:
    """No other values than these, and at least one of them."""

    values: tuple[str, ...]

    def holds(self, found: tuple[str, ...]) -> bool:
        return bool(found) and set(found) <= set(self.values)


@dataclass(frozen=True, slots=True)
class Inner:
    """Something inside of a method of vLLM's, which no signature shows. `method`: `module:Class.method`."""

    about: str
    method: str
    find: Callable[[ast.FunctionDef], tuple[str, ...]]
    wanted: Exactly | AtLeast | AtMost


@dataclass(frozen=True, slots=True)
class Contract:
    """What one part of this package relies on; by class, as `module:Class`.

    hooks: methods that vLLM calls and we override, with the parameters that ours take.
    calls: methods that we call, with the parameters that we pass; more must be optional.
    attributes: what we read and write.
    fields: of a dataclass; all that it has.
    constants: `module:NAME`, with their values as Python writes them.
    """

    hooks: Mapping[str, Mapping[str, str]]
    calls: Mapping[str, Mapping[str, str]]
    attributes: Mapping[str, tuple[str, ...]]
    fields: Mapping[str, tuple[str, ...]]
    constants: Mapping[str, str] = field(default_factory=dict)
    inner: tuple[Inner, ...] = ()


@dataclass(frozen=True, slots=True)
class VersionFacts:
    """What contracts describe, as it is in one version of vLLM; plain data.

    parameters: by `module:Class.method`, in order, with `=` behind an optional one; absent where there is no such.
    attributes: by class, those asked for that it has. fields: by class, all. constants: by
    `module:NAME`. inner: by what it is about and where.
    """

    parameters: Mapping[str, str]
    attributes: Mapping[str, tuple[str, ...]]
    fields: Mapping[str, tuple[str, ...]]
    constants: Mapping[str, str]
    inner: Mapping[str, tuple[str, ...]]

    @classmethod
    def load(cls, raw: Mapping[str, Any]) -> VersionFacts:
        """From JSON, which has no tuples."""
        lists = {name: {key: tuple(values) for key, values in raw[name].items()} for name in _LISTED}
        return cls(parameters=raw["parameters"], constants=raw["constants"], **lists)


_LISTED = ("attributes", "fields", "inner")


def misfits(contract: Contract, facts: VersionFacts) -> Iterator[str]:
    """Where a version differs from `contract`; each in a few words, with names to search for in vLLM's source."""
    yield from _methods(contract.hooks, facts, _hook_fits, "is called with")
    yield from _methods(contract.calls, facts, _call_fits, "takes")
    for owner, names in contract.attributes.items():
        for name in sorted(set(names) - set(facts.attributes.get(owner, ()))):
            yield f"{_short(owner)} has no {name}"
    for owner, names in contract.fields.items():
        found = facts.fields.get(owner, ())
        if set(found) != set(names):
            yield f"{_short(owner)} consists of {', '.join(found) or 'nothing'} instead of {', '.join(names)}"
    for name, value in contract.constants.items():
        if facts.constants.get(name) != value:
            yield f"{_short(name)} is {facts.constants.get(name, 'not there')} instead of {value}"
    for inner in contract.inner:
        found = facts.inner.get(inner_key(inner), ())
        if not inner.wanted.holds(found):
            about = f"{inner.about} in {_short(inner.method)}"
            yield f"{about}: found {', '.join(found) or 'nothing'}, expected {_wanted(inner.wanted)}"


def inner_key(inner: Inner) -> str:
    """Its key in `VersionFacts.inner`."""
    return f"{inner.about} in {inner.method}"


def _methods(
    described: Mapping[str, Mapping[str, str]],
    facts: VersionFacts,
    fits: Callable[[list[str], list[str]], bool],
    verb: str,
) -> Iterator[str]:
    for owner, methods in described.items():
        for name, ours in methods.items():
            theirs = facts.parameters.get(f"{owner}.{name}")
            if theirs is None:
                yield f"there is no {_short(owner)}.{name}"
            elif not fits(ours.split(), theirs.split()):
                yield f"{_short(owner)}.{name} {verb} ({_listed(theirs)}) instead of ({_listed(ours)})"


def _hook_fits(ours: list[str], theirs: list[str]) -> bool:
    """Whether ours takes everything that vLLM may pass, under the same names."""
    plain = [name.removesuffix("=") for name in theirs]
    wanted = [name.removesuffix("=") for name in ours]
    return plain[: len(wanted) - 1] == wanted[:-1] if wanted[-1:] == [ANY] else plain == wanted


def _call_fits(ours: list[str], theirs: list[str]) -> bool:
    """Whether theirs takes what we pass, and requires nothing more."""
    plain = [name.removesuffix("=") for name in theirs[: len(ours)]]
    more = theirs[len(ours) :]
    return plain == [name.removesuffix("=") for name in ours] and all("=" in name or "*" in name for name in more)


def _short(key: str) -> str:
    module, _, name = key.partition(":")
    return f"{module.rpartition('.')[2]}.{name}"


def _listed(parameters: str) -> str:
    return ", ".join(parameters.split())


def _wanted(rule: Exactly | AtLeast | AtMost) -> str:
    words = {Exactly: "", AtLeast: "at least ", AtMost: "none but "}[type(rule)]
    return words + (", ".join(rule.values) or "nothing")
