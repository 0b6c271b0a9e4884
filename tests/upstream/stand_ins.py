"""Stand-ins for what vLLM's tests want of a machine and need not have: model configurations from a hub, and Ray.

The tests read the configuration of a model and never its weights. A folder of the model's name below the working
directory is a model to vLLM, so that nothing is fetched. Ray is imported at the head of a file and used by a test that
needs a GPU.
"""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

RAY = '"""Not Ray: vLLM\'s tests import the name."""\n'


def opt(hidden: int, layers: int, heads: int, projection: int) -> dict[str, Any]:
    """The configuration of one of Meta's OPT models."""
    return {
        "architectures": ["OPTForCausalLM"],
        "model_type": "opt",
        "hidden_size": hidden,
        "word_embed_proj_dim": projection,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "ffn_dim": 4 * hidden,
        "max_position_embeddings": 2048,
        "vocab_size": 50272,
        "bos_token_id": 2,
        "eos_token_id": 2,
        "pad_token_id": 1,
        "torch_dtype": "float16",
    }


MODELS = {"facebook/opt-125m": opt(768, 12, 12, 768), "facebook/opt-350m": opt(1024, 24, 16, 512)}


def provide(folder: Path) -> None:
    """Put them into `folder`, the working directory of the tests."""
    for name, config in MODELS.items():
        path = folder / name / "config.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(config), encoding="utf-8")
    if find_spec("ray") is None:
        (folder / "ray.py").write_text(RAY, encoding="utf-8")
