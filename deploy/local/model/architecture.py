"""The shape of the tiny model: Qwen3-Next, with every layer type of the large ones, at about a million parameters.

Three things vLLM's CPU build asks for: heads of at least 64, untied embeddings, at least one layer with experts.
All four experts are active: a choice between experts would flip on bfloat16 rounding, and with it a token.
"""

from transformers import GenerationConfig, Qwen3NextConfig

from deploy.local.model.tokenizer import VOCABULARY
from deploy.local.model.vocabulary import END, PAD, SPECIAL

CONTEXT = 4096


def config() -> Qwen3NextConfig:
    """Three gated-delta-net layers, then one full-attention layer that has the experts."""
    return Qwen3NextConfig(
        architectures=["Qwen3NextForCausalLM"],
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        linear_conv_kernel_dim=4,
        num_experts=4,
        num_experts_per_tok=4,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        mlp_only_layers=[0, 1, 2],
        max_position_embeddings=CONTEXT,
        initializer_range=0.02,
        tie_word_embeddings=False,
        eos_token_id=SPECIAL.index(END),
        pad_token_id=SPECIAL.index(PAD),
    )


def generation() -> GenerationConfig:
    """Greedy, ending at the end mark."""
    return GenerationConfig(do_sample=False, eos_token_id=SPECIAL.index(END), pad_token_id=SPECIAL.index(PAD))
