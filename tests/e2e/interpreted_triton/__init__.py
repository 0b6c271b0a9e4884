"""A Triton backend `cpu` that compiles nothing, for nodes that run Triton's kernels in its interpreter.

vLLM's model runner V2 is written in Triton, and on a CPU vLLM takes Triton only where it has a backend of that name:
that of triton-cpu, which is in no package registry. With `TRITON_INTERPRET=1` kernels run in Python and no backend is
ever asked, so that one which is merely there is enough.
"""

import os
from dataclasses import replace
from pathlib import Path

from deploy.local.node import NodeSpec

METADATA = "Metadata-Version: 2.1\nName: interpreted-triton\nVersion: 1\n"
ENTRY_POINTS = f"[triton.backends]\ncpu = {__name__}\n"


def on_model_runner_v2(spec: NodeSpec, folder: Path) -> NodeSpec:
    """The same node on model runner V2. Triton must be importable; `folder`: for what makes the backend known to it."""
    installed = folder / "interpreted_triton-1.dist-info"
    installed.mkdir(parents=True, exist_ok=True)
    (installed / "METADATA").write_text(METADATA, encoding="utf-8")
    (installed / "entry_points.txt").write_text(ENTRY_POINTS, encoding="utf-8")
    paths = filter(None, (str(folder), os.environ.get("PYTHONPATH")))
    changed = {"VLLM_USE_V2_MODEL_RUNNER": "1", "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(paths)}
    return replace(spec, more_environment={**spec.more_environment, **changed})
