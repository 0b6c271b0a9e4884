"""Each path that a supported vLLM may serve either reaches clients or is withheld for a reason."""

import importlib.util
from pathlib import Path

import pytest

from pdproxy.intake import routes
from tests.vllm_compat.paths import paths_of

KEPT = Path(__file__).parent / "versions"
OWN_ANSWERS = {"/v1/models", "/health", "/ready", "/metrics", routes.OPENAPI}
"""What the proxy answers itself."""
REACHED = {*routes.GENERATING, *routes.FORWARDED, *OWN_ANSWERS}


def installed() -> dict[str, list[str]]:
    """Of the vLLM in this environment."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    return paths_of(Path(spec.origin).parent / "entrypoints")


def kept(version: str) -> dict[str, list[str]]:
    """Of a version that is not installed."""
    lines = (KEPT / f"{version}-paths.txt").read_text(encoding="utf-8").splitlines()
    return {path: methods.split() for path, _, methods in (line.partition(" ") for line in lines)}


@pytest.mark.parametrize("version", ["installed", "0.33.0"])
def test_every_path_of_vllm_reaches_clients_or_is_withheld(version: str) -> None:
    paths = installed() if version == "installed" else kept(version)
    assert len(paths) > 60, "the scan finds nothing"
    assert [path for path in paths if path not in REACHED and path not in routes.WITHHELD] == []


@pytest.mark.parametrize("version", ["installed", "0.33.0"])
def test_methods_are_those_of_vllm(version: str) -> None:
    paths = installed() if version == "installed" else kept(version)
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
