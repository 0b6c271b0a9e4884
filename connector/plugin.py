"""vLLM's `vllm.general_plugins` entry point: the environment that a hybrid model's transfer needs.

vLLM loads it in the process that parses the engine's arguments, in the engine core and in every worker, before the
model is built. Mamba's convolution state must be laid out dimension-first ("DS") to be moved block by block; vLLM
sets this by itself on CPU only. A node that says otherwise in its own environment keeps what it says; a node
without our connector, or without state groups, does not notice.
"""

import os
from collections.abc import MutableMapping

LAYOUT = "VLLM_SSM_CONV_STATE_LAYOUT"


def register() -> None:
    """Called by vLLM, several times and in several processes."""
    prepare(os.environ)


def prepare(environ: MutableMapping[str, str]) -> None:
    """Ask for the layout that can travel."""
    environ.setdefault(LAYOUT, "DS")
