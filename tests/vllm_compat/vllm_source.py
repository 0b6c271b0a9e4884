"""A version of vLLM, read out of its source: classes, their members, where a name comes from."""

import ast
import json
import zipfile
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tests.vllm_compat.our_use import Function, parameters

Reader = Callable[[str], str | None]
"""The source of a module by its dotted name; None when there is no such module."""


def installed(root: Path) -> Reader:
    """Read from a folder that contains `vllm/`."""

    def read(module: str) -> str | None:
        stem = root.joinpath(*module.split("."))
        for path in (stem.with_suffix(".py"), stem / "__init__.py"):
            if path.is_file():
                return path.read_text(encoding="utf-8")
        return None

    return read


def wheel(path: Path) -> Reader:
    """Read from a wheel, without installing it."""
    archive = zipfile.ZipFile(path)
    names = set(archive.namelist())

    def read(module: str) -> str | None:
        stem = module.replace(".", "/")
        for name in (f"{stem}.py", f"{stem}/__init__.py"):
            if name in names:
                return archive.read(name).decode()
        return None

    return read


@dataclass(frozen=True, slots=True)
class Member:
    """A method's parameters, or an attribute's class where the source names one: `module:Class`."""

    parameters: tuple[str, ...] | None = None
    leads_to: str | None = None


Members = dict[str, Member]


@dataclass(frozen=True, slots=True)
class Shape:
    """Classes of one version by `module:Class`, inherited members included; other module-level names; its number."""

    version: str
    classes: dict[str, Members]
    names: frozenset[str]

    def member(self, owner: str, chain: tuple[str, ...]) -> Member | None:
        """What `chain` leads to from `owner`; as far as classes are known, then anything."""
        found: Member | None = Member(leads_to=owner)
        for name in chain:
            if found is None or found.leads_to not in self.classes:
                return found
            found = self.classes[found.leads_to].get(name)
        return found

    def dump(self) -> str:
        """As JSON: a list is a method's parameters, text is where an attribute leads, null is any other."""
        classes = {
            owner: {name: _plain(member) for name, member in sorted(members.items())}
            for owner, members in sorted(self.classes.items())
        }
        return json.dumps({"version": self.version, "names": sorted(self.names), "classes": classes}, indent=0) + "\n"

    @classmethod
    def load(cls, text: str) -> "Shape":
        """Out of `dump`."""
        raw = json.loads(text)
        classes = {
            owner: {name: _member(value) for name, value in members.items()}
            for owner, members in raw["classes"].items()
        }
        return cls(raw["version"], classes, frozenset(raw["names"]))


def _plain(member: Member) -> Any:
    return member.leads_to if member.parameters is None else list(member.parameters)


def _member(value: Any) -> Member:
    return Member(parameters=tuple(value)) if isinstance(value, list) else Member(leads_to=value)


class _Module:
    """One module's source, walked once: by name, the statement that defines it and the import that brings it."""

    def __init__(self, text: str) -> None:
        self.defined: dict[str, ast.stmt] = {}
        self.imported: dict[str, ast.ImportFrom] = {}
        for node in _statements(ast.parse(text)):
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                self.defined.setdefault(node.name, node)
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                for name in _targets(node):
                    self.defined.setdefault(name, node)
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    self.imported.setdefault(alias.asname or alias.name, node)


class Library:
    """Finds classes in a vLLM's source, through re-exports and bases."""

    def __init__(self, read: Reader) -> None:
        self._module = cache(lambda module: None if (text := read(module)) is None else _Module(text))

    def shape(self, version: str, wanted: frozenset[str]) -> Shape:
        """The shape of `wanted` (`module:Name` each), and of all classes that their attributes lead to."""
        classes: dict[str, Members] = {}
        names = set()
        open_ones = sorted(wanted)
        while open_ones:
            asked = open_ones.pop()
            found = self.find(*asked.split(":"))
            if found is None:
                continue
            names.add(asked)
            module, node = found
            if asked in classes or not isinstance(node, ast.ClassDef):
                continue
            classes[asked] = self._members(module, node)
            open_ones += [member.leads_to for member in classes[asked].values() if member.leads_to]
        return Shape(version, classes, frozenset(names))

    def find(self, module: str, name: str) -> tuple[str, ast.stmt] | None:
        """The statement that defines `name` as seen from `module`, and the module in which it stands."""
        known = self._module(module)
        if known is None:
            return None
        if self._module(f"{module}.{name}") is not None:
            return module, ast.Pass()
        if name in known.defined:
            return module, known.defined[name]
        if name in known.imported:
            found = [self.find(source, name) for source in self._sources(module, known.imported[name])]
            return next((each for each in found if each is not None), None)
        return None

    def method(self, module: str, owner: str, name: str) -> Function | None:
        """The method that `name` is in a class, its own or the nearest that it inherits."""
        found = self.find(module, owner)
        if found is None or not isinstance(found[1], ast.ClassDef):
            return None
        own = [item for item in found[1].body if isinstance(item, Function) and item.name == name]
        if own:
            return own[-1]
        bases = [base.id for base in found[1].bases if isinstance(base, ast.Name)]
        inherited = [self.method(found[0], base, name) for base in bases]
        return next((each for each in inherited if each is not None), None)

    def _sources(self, module: str, node: ast.ImportFrom) -> list[str]:
        """The modules of vLLM that an import may mean: a relative one is so to the package, or to its parent."""
        if not node.level:
            return [node.module] if node.module and node.module.startswith("vllm") else []
        return [f"{package}.{node.module}" for package in (module, module.rpartition(".")[0])]

    def _members(self, module: str, node: ast.ClassDef) -> Members:
        members: Members = {}
        for base in reversed(node.bases):
            found = self.find(module, base.id) if isinstance(base, ast.Name) else None
            if found is not None and isinstance(found[1], ast.ClassDef):
                members |= self._members(found[0], found[1])
        return members | dict(self._own(module, node))

    def _own(self, module: str, node: ast.ClassDef) -> Iterator[tuple[str, Member]]:
        for each in _statements(node):
            target = _self_attribute(each)
            if target is not None:
                yield target, Member(leads_to=self._annotated(module, getattr(each, "annotation", None)))
        for item in node.body:
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                yield item.target.id, Member(leads_to=self._annotated(module, item.annotation))
            elif isinstance(item, ast.Assign):
                yield from ((name, Member()) for name in _targets(item))
            elif isinstance(item, Function):
                is_property = any("property" in ast.unparse(mark) for mark in item.decorator_list)
                leads_to = self._annotated(module, item.returns) if is_property else None
                yield item.name, Member(leads_to=leads_to) if is_property else Member(parameters(item))

    def _annotated(self, module: str, annotation: ast.expr | None) -> str | None:
        """The class that an annotation names, if it is one of vLLM's."""
        text = "" if annotation is None else ast.unparse(annotation).strip("'\"").removesuffix(" | None")
        if not text.isidentifier():
            return None
        found = self.find(module, text)
        return f"{found[0]}:{text}" if found is not None and isinstance(found[1], ast.ClassDef) else None


def _statements(tree: ast.AST) -> Iterator[ast.AST]:
    """`ast.walk` without the expressions, which are nine of ten nodes and hold no statement."""
    row = deque([tree])
    while row:
        node = row.popleft()
        for name in ("body", "handlers", "orelse", "finalbody", "cases"):
            inside = getattr(node, name, ())
            row.extend(inside if isinstance(inside, list) else ())
        yield node


def _targets(node: ast.Assign | ast.AnnAssign) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _self_attribute(node: ast.AST) -> str | None:
    """The name in `self.name = …`."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    for target in targets:
        if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self":
            return target.attr
    return None
