"""vLLM's names in this package, read out of its own source."""

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TypeGuard

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True, order=True)
class Touch:
    """One place where we touch vLLM. `owner`: `module:Class`, or a module for imports.

    `chain`: the name, or attribute of an attribute. `parameters`: of a method that we define, else None.
    """

    owner: str
    chain: tuple[str, ...]
    parameters: tuple[str, ...] | None = None

    @property
    def private(self) -> bool:
        """Whether it is something that vLLM keeps to itself, by its name."""
        return any(name.startswith("_") and not name.startswith("__") for name in self.chain)

    def __str__(self) -> str:
        shown = "" if self.parameters is None else f"({', '.join(self.parameters)})"
        return f"{self.owner}.{'.'.join(self.chain)}{shown}"


@dataclass(frozen=True, slots=True)
class Touches:
    """`imported` must exist. `defined` are overrides where vLLM has them; `used` are vLLM's where it has them, else
    our own. `read` must exist, since they are read off parameters that are annotated with a class of vLLM's; what is
    read off a variable that holds one is not seen. `called`: those of `imported` that are called or constructed.
    `words`: every attribute, parameter and literal string, whatever it belongs to."""

    imported: frozenset[Touch] = frozenset()
    defined: frozenset[Touch] = frozenset()
    used: frozenset[Touch] = frozenset()
    read: frozenset[Touch] = frozenset()
    called: frozenset[Touch] = frozenset()
    words: frozenset[str] = frozenset()

    def __or__(self, other: "Touches") -> "Touches":
        return Touches(*(getattr(self, each.name) | getattr(other, each.name) for each in fields(self)))


def touches(folder: Path) -> dict[str, Touches]:
    """The names that each module in `folder` and below touches, by its name without the folder's."""
    found = {}
    for path in sorted(folder.rglob("*.py")):
        file = _File(ast.parse(path.read_text(encoding="utf-8")))
        found[".".join(path.relative_to(folder).with_suffix("").parts)] = Touches(
            imported=frozenset(file.imported()),
            defined=frozenset(file.defined()),
            used=frozenset(file.used()),
            read=frozenset(file.read()),
            called=frozenset(file.called()),
            words=frozenset(file.words()),
        )
    return found


class _File:
    """One module of ours."""

    def __init__(self, tree: ast.Module) -> None:
        self._nodes = list(ast.walk(tree))
        self._names = dict(_vllm_names(tree))

    def imported(self) -> Iterator[Touch]:
        for owner in self._names.values():
            module, name = owner.split(":")
            yield Touch(module, (name,))

    def defined(self) -> Iterator[Touch]:
        for owner, node in self._subclasses():
            for method in _methods(node):
                yield Touch(owner, (method.name,), parameters(method))

    def used(self) -> Iterator[Touch]:
        for owner, node in self._subclasses():
            for chain in _chains(node, {"self", "super()"}):
                yield Touch(owner, chain[1:2])

    def read(self) -> Iterator[Touch]:
        for function in self._nodes:
            if isinstance(function, Function) and (given := self._given(function)):
                for root, *chain in _chains(function, given):
                    if not chain[0].startswith("__"):
                        yield Touch(given[root], tuple(chain))

    def called(self) -> Iterator[Touch]:
        for node in self._nodes:
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in self._names:
                module, name = self._names[node.func.id].split(":")
                yield Touch(module, (name,))

    def words(self) -> Iterator[str]:
        for node in self._nodes:
            if isinstance(node, ast.Attribute):
                yield node.attr
            elif isinstance(node, ast.keyword | ast.arg) and node.arg is not None:
                yield node.arg
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value

    def _subclasses(self) -> Iterator[tuple[str, ast.ClassDef]]:
        for node in self._nodes:
            if isinstance(node, ast.ClassDef):
                for base in node.bases:
                    if isinstance(base, ast.Name) and base.id in self._names:
                        yield self._names[base.id], node

    def _given(self, function: Function) -> dict[str, str]:
        """Parameters that are annotated with a class of vLLM's, and that `isinstance` does not turn into another."""
        arguments = [*function.args.args, *function.args.kwonlyargs]
        given = {
            each.arg: self._names[name] for each in arguments if (name := _class_name(each.annotation)) in self._names
        }
        if given:
            for told_apart in {ast.unparse(call.args[0]) for call in ast.walk(function) if _is_isinstance(call)}:
                given.pop(told_apart, None)
        return given


def parameters(function: Function) -> tuple[str, ...]:
    """Names in order, with their stars."""
    given = function.args
    names = [argument.arg for argument in [*given.posonlyargs, *given.args]]
    names += [f"*{given.vararg.arg}"] if given.vararg else []
    names += [argument.arg for argument in given.kwonlyargs]
    return (*names, *([f"**{given.kwarg.arg}"] if given.kwarg else []))


def _vllm_names(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "vllm":
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}:{alias.name}"


def _is_isinstance(node: ast.AST) -> TypeGuard[ast.Call]:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance"


def _methods(node: ast.ClassDef) -> list[Function]:
    return [item for item in node.body if isinstance(item, Function)]


def _class_name(annotation: ast.expr | None) -> str:
    """The class in `X`, `"X"`, `X | None` or `"X | None"`; empty for anything else."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        return annotation.value.removesuffix(" | None")
    if isinstance(annotation, ast.BinOp):
        return _class_name(annotation.left)
    return annotation.id if isinstance(annotation, ast.Name) else ""


def _chains(node: ast.AST, roots: Iterable[str] | Mapping[str, str]) -> Iterator[tuple[str, ...]]:
    """Every longest `root.a.b` in `node` that begins at one of `roots`."""
    inner = set()
    wanted = set(roots)
    for each in ast.walk(node):
        if isinstance(each, ast.Attribute) and id(each) not in inner:
            chain, root = [each.attr], each.value
            while isinstance(root, ast.Attribute):
                inner.add(id(root))
                chain.append(root.attr)
                root = root.value
            name = _root(root)
            if name in wanted:
                yield (name, *reversed(chain))


def _root(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super":
        return "super()"
    return ""
