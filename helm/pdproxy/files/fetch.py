"""Fetches a model into the cache that all nodes mount, and then leaves a mark, for which they wait."""

import os
import sys
from pathlib import Path

from huggingface_hub import snapshot_download

SKIPPED = ["original/**", "onnx/**", "*.onnx", "*.gguf", "*.pth"]
"""Weights in forms that vLLM does not load by itself."""


def main() -> None:
    """Raises what the hub's client raises: the Job tries again."""
    mark = Path(os.environ["MARK"])
    revision = os.environ["REVISION"] or None
    found = snapshot_download(os.environ["MODEL"], revision=revision, ignore_patterns=SKIPPED)
    mark.parent.mkdir(parents=True, exist_ok=True)
    mark.write_text(f"{found}\n", encoding="utf-8")
    sys.stdout.write(f"{os.environ['MODEL']} is at {found}\n")


main()
