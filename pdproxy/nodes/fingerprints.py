"""Why two nodes exchange no tickets, part by part, and which flags to align: pure.

A node's fingerprint names what the bytes of its KV cache depend on. Two fingerprints are two cohorts: each node serves,
but no ticket passes between them. That is what happens to the first node of a rolling change, and it is what a mistake
looks like, so it is always said.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from pdproxy.nodes.compatibility import Incompatibility, block_size_advice
from pdproxy.nodes.node_info import WHOLE, NodeInfo

ADVICE: Mapping[str, str] = MappingProxyType(
    {
        "vllm_version": "run the same vLLM release",
        "connector_version": "run the same pdproxy release",
        "vllm": "run the same vLLM release",
        "architecture": "serve the same model, with the same --model-impl",
        "model_config": "serve the same model, with the same config.json and --hf-overrides",
        "rope": "the same rope settings in config.json and --hf-overrides",
        "context": "the same --max-model-len",
        "media": "the same --mm-processor-kwargs and --media-io-kwargs",
        "checkpoint": "the same weights: --model, --revision, --load-format; restart a node whose files were replaced",
        "draft_checkpoint": "the same --speculative-config and weights of its draft model",
        "quantization": "the same --quantization",
        "dtype": "the same --dtype",
        "kv_dtype": "the same --kv-cache-dtype",
        "kv_shape": "the same model, --kv-cache-dtype and --attention-backend",
        "kv_layout": "the same VLLM_KV_CACHE_LAYOUT",
        "kernel_block_size": "the same --attention-backend and --block-size",
        "attention_backend": "the same --attention-backend",
        "cache_groups": "the same model, --speculative-config and --disable-sliding-window",
        "block_sizes": "the same --block-size",
        "cache_mode": "the same --mamba-cache-mode, and --enable-prefix-caching on both or on neither",
        "state_dtypes": "the same --mamba-ssm-cache-dtype and --mamba-cache-dtype",
        "state_shapes": "the same number of speculative tokens in --speculative-config",
        "state_layout": "the same VLLM_SSM_CONV_STATE_LAYOUT",
        "speculative": "the same method and number of tokens in --speculative-config",
    }
)
"""What to align where a part differs. A part that is not here is named as it is: the connector may be newer than we."""

_BLOCK_SIZES = "block_sizes"


def unpaired(info: NodeInfo, others: Iterable[NodeInfo]) -> tuple[Incompatibility, ...]:
    """Why a node exchanges no tickets though nodes of the other role serve its model: empty where it does, or where
    there are none.

    It is compared with the nearest of them: the one that differs in the fewest parts.
    """
    partners = [other for other in others if _could_pair(info, other)]
    mine = info.cohort()
    if not partners or any("" in (mine, other.cohort()) or mine == other.cohort() for other in partners):
        return ()
    return min((differences(info, other) for other in partners), key=len)


def differences(info: NodeInfo, other: NodeInfo) -> tuple[Incompatibility, ...]:
    """One finding for each part that differs, with what to do about it; those that are known first."""
    mine, theirs = _parts(info), _parts(other)
    unlike = [part for part in mine.keys() | theirs.keys() if mine.get(part) != theirs.get(part)]
    known = list(ADVICE)
    unlike.sort(key=lambda part: (known.index(part) if part in ADVICE else len(known), part))
    return tuple(_finding(part, info, other, mine, theirs) for part in unlike)


def _finding(
    part: str, info: NodeInfo, other: NodeInfo, mine: Mapping[str, str], theirs: Mapping[str, str]
) -> Incompatibility:
    values = f"{mine.get(part, 'not told')} here, {theirs.get(part, 'not told')} on {other.node.name}"
    advice = block_size_advice(info, other) if part == _BLOCK_SIZES else ""
    advice = advice or ADVICE.get(part, "")
    return Incompatibility(part, f"{values}: {advice}" if advice else values)


def _parts(info: NodeInfo) -> dict[str, str]:
    """What makes a cohort; the digest of it all only where it is not explained by parts."""
    versions = {
        "vllm_version": info.labels.get("vllm_version", info.version),
        "connector_version": info.labels.get("connector_version", "none"),
    }
    parts = {part: value for part, value in info.fingerprint.items() if part != WHOLE}
    return versions | (parts or {"fingerprint": "none"})


def _could_pair(info: NodeInfo, other: NodeInfo) -> bool:
    mine, theirs = info.joined(), other.joined()
    return mine.role is not theirs.role and mine.model != "" and theirs.model == mine.model
