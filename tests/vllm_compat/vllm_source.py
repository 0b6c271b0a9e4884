"""A version of vLLM, read out of its source: classes, their members, where a name comes from."""

import ast
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.vllm_compat.our_use import Function, parameters

Reader = Callable[[str], str | None]
"""The source of a module by its dotted name; None when there is no such module."""


def sources(root: Path) -> Reader:
    """Read from a folder that contains `vllm/`."""

    def read(module: str) -> str | None:
        stem = root.joinpath(*module.split("."))
        for path in (stem.with_suffix(".py"), stem / "__init__.py"):
            if path.is_file():
                return path.read_text(encoding="utf-8")
        return None

    return read


@dataclass(frozen=True, slots=True)
class Member:
    """`text`: a method's signature, or how an attribute is declared. `parameters`: of a method, else None.

    `leads_to`: the class of an attribute, where the source names one of vLLM's, as `module:Class`.
    """

    text: str = ""
    parameters: tuple[str, ...] | None = None
    leads_to: str | None = None


Members = dict[str, Member]


@dataclass(frozen=True, slots=True)
class Shape:
    """Classes of one version by `module:Class`, inherited members included, and its number.

    `names`: those and others of a module, as `module:name`, with the signature of a function.
    """

    version: str
    classes: dict[str, Members]
    names: dict[str, str]

    def member(self, owner: str, chain: tuple[str, ...]) -> Member | None:
        """The member that `chain` leads to from `owner`; as far as classes are known, then anything."""
        found: Member | None = Member(leads_to=owner)
        for name in chain:
            if found is None or found.leads_to not in self.classes:
                return found
            found = self.classes[found.leads_to].get(name)
        return found

    def constructor(self, owner: str) -> str:
        """The parameters of a class: the signature of its constructor, or else all that it declares besides methods."""
        members = self.classes[owner]
        if "__init__" in members:
            return members["__init__"].text
        return ", ".join(f"{name}: {each.text}" for name, each in members.items() if each.parameters is None)


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
        names = {}
        open_ones = sorted(wanted)
        while open_ones:
            asked = open_ones.pop()
            found = self.find(*asked.split(":"))
            if found is None:
                continue
            module, node = found
            names[asked] = signature(node) if isinstance(node, Function) else ""
            if asked in classes or not isinstance(node, ast.ClassDef):
                continue
            classes[asked] = self._members(module, node)
            open_ones += [member.leads_to for member in classes[asked].values() if member.leads_to]
        return Shape(version, classes, names)

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

    def text(self, where: str) -> str | None:
        """The source of `module:Class.method` or `module:NAME`, without comments and docstrings; None without such."""
        module, _, path = where.partition(":")
        name, _, method = path.partition(".")
        found = self.find(module, name)
        node = self.method(module, name, method) if method else found[1] if found is not None else None
        return None if node is None else ast.unparse(_without_docstrings(node))

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
                annotation = getattr(each, "annotation", None)
                yield target, Member(_text(annotation), leads_to=self._annotated(module, annotation))
        for item in node.body:
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                declared = _text(item.annotation) + (f" = {_text(item.value)}" if item.value else "")
                yield item.target.id, Member(declared, leads_to=self._annotated(module, item.annotation))
            elif isinstance(item, ast.Assign):
                yield from ((name, Member(_text(item.value))) for name in _targets(item))
            elif isinstance(item, Function):
                is_property = any("property" in ast.unparse(mark) for mark in item.decorator_list)
                if is_property:
                    yield item.name, Member(_text(item.returns), leads_to=self._annotated(module, item.returns))
                else:
                    yield item.name, Member(signature(item), parameters(item))

    def _annotated(self, module: str, annotation: ast.expr | None) -> str | None:
        """The class that an annotation names, if it is one of vLLM's."""
        text = "" if annotation is None else ast.unparse(annotation).strip("'\"").removesuffix(" | None")
        if not text.isidentifier():
            return None
        found = self.find(module, text)
        return f"{found[0]}:{text}" if found is not None and isinstance(found[1], ast.ClassDef) else None


def signature(function: Function) -> str:
    """As it is written, with annotations and defaults."""
    kind = "async " if isinstance(function, ast.AsyncFunctionDef) else ""
    return f"{kind}({ast.unparse(function.args)}) -> {_text(function.returns)}"


def _text(node: ast.expr | None) -> str:
    return "" if node is None else ast.unparse(node)


def _without_docstrings(node: ast.stmt) -> ast.stmt:
    """A copy."""
    copied = ast.parse(ast.unparse(node)).body[0]
    for each in ast.walk(copied):
        if isinstance(each, ast.ClassDef | Function):
            kept = [item for item in each.body if not _is_text(item)]
            each.body = kept or [ast.Pass()]
    return copied


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


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
