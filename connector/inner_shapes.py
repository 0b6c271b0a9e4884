"""What stands inside of a method of vLLM's: tuples, messages, keys. Pure: functions of a method's syntax tree.

Each finds one kind of thing and gives its variants as text, sorted, without repetition; none found is `()`.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator

Find = Callable[[ast.FunctionDef], tuple[str, ...]]


def entry_sizes(attribute: str) -> Find:
    """How many parts the entries have that are put into `self.<attribute>[…]`, or unpacked from its `items()`."""

    def find(function: ast.FunctionDef) -> tuple[str, ...]:
        return _sorted(str(len(entry.elts)) for entry in _entries(function, attribute))

    return find


def message_sizes(kind: str) -> Find:
    """How many parts the tuples have that begin with the constant `kind`."""

    def find(function: ast.FunctionDef) -> tuple[str, ...]:
        tuples = [node for node in ast.walk(function) if isinstance(node, ast.Tuple) and node.elts]
        return _sorted(str(len(node.elts)) for node in tuples if ast.unparse(node.elts[0]) == kind)

    return find


def reply_frames(function: ast.FunctionDef) -> tuple[str, ...]:
    """Which numbers of parts are asserted: `assert len(…) == n`."""
    asserted = [node.test for node in ast.walk(function) if isinstance(node, ast.Assert)]
    return _sorted(
        ast.unparse(test.comparators[0])
        for test in asserted
        if isinstance(test, ast.Compare) and ast.unparse(test.left).startswith("len(")
    )


def notices(function: ast.FunctionDef) -> tuple[str, ...]:
    """Texts that are put together and encoded; a place is shown as {}, and as {request_id} where it is one."""
    calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
    encoded = [call.func.value for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == "encode"]
    return _sorted(_template(text) for text in encoded if isinstance(text, ast.JoinedStr))


def texts(function: ast.FunctionDef) -> tuple[str, ...]:
    """Every literal text."""
    constants = [node.value for node in ast.walk(function) if isinstance(node, ast.Constant)]
    return _sorted(value for value in constants if isinstance(value, str))


def dict_keywords(function: ast.FunctionDef) -> tuple[str, ...]:
    """The keys of every `dict(key=…)`."""
    calls = [node for node in ast.walk(function) if isinstance(node, ast.Call) and ast.unparse(node.func) == "dict"]
    return _sorted(keyword.arg for call in calls for keyword in call.keywords if keyword.arg is not None)


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
