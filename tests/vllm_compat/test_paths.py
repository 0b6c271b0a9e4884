"""Each path that a supported vLLM may serve either reaches clients or is withheld for a reason."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from connector.vllm_version import TESTED
from pdproxy.intake import routes
from tests.vllm_compat.__main__ import root_of

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


# vLLM's source is parsed once a process, which takes it seconds.
pytestmark = pytest.mark.together("vLLM's source")

OWN_ANSWERS = {"/v1/models", "/health", "/ready", "/metrics", routes.OPENAPI}
"""Paths that the proxy answers itself."""
REACHED = {*routes.GENERATING, *routes.FORWARDED, *OWN_ANSWERS}


@cache
def served_by(version: str) -> dict[str, list[str]]:
    """The paths of a tested version."""
    return paths_of(root_of(version) / "vllm" / "entrypoints")


@pytest.mark.parametrize("version", TESTED)
def test_every_path_of_vllm_reaches_clients_or_is_withheld(version: str) -> None:
    paths = served_by(version)
    assert len(paths) > 60, "the scan finds nothing"
    assert [path for path in paths if path not in REACHED and path not in routes.WITHHELD] == []


@pytest.mark.parametrize("version", TESTED)
def test_methods_are_those_of_vllm(version: str) -> None:
    paths = served_by(version)
    known = {path: sorted(methods) for path, methods in routes.FORWARDED.items() if path in paths}
    assert known == {path: paths[path] for path in known}


def test_no_path_stands_in_both_lists_and_each_reason_is_a_sentence() -> None:
    assert not REACHED & routes.WITHHELD.keys()
    assert all(len(reason) > 15 for reason in routes.WITHHELD.values())


def test_a_scan_finds_decorated_routes_and_leaves_other_calls_alone(tmp_path: Path) -> None:
    decorated = '@router.post("/a")\n@router.get("/a")\ndef f(): ...\n'
    source = f'{decorated}settings.get("/b")\napp.websocket("/c")\nrouter.get(name)\n'
    (tmp_path / "x.py").write_text(source, encoding="utf-8")
    assert paths_of(tmp_path) == {"/a": ["GET", "POST"], "/c": ["WEBSOCKET"]}
