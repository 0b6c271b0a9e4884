"""Digests of checkpoints and of LoRA adapters by their content: paths and names are each node's own.

A checkpoint is found as vLLM's loader would find it, and sampled in well under a second. A safetensors file is taken
apart: the digest covers each tensor's name, dtype and shape, and samples of its bytes, so that neither the path nor how
tensors are spread over files counts. Small tensors are read whole, of larger ones evenly spaced pieces, about `PIECES`
in all. Files of other formats are sampled as a whole, with their size.

It misses a change that leaves every sampled byte as it was. Training, merging an adapter or quantizing again changes
most values of most tensors, and thousands of values are sampled; but a few rows that were edited in one large matrix
(the embedding of an added token, say) may lie between samples, and so may what changes after the start: files that are
replaced, or weights that are updated in a running engine. Where that may be, the operator tells two states of the
weights apart by a word of his own, `pdproxy_weights_label`, which is part of the fingerprint too. Pickled checkpoints
that hold the same tensors in differently written files count as different.

An adapter's content is its weights, sampled in the same way, and the rank, scaling and modules in its
`adapter_config.json`. It is read at the first request with the adapter, on the engine's thread, in milliseconds; later
requests only look at a few files' times. vLLM loads an adapter once and keeps it, whatever becomes of its files. So an
adapter whose files have changed since its first use here has no known content, unless it was loaded with
`load_inplace`, which reads them again. Files that changed between vLLM's load and the first request with the adapter
are not detected.
"""

import hashlib
import json
import logging
import os
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, repeat
from pathlib import Path
from typing import Any, NamedTuple

log = logging.getLogger("vllm.pdproxy.weights")

PIECES = 16384
"""Pieces that are read of all large tensors together, and one of each where there are more tensors."""
MOST_OF_ONE = 64
PIECE_BYTES = 64
WHOLE_BYTES = 4096
"""Tensors up to this size are read whole."""
FILE_PIECES = 256
FILE_PIECE_BYTES = 4096
LONGEST_HEADER = 100 << 20
"""The bound in safetensors itself."""
THREADS = 16
"""Reads wait for the disk, not for a core; NVMe serves many at once."""

_TORCH = ("*.bin", "*.pt")
PATTERNS: Mapping[str, tuple[str, ...]] = {
    "auto": ("consolidated*.safetensors", "*.safetensors", *_TORCH, "*.gguf"),
    "hf": ("*.safetensors", *_TORCH),
    "safetensors": ("*.safetensors",),
    "fastsafetensors": ("*.safetensors",),
    "instanttensor": ("*.safetensors",),
    "mistral": ("consolidated*.safetensors",),
    "pt": ("*.pt",),
    "npcache": ("*.bin",),
    "gguf": ("*.gguf",),
}
"""vLLM's `--load-format`s that read ordinary files. The first pattern that matches any file is used
(`DefaultModelLoader._prepare_weights`)."""
NO_WEIGHTS = frozenset({"training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt"})
"""Files that trainers write beside the weights (`filter_files_not_needed_for_inference`)."""

WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
"""vLLM loads the first of these that exists (`LoRAModel.from_local_checkpoint`)."""
CONFIG = "adapter_config.json"
IRRELEVANT = frozenset(
    {"base_model_name_or_path", "revision", "inference_mode", "task_type", "auto_mapping", "peft_version"}
)
"""Keys of `adapter_config.json` that do not change what is computed."""
REMEMBERED = 1024
"""Adapters whose digest is kept; the least recently used is dropped first, and read again when it comes back."""


@dataclass(frozen=True, slots=True)
class WeightsSource:
    """Where an engine loads its weights from: `--model`, `--revision`, `--load-format` and `--download-dir`."""

    model: str
    revision: str | None = None
    load_format: str = "auto"
    download_dir: str | None = None


class _Tensor(NamedTuple):
    """One tensor of a safetensors file; `start` counts from the beginning of the file."""

    about: str
    start: int
    size: int


def checkpoint_text(source: WeightsSource) -> str:
    """The fingerprint's part `checkpoint`. Where the weights cannot be read it is made from the source, so that only
    nodes with equal sources agree, and a warning is logged. Never raises for what is on a disk."""
    try:
        if files := weight_files(source):
            return f"content:{content_digest(files)}"
        reason = "no weight files were found"
    except (OSError, ValueError) as error:
        reason = str(error)
    log.warning(
        "The weights of %s cannot be compared with another node's (%s): nodes count as equal where --model, --revision "
        "and --load-format are. Make sure that they name the same content everywhere.",
        source.model,
        reason,
    )
    named = json.dumps([source.model, source.revision, source.load_format])
    return f"source:{hashlib.sha256(named.encode()).hexdigest()[:32]}"


def weight_files(source: WeightsSource) -> list[Path]:
    """The files that vLLM's loader would read. Raises OSError or ValueError where they cannot be found."""
    if source.load_format not in PATTERNS:
        raise ValueError(f"--load-format {source.load_format} does not read ordinary files")
    if Path(source.model).is_file():
        return [Path(source.model)]
    folder = model_folder(source)
    for pattern in PATTERNS[source.load_format]:
        if found := [path for path in sorted(folder.glob(pattern)) if path.name not in NO_WEIGHTS]:
            return _indexed(found, folder)
    return []


def content_digest(files: Iterable[Path]) -> str:
    """32 hex digits over the content of these files. Raises OSError or ValueError."""
    files = list(files)
    shards = [path for path in files if path.suffix == ".safetensors"]
    others = [path for path in files if path.suffix != ".safetensors"]
    with ThreadPoolExecutor(THREADS) as pool:
        tensors = list(pool.map(_tensors, shards))
        pieces = max(1, min(MOST_OF_ONE, PIECES // max(1, sum(map(len, tensors)))))
        sampled = pool.map(_sample_tensors, shards, tensors, repeat(pieces))
        lines = [*chain.from_iterable(sampled), *pool.map(_sample_file, others)]
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()[:32]


def model_folder(source: WeightsSource) -> Path:
    """A model's folder: the one named, or huggingface_hub's cached one. Raises OSError or ValueError."""
    if Path(source.model).is_dir():
        return Path(source.model)
    if os.environ.get("VLLM_USE_MODELSCOPE", "").lower() in ("1", "true"):
        raise ValueError("models of ModelScope are not looked up")
    from huggingface_hub import snapshot_download

    return Path(
        snapshot_download(source.model, revision=source.revision, cache_dir=source.download_dir, local_files_only=True)
    )


def _indexed(files: list[Path], folder: Path) -> list[Path]:
    """The safetensors files that the index names, if there is one, as in vLLM (a second copy may lie beside)."""
    consolidated = files[0].name.startswith("consolidated")
    index = folder / ("consolidated.safetensors.index.json" if consolidated else "model.safetensors.index.json")
    if files[0].suffix != ".safetensors" or not index.is_file():
        return files
    named = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    return [path for path in files if path.name in named]


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if hasattr(os, "posix_fadvise"):
            # Without this, each small read of a cold file would fetch the 128 KiB after it, too.
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        yield descriptor
    finally:
        os.close(descriptor)


def _tensors(path: Path) -> list[_Tensor]:
    with _opened(path) as descriptor:
        length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
        if not 0 < length <= LONGEST_HEADER:
            raise ValueError(f"{path.name} is not a safetensors file")
        header = json.loads(os.pread(descriptor, length, 8))
    try:
        return list(_described(header, 8 + length))
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{path.name} is not a safetensors file") from error


def _described(header: Any, data: int) -> Iterator[_Tensor]:
    for name, about in header.items():
        if name != "__metadata__":
            start, end = about["data_offsets"]
            yield _Tensor(f"{name} {about['dtype']} {about['shape']}", data + start, end - start)


def _sample_tensors(path: Path, tensors: Sequence[_Tensor], pieces: int) -> list[str]:
    with _opened(path) as descriptor:
        return [f"{tensor.about} {_sample(descriptor, tensor, pieces)}" for tensor in tensors]


def _sample(descriptor: int, tensor: _Tensor, pieces: int) -> str:
    if tensor.size <= WHOLE_BYTES:
        return hashlib.sha256(os.pread(descriptor, tensor.size, tensor.start)).hexdigest()
    offsets = _offsets(tensor.size, pieces, PIECE_BYTES)
    return hashlib.sha256(b"".join(os.pread(descriptor, PIECE_BYTES, tensor.start + at) for at in offsets)).hexdigest()


def _sample_file(path: Path) -> str:
    with _opened(path) as descriptor:
        size = os.fstat(descriptor).st_size
        sampled = hashlib.sha256()
        for offset in _offsets(size, FILE_PIECES, FILE_PIECE_BYTES):
            sampled.update(os.pread(descriptor, FILE_PIECE_BYTES, offset))
    return f"{size} {sampled.hexdigest()}"


def _offsets(size: int, pieces: int, length: int) -> Iterator[int]:
    """Where evenly spaced pieces begin: in the middles of as many equal parts. The whole where that is no more."""
    if size <= pieces * length:
        yield from range(0, size, length)
    else:
        yield from (max(0, size * (2 * at + 1) // (2 * pieces) - length // 2) for at in range(pieces))


FileStamp = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class AdapterContent:
    """One request's adapter. `digest`: hex digits, None without an adapter. `unknown`: why there is no digest, or
    None."""

    digest: str | None = None
    unknown: str | None = None


@dataclass(frozen=True, slots=True)
class _ReadAdapter:
    """`files`: the weights and the configuration, as they were found at the first use."""

    files: tuple[str, str]
    stamp: FileStamp
    content: str


class Adapters:
    """The adapters that this engine's requests have used. `settings`: the node's LoRA settings that change what an
    adapter computes."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = json.dumps(dict(settings), sort_keys=True, default=str)
        self._known: OrderedDict[tuple[int, str], _ReadAdapter] = OrderedDict()

    def content(self, lora_request: Any) -> AdapterContent:
        """The content of a request's adapter. Does not raise, whatever is on the disk."""
        if lora_request is None:
            return AdapterContent()
        key = (int(lora_request.lora_int_id), str(lora_request.lora_path))
        try:
            return self._current(key, bool(lora_request.load_inplace))
        except (OSError, ValueError, AttributeError) as error:
            log.warning("The LoRA adapter in %s cannot be read: %s", key[1], error)
            return AdapterContent(unknown="the LoRA adapter's files cannot be read here")

    def _current(self, key: tuple[int, str], reloads: bool) -> AdapterContent:
        read = self._known.get(key)
        files = _files(key[1]) if read is None else read.files
        stamp = _stamp(files)
        if read is not None and read.stamp != stamp and not reloads:
            return AdapterContent(
                unknown="the LoRA adapter's files have changed since it was first used here: load it anew"
            )
        if read is None or read.stamp != stamp:
            read = _ReadAdapter(files, stamp, self._digest(files))
        self._known[key] = read
        self._known.move_to_end(key)
        if len(self._known) > REMEMBERED:
            self._known.popitem(last=False)
        return AdapterContent(read.content)

    def _digest(self, files: tuple[str, str]) -> str:
        weights, config = map(Path, files)
        settings = json.loads(config.read_text(encoding="utf-8"))
        relevant = {name: value for name, value in settings.items() if name not in IRRELEVANT}
        parts = [content_digest([weights]), json.dumps(relevant, sort_keys=True), self._settings]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def _files(path: str) -> tuple[str, str]:
    """The paths of an adapter's weights and configuration. Raises OSError or ValueError."""
    folder = model_folder(WeightsSource(os.path.expanduser(path)))
    for name in WEIGHTS:
        if (folder / name).is_file():
            return str(folder / name), str(folder / CONFIG)
    raise FileNotFoundError(f"no adapter weights in {folder}")


def _stamp(files: tuple[str, str]) -> FileStamp:
    found = [os.stat(path) for path in files]
    return tuple((each.st_ino, each.st_size, each.st_mtime_ns) for each in found)
