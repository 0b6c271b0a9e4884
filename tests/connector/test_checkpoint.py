"""A checkpoint's content: what it does not depend on, what it finds, how files are found, and what it costs."""

import json
import logging
import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from connector.weights import WeightsSource, checkpoint_text, content_digest, weight_files
from tests.connector.weights import layers, write_safetensors

LARGE = "layers.1.weight"
SMALL = "layers.0.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model of one file."""
    write_safetensors(tmp_path / "model.safetensors", layers())
    return tmp_path


def of(folder: Path, **other: str) -> str:
    return checkpoint_text(WeightsSource(str(folder), **other))


def test_equal_content_is_equal_under_another_path_and_in_other_files(folder: Path, tmp_path: Path) -> None:
    before = of(folder)
    assert before.startswith("content:")
    for name, split in (("one", 6), ("two", 3), ("six", 1)):
        other = tmp_path / name
        other.mkdir()
        items = list(layers().items())[::-1]
        for at in range(0, len(items), split):
            write_safetensors(other / f"shard-{at}.safetensors", dict(items[at : at + split]), {"format": "pt"})
        assert of(other) == before


def test_it_is_the_same_every_time(folder: Path) -> None:
    assert len({of(folder) for _ in range(5)}) == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors: {**tensors, "more": b"\0\0"},
        lambda tensors: {name: data for name, data in tensors.items() if name != SMALL},
        lambda tensors: {f"model.{name}": data for name, data in tensors.items()},
        lambda tensors: {**tensors, SMALL: tensors[SMALL][:-1] + b"?"},
        lambda tensors: {**tensors, LARGE: tensors[LARGE][:-2]},
        lambda tensors: {**tensors, LARGE: tensors["layers.3.weight"], "layers.3.weight": tensors[LARGE]},
    ],
    ids=["one more", "one less", "other names", "a byte of a small one", "another shape", "two changed places"],
)
def test_what_differs_is_found(folder: Path, change: Callable[[dict[str, bytes]], dict[str, bytes]]) -> None:
    before = of(folder)
    write_safetensors(folder / "model.safetensors", change(layers()))
    assert of(folder) != before


def test_training_is_found_even_if_it_leaves_most_values_as_they_were(folder: Path) -> None:
    """One value in a hundred of one matrix: reinforcement learning in bfloat16 changes more."""
    before = of(folder)
    source = random.Random(7)
    for _ in range(20):
        tensors = {name: bytearray(data) for name, data in layers().items()}
        for at in source.sample(range(len(tensors[LARGE])), len(tensors[LARGE]) // 100):
            tensors[LARGE][at] ^= 1
        write_safetensors(folder / "model.safetensors", {name: bytes(data) for name, data in tensors.items()})
        assert of(folder) != before


def test_what_lies_between_samples_is_not_found(folder: Path) -> None:
    """Said in the module's docstring: an edited row of a large matrix may be missed."""
    before = of(folder)
    data = bytearray(layers()[LARGE])
    data[100] ^= 1
    write_safetensors(folder / "model.safetensors", {**layers(), LARGE: bytes(data)})
    assert of(folder) == before


def test_the_index_decides_which_files_count(folder: Path) -> None:
    write_safetensors(folder / "stale.safetensors", layers(seed=2))
    both = of(folder)
    index = {"weight_map": dict.fromkeys(layers(), "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert of(folder) != both
    (folder / "stale.safetensors").unlink()
    alone = of(folder)
    assert of(folder) == alone


def test_each_format_reads_its_own_files(folder: Path) -> None:
    write_safetensors(folder / "consolidated.safetensors", layers(seed=2))
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    (folder / "training_args.bin").write_bytes(b"not weights")
    (folder / "model.pt").write_bytes(b"pickle")

    def names(load_format: str) -> list[str]:
        return [path.name for path in weight_files(WeightsSource(str(folder), load_format=load_format))]

    assert names("auto") == names("mistral") == ["consolidated.safetensors"]
    assert names("hf") == names("safetensors") == ["consolidated.safetensors", "model.safetensors"]
    assert (names("npcache"), names("pt")) == (["pytorch_model.bin"], ["model.pt"])
    with pytest.raises(ValueError, match="runai_streamer"):
        names("runai_streamer")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model-Q4_K_M.gguf"])
def test_other_formats_are_sampled_as_files(tmp_path: Path, name: str) -> None:
    data = bytearray(random.Random(1).randbytes(4 << 20))
    digests = set()
    for change in (b"", b"?", random.Random(2).randbytes(4 << 20)):
        data[: len(change)] = change
        (tmp_path / name).write_bytes(data)
        digests.add(of(tmp_path))
    assert len(digests) >= 2
    (tmp_path / name).write_bytes(bytes(data) + b"!")
    assert of(tmp_path) not in digests


def test_a_file_may_be_named_itself(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" * 1000)
    assert of(path).startswith("content:")


@pytest.mark.parametrize(
    "junk", [b"", b"1234567", b"\xff" * 100, b"\x08" + b"\0" * 7 + b"not json", b"\2" + b"\0" * 7 + b"[]"]
)
def test_what_is_no_checkpoint_is_named_by_its_source(
    tmp_path: Path, junk: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "model.safetensors").write_bytes(junk)
    with caplog.at_level(logging.WARNING):
        assert of(tmp_path).startswith("source:")
    assert "cannot be compared" in caplog.text


def test_weights_that_cannot_be_read_agree_by_source_alone(caplog: pytest.LogCaptureFixture) -> None:
    def bucket(model: str = "s3://bucket/model", revision: str = "a", load_format: str = "runai_streamer") -> str:
        return checkpoint_text(WeightsSource(model, revision, load_format))

    with caplog.at_level(logging.WARNING):
        assert bucket() == bucket()
    assert "--revision" in caplog.text
    others = {bucket("s3://bucket/other"), bucket(revision="b"), bucket(load_format="dummy"), bucket()}
    assert len(others) == 4


def test_a_repository_is_found_in_the_cache_and_by_its_revision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As huggingface_hub lays it out; nothing is asked of a network."""
    cache = tmp_path / "cache"
    repository = cache / "models--someone--a-model"
    for commit, seed in (("a" * 40, 1), ("b" * 40, 2)):
        (repository / "snapshots" / commit).mkdir(parents=True)
        write_safetensors(repository / "snapshots" / commit / "model.safetensors", layers(seed=seed))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    local = tmp_path / "local"
    local.mkdir()
    write_safetensors(local / "any.safetensors", layers(seed=1))
    main = checkpoint_text(WeightsSource("someone/a-model", download_dir=str(cache)))
    assert main == of(local)
    assert checkpoint_text(WeightsSource("someone/a-model", "b" * 40, download_dir=str(cache))) != main
    assert checkpoint_text(WeightsSource("someone/unknown", download_dir=str(cache))).startswith("source:")
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "1")
    assert checkpoint_text(WeightsSource("someone/a-model", download_dir=str(cache))).startswith("source:")


def test_a_large_checkpoint_costs_little(tmp_path: Path) -> None:
    """128 files, 12,800 tensors, 100 GB of holes: a bound on work, far above what a free machine takes (0.1 s)."""
    size = 8 << 20
    for shard in range(128):
        names = [f"layers.{shard}.{at}" for at in range(100)]
        header = {
            name: {"dtype": "BF16", "shape": [size // 2], "data_offsets": [at * size, (at + 1) * size]}
            for at, name in enumerate(names)
        }
        encoded = json.dumps(header).encode()
        path = tmp_path / f"{shard}.safetensors"
        path.write_bytes(len(encoded).to_bytes(8, "little") + encoded)
        os.truncate(path, 8 + len(encoded) + 100 * size)
    files = sorted(tmp_path.iterdir())
    before = time.process_time()
    content_digest(files)
    assert time.process_time() - before < 1.0
