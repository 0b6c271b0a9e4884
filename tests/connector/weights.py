"""Checkpoints without a model: safetensors files with whatever bytes a test wants."""

import json
import random
from collections.abc import Mapping
from pathlib import Path

Tensors = Mapping[str, bytes]


def write_safetensors(path: Path, tensors: Tensors, metadata: Mapping[str, str] | None = None) -> None:
    """One file, its tensors in the order given, each of bfloat16 in one dimension."""
    header: dict[str, object] = {} if metadata is None else {"__metadata__": dict(metadata)}
    at = 0
    for name, data in tensors.items():
        header[name] = {"dtype": "BF16", "shape": [len(data) // 2], "data_offsets": [at, at + len(data)]}
        at += len(data)
    encoded = json.dumps(header).encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + b"".join(tensors.values()))


def layers(count: int = 6, size: int = 64_000, seed: int = 1) -> dict[str, bytes]:
    """Large tensors of random bytes and small ones in turn."""
    source = random.Random(seed)
    return {f"layers.{at}.weight": source.randbytes(size if at % 2 else 64) for at in range(count)}
