"""The HTTP paths that a vLLM may serve, whatever its flags: read from its source, which is not imported."""

import ast
from collections.abc import Iterator
from pathlib import Path

METHODS = frozenset({"get", "post", "put", "patch", "delete", "websocket"})


def paths_of(folder: Path) -> dict[str, list[str]]:
    """Path → methods, in order, of every route that a router or application is given in any file below ``folder``."""
    found: dict[str, set[str]] = {}
    for file in folder.rglob("*.py"):
        for path, method in _routes(ast.parse(file.read_text(encoding="utf-8"))):
            found.setdefault(path, set()).add(method.upper())
    return {path: sorted(found[path]) for path in sorted(found)}


def _routes(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or not node.args:
            continue
        path, method = node.args[0], node.func.attr
        if not isinstance(path, ast.Constant) or not isinstance(path.value, str) or not path.value.startswith("/"):
            continue
        if method in METHODS and _is_router(node.func.value):
            yield path.value, method
        elif method == "add_api_route":
            yield path.value, "post"


def _is_router(value: ast.expr) -> bool:
    """``router.get("/x")`` and ``app.post("/y")``, but not ``settings.get("/z")``."""
    return isinstance(value, ast.Name) and (value.id.endswith("router") or value.id in ("app", "supervisor_app"))
