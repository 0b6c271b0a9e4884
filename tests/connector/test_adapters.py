"""LoRA adapters by content: what its digest covers, when it is read again, and when it is unknown."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from connector import weights
from connector.weights import Adapters
from tests.connector.weights import layers, write_safetensors

CONFIG: dict[str, Any] = {
    "r": 8,
    "lora_alpha": 16,
    "target_modules": ["q_proj", "v_proj"],
    "base_model_name_or_path": "/models/one",
    "peft_version": "0.18.0",
}


@dataclass(frozen=True)
class Asked:
    """The part of vLLM's `LoRARequest` that counts."""

    lora_path: str
    lora_int_id: int = 1
    lora_name: str = "mine"
    load_inplace: bool = False


def write(folder: Path, seed: int = 1, **config: Any) -> Path:
    """An adapter."""
    folder.mkdir(exist_ok=True)
    write_safetensors(folder / "adapter_model.safetensors", layers(4, 2000, seed))
    (folder / "adapter_config.json").write_text(json.dumps({**CONFIG, **config}))
    return folder


def digest(folder: Path, known: Adapters | None = None, **asked: Any) -> str:
    content = (known or Adapters({})).content(Asked(str(folder), **asked))
    assert content.unknown is None
    assert content.digest is not None
    return content.digest


def unknown(known: Adapters, asked: Any) -> str:
    content = known.content(asked)
    assert content.digest is None
    assert content.unknown is not None
    return content.unknown


def test_a_request_without_an_adapter_has_none() -> None:
    content = Adapters({}).content(None)
    assert (content.digest, content.unknown) == (None, None)


def test_names_paths_and_numbers_do_not_count(tmp_path: Path) -> None:
    here, there = write(tmp_path / "one"), write(tmp_path / "two", base_model_name_or_path="/models/two")
    assert digest(here) == digest(there, lora_int_id=7, lora_name="theirs")


@pytest.mark.parametrize(
    "other", [{"seed": 2}, {"r": 16}, {"lora_alpha": 32}, {"target_modules": ["q_proj"]}, {"use_rslora": True}]
)
def test_weights_and_configuration_count(tmp_path: Path, other: dict[str, Any]) -> None:
    assert digest(write(tmp_path / "one")) != digest(write(tmp_path / "two", **other))


def test_the_nodes_own_settings_count(tmp_path: Path) -> None:
    folder = write(tmp_path / "one")
    known = [Adapters({"target_modules": modules}) for modules in (None, ["q_proj"])]
    assert len({digest(folder, one) for one in known}) == 2


def test_an_adapter_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, known = write(tmp_path / "one"), Adapters({})
    first = digest(folder, known)
    monkeypatch.setattr(weights, "content_digest", lambda _: pytest.fail("read again"))
    assert digest(folder, known) == first


def test_files_that_changed_after_the_first_use_are_not_what_runs(tmp_path: Path) -> None:
    folder, known = write(tmp_path / "one"), Adapters({})
    before = digest(folder, known)
    write(folder, seed=2)
    assert "load it anew" in unknown(known, Asked(str(folder)))
    assert digest(folder, known, lora_int_id=2) != before


def test_a_change_of_the_configuration_alone_is_seen(tmp_path: Path) -> None:
    folder, known = write(tmp_path / "one"), Adapters({})
    digest(folder, known)
    write(folder, lora_alpha=64)
    assert "load it anew" in unknown(known, Asked(str(folder)))


def test_what_is_loaded_in_place_is_read_anew(tmp_path: Path) -> None:
    folder, known = write(tmp_path / "one"), Adapters({})
    before = digest(folder, known, load_inplace=True)
    write(folder, seed=2)
    assert digest(folder, known, load_inplace=True) != before


@pytest.mark.parametrize("missing", ["adapter_model.safetensors", "adapter_config.json"])
def test_what_cannot_be_read_is_unknown_and_raises_nothing(tmp_path: Path, missing: str) -> None:
    folder = write(tmp_path / "one")
    (folder / missing).unlink()
    assert "cannot be read" in unknown(Adapters({}), Asked(str(folder)))
    assert "cannot be read" in unknown(Adapters({}), Asked(str(tmp_path / "nowhere")))


@pytest.mark.parametrize("junk", [b"", b"[]", b"\xff\xfe", b"null", b"{"])
def test_junk_is_unknown_and_raises_nothing(tmp_path: Path, junk: bytes) -> None:
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        folder = write(tmp_path / name)
        (folder / name).write_bytes(junk)
        assert "cannot be read" in unknown(Adapters({}), Asked(str(folder)))


def test_pickled_adapters_are_read_too(tmp_path: Path) -> None:
    folder = write(tmp_path / "one")
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    assert digest(folder)


def test_what_is_remembered_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "REMEMBERED", 3)
    folder, known = write(tmp_path / "one"), Adapters({})
    for number in range(1, 10):
        digest(folder, known, lora_int_id=number)
    assert len(known._known) == 3


def test_a_path_may_begin_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "HOME", str(tmp_path))
    assert digest(write(tmp_path / "one")) == digest(Path("~/one"))
