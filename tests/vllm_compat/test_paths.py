"""Each path that a supported vLLM may serve either reaches clients or is withheld for a reason."""

from functools import cache
from pathlib import Path

import pytest

from connector.vllm_version import TESTED
from pdproxy.intake import routes
from tests.vllm_compat.__main__ import root_of
from tests.vllm_compat.paths import paths_of

# vLLM's source is parsed once a process, which takes it seconds.
pytestmark = pytest.mark.together("vLLM's source")

OWN_ANSWERS = {"/v1/models", "/health", "/ready", "/metrics", routes.OPENAPI}
"""What the proxy answers itself."""
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
