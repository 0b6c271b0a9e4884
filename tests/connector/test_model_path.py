"""The model's path, as in docs/compatibility.md: vLLM's handshake compares it as text, and follows no links."""

from pathlib import Path

import pytest

from deploy.local.paths import MODEL


def handshake(model: str) -> str:
    """The hash that nodes of this model compare before they speak."""
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import compute_nixl_compatibility_hash
    from vllm.engine.arg_utils import EngineArgs

    return str(compute_nixl_compatibility_hash(EngineArgs(model, enforce_eager=True).create_engine_config(), "X"))


@pytest.fixture
def hosts(tmp_path: Path) -> list[Path]:
    """Two folders with the same model in them."""
    folders = [tmp_path / name for name in ("one", "other")]
    for folder in folders:
        folder.symlink_to(MODEL)
    return folders


def test_two_paths_are_two_models(hosts: list[Path]) -> None:
    one, other = (handshake(str(folder)) for folder in hosts)
    assert one != other
    assert handshake(f"{hosts[0]}/") != one


def test_one_path_is_one_model_wherever_it_leads(hosts: list[Path], tmp_path: Path) -> None:
    link, seen = tmp_path / "model", []
    for folder in hosts:
        link.unlink(missing_ok=True)
        link.symlink_to(folder)
        seen.append(handshake(str(link)))
    assert seen[0] == seen[1]
