"""Print which tensor parallel sizes of a hybrid model's nodes can exchange blocks, and with which block size.

    python -m deploy.block_sizes --model PATH --tp 1,2,4,8

Prefill and decode nodes exchange blocks only where both have the same block size. vLLM makes an attention block of a
hybrid model at least as large, in bytes, as the mamba state of one layer (`Platform._align_hybrid_block_size`, the same
in 0.32 and 0.33), and tensor parallelism does not divide both alike: the state is divided evenly, KV heads only until
each GPU has one. And where a Mamba-2 model has fewer groups than a node has GPUs, vLLM repeats groups, which NIXL reads
as if they were divided (vllm#55208): such a node exchanges blocks with nodes of its own size alone. This computes both
from the model's `config.json`, without vLLM and without a GPU.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Config = Mapping[str, Any]
"""A model's `config.json`, the part about its text model."""

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "half": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}
GPU_MULTIPLE = 16
"""Tokens: the smallest block of vLLM's attention kernels on most GPUs, and its default block size."""


class UnknownModelError(ValueError):
    """The model's sizes cannot be read from its configuration; the message says what is missing."""


@dataclass(frozen=True)
class Dtypes:
    """Types as vLLM's flags name them; `auto` is what vLLM picks on a GPU."""

    model: str = "auto"
    kv_cache: str = "auto"
    mamba_cache: str = "auto"
    mamba_ssm_cache: str = "auto"


@dataclass(frozen=True)
class Hybrid:
    """The sizes on which the block size depends, of the whole model, before tensor parallelism divides it.

    Attributes:
        kv_heads: of one attention layer; each GPU has at least one.
        head_bytes: of one token's key and value in one KV head.
        conv_channels: of one mamba layer's convolution, by tensor parallel size (Mamba-2 repeats groups).
        conv_row_bytes: of one channel, over all rows.
        recurrent_bytes: of one mamba layer's recurrent state.
        heads: numbers that the tensor parallel size must divide.
        groups: of one mamba layer over all GPUs, by tensor parallel size.
    """

    kv_heads: int
    head_bytes: int
    conv_channels: Callable[[int], int]
    conv_row_bytes: int
    recurrent_bytes: int
    heads: tuple[int, ...]
    groups: Callable[[int], int] = lambda _tp: 1

    def token_bytes(self, tp: int) -> int:
        """Bytes of one token in one attention layer on one GPU."""
        return max(1, self.kv_heads // tp) * self.head_bytes

    def state_bytes(self, tp: int) -> int:
        """Bytes of one mamba layer's state on one GPU."""
        return self.conv_channels(tp) // tp * self.conv_row_bytes + self.recurrent_bytes // tp

    def fits(self, tp: int) -> bool:
        """Whether vLLM can divide the model so."""
        shared = self.kv_heads % tp == 0 or tp % self.kv_heads == 0
        return shared and all(count % tp == 0 for count in self.heads)


def block_size(token_bytes: int, state_bytes: int, multiple: int = GPU_MULTIPLE) -> int:
    """Tokens of a block: the smallest multiple of `multiple` that is as large as the state.

    `multiple` is the attention kernel's smallest block, or `--block-size` where that is larger.
    """
    return multiple * math.ceil(state_bytes / (multiple * token_bytes))


def block_sizes(model: Hybrid, sizes: Sequence[int], multiple: int = GPU_MULTIPLE) -> dict[int, int]:
    """Block size by tensor parallel size; those that do not divide the model are left out."""
    return {
        tp: block_size(model.token_bytes(tp), model.state_bytes(tp), multiple) for tp in sorted(sizes) if model.fits(tp)
    }


def pairs(model: Hybrid, found: Mapping[int, int]) -> list[tuple[int, int]]:
    """Different tensor parallel sizes whose nodes exchange blocks as they are."""
    together = [tps for tps in exchanging(model, found) if len(tps) > 1]
    return [
        (one, other) for tps in together for one in tps for other in tps if one < other and found[one] == found[other]
    ]


def exchanging(model: Hybrid, found: Mapping[int, int]) -> list[tuple[int, ...]]:
    """Tensor parallel sizes by what exchanges blocks once the block sizes are equal: those with equal groups."""
    groups = {tp: model.groups(tp) for tp in found}
    return [tuple(tp for tp in found if groups[tp] == each) for each in dict.fromkeys(groups.values())]


def common(found: Mapping[int, int], tps: Sequence[int]) -> int:
    """The smallest `--block-size` that all of these keep as it is: on every node, all then have this one."""
    return max(found[tp] for tp in tps)


def read(config: Config, dtypes: Dtypes, speculative_tokens: int = 0) -> Hybrid:
    """The sizes in a model's configuration. Raises UnknownModelError."""
    config = {**config, **config.get("text_config", {})}
    kind = str(config.get("model_type", ""))
    for prefix, family in _FAMILIES.items():
        if kind.startswith(prefix):
            return _sized(family, config, _Bytes.of(config, dtypes), speculative_tokens)
    raise UnknownModelError(
        f"model_type {kind!r} is not one of {', '.join(_FAMILIES)}: start a node for each tensor parallel size and "
        "read 'Setting attention block size to' in its log"
    )


def _sized(family: "_Family", config: Config, size: "_Bytes", speculative_tokens: int) -> Hybrid:
    try:
        return family(config, size, speculative_tokens)
    except KeyError as missing:
        raise UnknownModelError(f"there is no {missing} in it, which {config['model_type']} models have") from missing


@dataclass(frozen=True)
class _Bytes:
    """Bytes of an element of each cache."""

    kv: int
    conv: int
    recurrent: int

    @classmethod
    def of(cls, config: Config, dtypes: Dtypes) -> "_Bytes":
        """As vLLM picks them on a GPU. Raises UnknownModelError for types that this does not know."""
        saved = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
        model = dtypes.model if dtypes.model != "auto" else ("bfloat16" if saved == "float32" else saved)
        conv = dtypes.mamba_cache if dtypes.mamba_cache != "auto" else model
        recurrent = dtypes.mamba_ssm_cache if dtypes.mamba_ssm_cache != "auto" else _ssm_dtype(config) or conv
        kv = dtypes.kv_cache if dtypes.kv_cache != "auto" else model
        unknown = {kv, conv, recurrent} - BYTES.keys()
        if unknown:
            raise UnknownModelError(f"unknown types: {', '.join(sorted(unknown))}; known are {', '.join(BYTES)}")
        return cls(BYTES[kv], BYTES[conv], BYTES[recurrent])


def _ssm_dtype(config: Config) -> str | None:
    """The recurrent state's own type, which Qwen3.5 and Nemotron-H configure (`VerifyAndUpdateConfig` of each)."""
    kind = str(config.get("model_type", ""))
    if kind.startswith("qwen3_5"):
        return config.get("mamba_ssm_dtype")
    return config.get("mamba_ssm_cache_dtype", "float32") if kind.startswith("nemotron_h") else None


def _attention(config: Config, size: _Bytes) -> tuple[int, int]:
    """KV heads, and bytes of a token in one of them."""
    heads = config["num_attention_heads"]
    width = config.get("head_dim") or config.get("attention_head_dim") or config["hidden_size"] // heads
    return config.get("num_key_value_heads") or heads, 2 * width * size.kv


def _gated_delta_net(config: Config, size: _Bytes, speculative_tokens: int) -> Hybrid:
    """Qwen3-Next, Qwen3.5 and Qwen3.6 (`MambaStateShapeCalculator.gated_delta_net_state_shape`)."""
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    key_width, value_width = config["linear_key_head_dim"], config["linear_value_head_dim"]
    channels = 2 * keys * key_width + values * value_width
    rows = config["linear_conv_kernel_dim"] - 1 + speculative_tokens
    recurrent = values * value_width * key_width * size.recurrent
    divided = (config["num_attention_heads"], values, channels)
    return Hybrid(*_attention(config, size), lambda _tp: channels, rows * size.conv, recurrent, divided)


def _mamba2(config: Config, size: _Bytes, speculative_tokens: int) -> Hybrid:
    """Nemotron-H, Granite 4 and Falcon-H1, whose fields differ (`MambaStateShapeCalculator.mamba2_state_shape`)."""
    if "mamba_num_heads" in config:
        heads, groups, state, kernel = (config[name] for name in _NEMOTRON)
        inner = heads * config["mamba_head_dim"]
    else:
        heads, groups, state, kernel = (config[name] for name in _GRANITE)
        inner = config.get("mamba_d_ssm") or config["mamba_expand"] * config["hidden_size"]

    def repeated(tp: int) -> int:
        return int(groups if groups % tp == 0 else tp)

    def channels(tp: int) -> int:
        return int(inner + 2 * repeated(tp) * state)

    row = (kernel - 1 + speculative_tokens) * size.conv
    divided = (config["num_attention_heads"], heads)
    return Hybrid(*_attention(config, size), channels, row, inner * state * size.recurrent, divided, repeated)


_NEMOTRON = ("mamba_num_heads", "n_groups", "ssm_state_size", "conv_kernel")
_GRANITE = ("mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_conv")


def _mamba1(config: Config, size: _Bytes, _speculative_tokens: int) -> Hybrid:
    """Jamba (`MambaStateShapeCalculator.mamba1_state_shape`)."""
    inner = config["mamba_expand"] * config["hidden_size"]
    rows = config["mamba_d_conv"] - 1
    recurrent = inner * config["mamba_d_state"] * size.recurrent
    divided = (config["num_attention_heads"], inner)
    return Hybrid(*_attention(config, size), lambda _tp: inner, rows * size.conv, recurrent, divided)


_Family = Callable[[Config, _Bytes, int], Hybrid]
_FAMILIES: Mapping[str, _Family] = {
    "qwen3_next": _gated_delta_net,
    "qwen3_5": _gated_delta_net,
    "nemotron_h": _mamba2,
    "granitemoehybrid": _mamba2,
    "falcon_h1": _mamba2,
    "jamba": _mamba1,
}
"""By the beginning of `model_type`. (Qwen3.6's is qwen3_5.)"""


def report(model: Hybrid, found: Mapping[int, int], asked: Sequence[int]) -> str:
    """The table that the command prints."""
    lines = ["TP size   block size", *(f"{tp:7d} {_row(found.get(tp)):>12}" for tp in sorted(asked))]
    equal = [f"{one} and {other}" for one, other in pairs(model, found)]
    lines.append(f"Different TP sizes that go together as they are: {', '.join(equal) or 'none'}.")
    classes = exchanging(model, found)
    for tps in classes:
        if len({found[tp] for tp in tps}) > 1:
            these = "All of these go" if len(tps) == len(found) else f"TP sizes {_listed(tps)} go"
            lines.append(f"{these} together with --block-size {common(found, tps)} on every node.")
    alone = [tps[0] for tps in classes if len(tps) == 1 < len(found)]
    lines += [f"TP size {tp} goes with no other, whatever the block size: {_why_alone(model, tp)}" for tp in alone]
    return "\n".join(lines) + "\n"


def _why_alone(model: Hybrid, tp: int) -> str:
    groups = model.groups(1)
    if groups < tp:
        return f"vLLM repeats the model's {groups} mamba group{'s'[: groups != 1]} for {tp} GPUs."
    return f"the others have more GPUs than the model has mamba groups ({groups})."


def _listed(tps: Sequence[int]) -> str:
    return f"{', '.join(map(str, tps[:-1]))} and {tps[-1]}"


def _row(size: int | None) -> str:
    return "impossible" if size is None else str(size)


def _arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m deploy.block_sizes", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="folder with config.json, or that file")
    parser.add_argument("--tp", default="1,2,4,8", help="tensor parallel sizes (default: %(default)s)")
    parser.add_argument(
        "--multiple-of", type=int, default=GPU_MULTIPLE, help="the kernel's block (default: %(default)s)"
    )
    parser.add_argument("--block-size", type=int, default=0, help="as the nodes' flag")
    parser.add_argument("--speculative-tokens", type=int, default=0, help="num_speculative_tokens of the nodes")
    for name in ("dtype", "kv-cache-dtype", "mamba-cache-dtype", "mamba-ssm-cache-dtype"):
        parser.add_argument(f"--{name}", default="auto", help="as the nodes' flag")
    return parser.parse_args(words)


def main(words: Sequence[str]) -> int:
    """Print the table; 2 where the model cannot be read."""
    given = _arguments(words)
    dtypes = Dtypes(given.dtype, given.kv_cache_dtype, given.mamba_cache_dtype, given.mamba_ssm_cache_dtype)
    asked = [int(word) for word in given.tp.split(",")]
    path = given.model / "config.json" if given.model.is_dir() else given.model
    try:
        model = read(json.loads(path.read_text(encoding="utf-8")), dtypes, given.speculative_tokens)
    except (OSError, UnknownModelError) as error:
        sys.stderr.write(f"{path}: {error}\n")
        return 2
    sys.stdout.write(report(model, block_sizes(model, asked, max(given.multiple_of, given.block_size)), asked))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
