"""A hybrid model (3 gated-delta-net layers, 1 full-attention layer) for two CPU cores, trained to recall."""

from pathlib import Path

MODEL_PATH = Path(__file__).parent / "tiny-hybrid"
"""The folder that vLLM and transformers load: weights in bfloat16, tokenizer, chat template."""
