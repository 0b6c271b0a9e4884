"""vLLM's Kimi-Linear, with `cpu_kimi` in place of its kernels for GPUs."""

from vllm.config import VllmConfig
from vllm.model_executor.layers.mamba.gdn import kimi_gdn_linear_attn
from vllm.models.kimi_k3.nvidia import model
from vllm.models.kimi_k3.nvidia.mla import MultiHeadLatentAttention
from vllm.models.kimi_k3.nvidia.ops.third_party import kda

from tests.e2e import cpu_kimi


class KimiLinearForCausalLM(model.KimiLinearForCausalLM):
    """The model that vLLM loads under this name."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        kda.chunk_kda_with_fused_gate = cpu_kimi.scan
        kda.fused_recurrent_kda_packed_decode = cpu_kimi.decode
        kimi_gdn_linear_attn.gather_initial_states = cpu_kimi.initial_states
        MultiHeadLatentAttention._attention = cpu_kimi.attention
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        for layer in self.modules():
            if isinstance(layer, MultiHeadLatentAttention):
                layer.kv_b_proj._cpu_skip_gemm_dispatch = True  # the CPU's matrix products empty weights that they pack
