"""LoRA adapters by their content, which is what a hand-over depends on: names and paths are each node's own.

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
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from connector.checkpoint import Source, content_digest, model_folder

log = logging.getLogger("vllm.pdproxy.adapters")

WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
"""The first of these that is there is the one that vLLM loads (`LoRAModel.from_local_checkpoint`)."""
CONFIG = "adapter_config.json"
IRRELEVANT = frozenset(
    {"base_model_name_or_path", "revision", "inference_mode", "task_type", "auto_mapping", "peft_version"}
)
"""Keys of `adapter_config.json` that change nothing of what is computed."""
REMEMBERED = 1024
"""Adapters whose content is kept; what was used longest ago goes first, and is read again when it comes back."""

Stamp = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class AdapterContent:
    """Of one request's adapter. `digest`: hex digits, None without an adapter; `unknown`: why it cannot be told, or
    None."""

    digest: str | None = None
    unknown: str | None = None


@dataclass(frozen=True, slots=True)
class _Read:
    """What was read: `files` are the weights and the configuration, as they were found at the first use."""

    files: tuple[str, str]
    stamp: Stamp
    content: str


class Adapters:
    """What this engine knows of the adapters that it was asked for. `settings`: what of the node's own LoRA settings
    changes what an adapter computes."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = json.dumps(dict(settings), sort_keys=True, default=str)
        self._known: OrderedDict[tuple[int, str], _Read] = OrderedDict()

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
            read = _Read(files, stamp, self._digest(files))
        self._remember(key, read)
        return AdapterContent(read.content)

    def _remember(self, key: tuple[int, str], read: _Read) -> None:
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
    folder = model_folder(Source(os.path.expanduser(path)))
    for name in WEIGHTS:
        if (folder / name).is_file():
            return str(folder / name), str(folder / CONFIG)
    raise FileNotFoundError(f"no adapter weights in {folder}")


def _stamp(files: tuple[str, str]) -> Stamp:
    found = [os.stat(path) for path in files]
    return tuple((each.st_ino, each.st_size, each.st_mtime_ns) for each in found)
