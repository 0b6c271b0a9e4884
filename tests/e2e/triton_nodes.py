"""Nodes with Triton on a CPU, whose interpreter runs the kernels.

On a CPU vLLM uses Triton only with a backend named `cpu`, that of triton-cpu, which is in no package registry.
`interpreted_triton` replaces it.
"""

import os
from dataclasses import replace
from enum import Enum
from importlib.util import find_spec
from pathlib import Path

import pytest

from deploy.local.node import NodeSpec

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
"""Run `pip install --no-deps --target FOLDER triton==3.9.0`, then the test with `PYTHONPATH=FOLDER`."""

METADATA = "Metadata-Version: 2.1\nName: interpreted-triton\nVersion: 1\n"
ENTRY_POINTS = "[triton.backends]\ncpu = tests.e2e.interpreted_triton\n"


class ModelRunner(Enum):
    """vLLM's two model runners; the value is that of `VLLM_USE_V2_MODEL_RUNNER`."""

    V1 = "0"
    V2 = "1"


def with_triton(spec: NodeSpec, runner: ModelRunner, folder: Path) -> NodeSpec:
    """The same node with Triton, which must be importable. `folder`: for the metadata of the backend."""
    installed = folder / "interpreted_triton-1.dist-info"
    installed.mkdir(parents=True, exist_ok=True)
    (installed / "METADATA").write_text(METADATA, encoding="utf-8")
    (installed / "entry_points.txt").write_text(ENTRY_POINTS, encoding="utf-8")
    paths = filter(None, (str(folder), os.environ.get("PYTHONPATH")))
    changed = {"VLLM_USE_V2_MODEL_RUNNER": runner.value, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(paths)}
    return replace(spec, more_environment={**spec.more_environment, **changed})
