"""The content of a checkpoint as a short digest, found and sampled in well under a second.

A safetensors file is taken apart: the digest covers each tensor's name, dtype and shape, and samples of its bytes, so
that neither the path nor the way in which tensors are spread over files counts. Small tensors are read whole, of larger
ones evenly spaced pieces, all in all about `PIECES`. Files of other formats are sampled as a whole, with their size.

What it can miss: a change that spares every sampled byte. Training, merging an adapter or quantizing anew touches most
values of most tensors, and thousands of values are sampled; but a few rows that were edited in one large matrix (the
embedding of an added token, say) may lie between samples, and so does what changes after the start, be it files that
are replaced or weights that are updated in a running engine. Pickled checkpoints that hold the same tensors in files
written differently count as different.


LoRA adapters by their content, which is what a hand-over depends on: names and paths are each node's own.

The content is the adapter's weights, sampled as a checkpoint's are (see `checkpoint`: training touches every tensor),
and what its `adapter_config.json` says of rank, scaling and modules. It is read at the first request with an adapter,
on the engine's thread, in milliseconds; afterwards a request costs the look at a few files' times.

vLLM loads an adapter once and keeps it, whatever becomes of its files. So an adapter whose files have changed since it
was first used here has no known content, unless it was loaded with `load_inplace`, which reads them anew. What cannot
be seen: files that changed between vLLM's load and the first request with the adapter.
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
from types import MappingProxyType
from typing import Any, NamedTuple

log = logging.getLogger("vllm.pdproxy.weights")

PIECES = 16384
"""Pieces that are read of all large tensors together; one each where there are more tensors than that."""
MOST_OF_ONE = 64
PIECE_BYTES = 64
WHOLE_BYTES = 4096
"""Tensors up to this size are read whole, as long as pieces are left for them."""
FILE_PIECES = 256
FILE_PIECE_BYTES = 4096
LONGEST_HEADER = 100 << 20
"""As safetensors itself bounds it."""
THREADS = 16
"""Reads wait for the disk, not for a core: NVMe answers many at once."""

_TORCH = ("*.bin", "*.pt")
PATTERNS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
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
)
"""Of vLLM's `--load-format`s those that read ordinary files; of each format the first pattern that finds any counts
(`DefaultModelLoader._prepare_weights`)."""
NO_WEIGHTS = frozenset({"training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt"})
"""What trainers leave beside the weights (`filter_files_not_needed_for_inference`)."""


@dataclass(frozen=True, slots=True)
class WeightsSource:
    """Where an engine has its weights from: as `--model`, `--revision`, `--load-format` and `--download-dir` say."""

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
    """The value of a fingerprint's part. Where the weights cannot be read here it is made from the source, so that only
    nodes with equal sources agree, and a warning says so. Never raises for what it finds on a disk."""
    try:
        files = weight_files(source)
        if files:
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
    """The files that vLLM's loader would read. Raises OSError or ValueError where there are none that can be read."""
    if source.load_format not in PATTERNS:
        raise ValueError(f"--load-format {source.load_format} does not read ordinary files")
    given = Path(source.model)
    if given.is_file():
        return [given]
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
    """The folder with a model's files: the one named, or what huggingface_hub has in its cache; nothing is downloaded.

    Raises OSError or ValueError.
    """
    if Path(source.model).is_dir():
        return Path(source.model)
    if os.environ.get("VLLM_USE_MODELSCOPE", "").lower() in ("1", "true"):
        raise ValueError("models of ModelScope are not looked up")
    from huggingface_hub import snapshot_download

    return Path(
        snapshot_download(source.model, revision=source.revision, cache_dir=source.download_dir, local_files_only=True)
    )


def _indexed(files: list[Path], folder: Path) -> list[Path]:
    """Of safetensors those that the index names, where there is one, as vLLM does (a second copy may lie beside)."""
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
    """Where evenly spaced pieces begin: the middles of as many equal parts. All of it where that is no more."""
    if size <= pieces * length:
        yield from range(0, size, length)
    else:
        yield from (max(0, size * (2 * at + 1) // (2 * pieces) - length // 2) for at in range(pieces))


WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
"""The first of these that is there is the one that vLLM loads (`LoRAModel.from_local_checkpoint`)."""
CONFIG = "adapter_config.json"
IRRELEVANT = frozenset(
    {"base_model_name_or_path", "revision", "inference_mode", "task_type", "auto_mapping", "peft_version"}
)
"""Keys of `adapter_config.json` that change nothing of what is computed."""
REMEMBERED = 1024
"""Adapters whose content is kept; what was used longest ago goes first, and is read again when it comes back."""

FileStamp = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class AdapterContent:
    """Of one request's adapter. `digest`: hex digits, None without an adapter; `unknown`: why it cannot be told, or
    None."""

    digest: str | None = None
    unknown: str | None = None


@dataclass(frozen=True, slots=True)
class _ReadAdapter:
    """What was read: `files` are the weights and the configuration, as they were found at the first use."""

    files: tuple[str, str]
    stamp: FileStamp
    content: str


class Adapters:
    """What this engine knows of the adapters that it was asked for. `settings`: what of the node's own LoRA settings
    changes what an adapter computes."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = json.dumps(dict(settings), sort_keys=True, default=str)
        self._known: OrderedDict[tuple[int, str], _ReadAdapter] = OrderedDict()

    def content(self, lora_request: Any) -> AdapterContent:
        """The content of the adapter that a request asks for. Does not raise, whatever is on the disk."""
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
        self._remember(key, read)
        return AdapterContent(read.content)

    def _remember(self, key: tuple[int, str], read: _ReadAdapter) -> None:
        self._known[key] = read
        self._known.move_to_end(key)
        if len(self._known) > REMEMBERED:
            self._known.popitem(last=False)

    def _digest(self, files: tuple[str, str]) -> str:
        weights, config = map(Path, files)
        told = json.loads(config.read_text(encoding="utf-8"))
        meant = {name: value for name, value in told.items() if name not in IRRELEVANT}
        parts = [content_digest([weights]), json.dumps(meant, sort_keys=True), self._settings]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def _files(path: str) -> tuple[str, str]:
    """Weights and configuration. Raises OSError or ValueError."""
    folder = model_folder(WeightsSource(os.path.expanduser(path)))
    for name in WEIGHTS:
        if (folder / name).is_file():
            return str(folder / name), str(folder / CONFIG)
    raise FileNotFoundError(f"no adapter weights in {folder}")


def _stamp(files: tuple[str, str]) -> FileStamp:
    found = [os.stat(path) for path in files]
    return tuple((each.st_ino, each.st_size, each.st_mtime_ns) for each in found)
