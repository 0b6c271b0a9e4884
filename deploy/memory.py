"""Print what fits on a GPU: weights, cache, the most sequences at a time and the longest context of a hybrid model.

    python -m deploy.memory --model PATH --gpu 80 --tp 1,2 --max-num-seqs 256 --max-model-len 32768

A node of a hybrid model with full CUDA graphs ends at start where `--max-num-seqs` (1,024 by default on an H100)
exceeds its number of blocks (vLLM 0.32 and 0.33, `config/compilation.py`), and any node does where one request of
`--max-model-len` needs more blocks than there are. vLLM says so after it has loaded the weights. This computes it
before, from the model's `config.json` and the index of its weights, without vLLM and without a GPU. Blocks and states
are vLLM's own arithmetic (`deploy.block_sizes`, `v1/core/kv_cache_utils.py`) and exact; what activations and CUDA
graphs take is an upper estimate from published start-up logs (`Reserve`).
"""

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from deploy.block_sizes import GPU_MULTIPLE, Config, Dtypes, UnknownModelError, block_size, read

GIB = 1 << 30
GPUS = {80: 79.1, 96: 94.5, 141: 139.7, 192: 178.3}
"""GiB that the driver reports, by the GB in the GPU's name: H100, A100; GH200, H20, RTX PRO 6000; H200; B200."""
MARGIN = 0.05
"""Part of a GPU's memory that may be missing, and what fits still starts."""
INDEX = "model.safetensors.index.json"
MODELS = Path(__file__).with_name("models.json")
"""Names, sizes and configurations of published models: what of them decides what fits."""


@dataclass(frozen=True)
class Layers:
    """How many layers keep something for a sequence.

    Attributes:
        attention: layers that keep keys and values of every token.
        mamba: layers that keep a state of constant size.
        checkpoints: blocks more that a request has in each group of mamba layers, for a state in mid-prompt.
    """

    attention: int
    mamba: int
    checkpoints: int = 0

    @property
    def in_group(self) -> int:
        """Layers that share a block's number: vLLM's `_get_kv_cache_groups_uniform_page_size`."""
        few, many = sorted((self.attention, self.mamba))
        return many if many < few * 1.5 else few

    @property
    def attention_groups(self) -> int:
        """Groups of attention layers: each takes a block for every block of tokens."""
        return math.ceil(self.attention / self.in_group)

    @property
    def mamba_groups(self) -> int:
        """Groups of mamba layers: each takes the same few blocks for a request of any length."""
        return math.ceil(self.mamba / self.in_group)

    def state_blocks(self, speculative_tokens: int = 0) -> int:
        """Blocks of one request that hold states, with prefix caching: the running one and the last that was kept."""
        return self.mamba_groups * (2 + speculative_tokens + self.checkpoints)


def layers(config: Config) -> Layers:
    """The layers of a model, by its `config.json`. Raises UnknownModelError."""
    config = {**config, **config.get("text_config", {})}
    kind, count = str(config.get("model_type", "")), int(config.get("num_hidden_layers") or 0)
    if kind.startswith("falcon_h1"):
        return Layers(count, count, 1)
    if kind.startswith("jamba"):
        period, offset = config["attn_layer_period"], config["attn_layer_offset"]
        attention = sum(index % period == offset for index in range(count))
        return Layers(attention, count - attention)
    named = config.get("layers_block_type") or config.get("layer_types") or config.get("hybrid_override_pattern") or ()
    attention = sum(name in ("full_attention", "attention", "*") for name in named)
    mamba = sum(name in ("linear_attention", "mamba", "M") for name in named)
    if not named and (every := config.get("full_attention_interval")):
        attention, mamba = count // every, count - count // every
    if not attention or not mamba:
        raise UnknownModelError("its config.json does not say which layers are attention and which are mamba layers")
    return Layers(attention, mamba, 0 if kind.startswith("qwen3") else 1)


@dataclass(frozen=True)
class Model:
    """A model: its `config.json`, and the bytes of all of its weights."""

    config: Config
    total: int


def load(name: str) -> Model:
    """A model in a folder, or one that docs/memory.md names. Raises OSError, UnknownModelError."""
    listed = known()
    if name in listed:
        return Model(listed[name]["config"], listed[name]["bytes"])
    folder = Path(name)
    config: Mapping[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return Model(config, total_size(folder))


def known() -> dict[str, dict[str, Any]]:
    """The models that docs, compose and the chart name, with the parsers of their families."""
    models: dict[str, dict[str, Any]] = json.loads(MODELS.read_text(encoding="utf-8"))
    return models


def gpu_gib(gb: float) -> float:
    """GiB that the driver reports of a GPU whose name says so many GB."""
    return GPUS.get(int(gb), gb * 1e9 / GIB)


@dataclass(frozen=True)
class Weights:
    """Bytes of the weights, over all GPUs; experts may be cut over more of them than the rest."""

    experts: int
    rest: int

    def on_one_gpu(self, flags: "Flags") -> int:
        """A little more than a GPU holds: checkpoints have draft layers besides, which a node without them skips."""
        return self.rest // flags.tp + self.experts // (flags.tp * flags.dp)


def weights(config: Config, total: int) -> Weights:
    """Experts apart from the rest, where the model has any; `total` is what the index of the weights says."""
    text = {**config, **config.get("text_config", {})}
    count = text.get("num_experts") or text.get("n_routed_experts") or text.get("num_local_experts") or 0
    width = text.get("moe_intermediate_size") or text.get("intermediate_size") or 0
    matrices = 2 if str(text.get("model_type", "")).startswith("nemotron_h") else 3
    size = 1 if (config.get("quantization_config") or {}).get("quant_method") == "fp8" else 2
    experts = _expert_layers(text) * count * matrices * width * int(text["hidden_size"]) * size
    return Weights(min(experts, total), total - min(experts, total))


def _expert_layers(text: Config) -> int:
    """Layers with experts: in a pattern they are layers of their own."""
    named = text.get("hybrid_override_pattern") or text.get("layers_block_type") or ()
    own = sum(name in ("E", "moe") for name in named)
    return own or int(text["num_hidden_layers"])


def total_size(folder: Path) -> int:
    """Bytes of a model's weights, by their index, or by the files themselves. Raises OSError, UnknownModelError."""
    index = folder / INDEX
    if index.exists():
        return int(json.loads(index.read_text(encoding="utf-8"))["metadata"]["total_size"])
    sizes = [each.stat().st_size for each in folder.glob("*.safetensors")]
    if not sizes:
        raise UnknownModelError(f"there is neither {INDEX} nor a *.safetensors file beside it")
    return sum(sizes)


@dataclass(frozen=True)
class Flags:
    """The flags of a node that decide what fits; names as vLLM's, defaults as its own on an H100.

    Attributes:
        dp: data-parallel ranks: experts are cut over all of their GPUs.
        text_only: `--language-model-only`: no image is profiled at start.
    """

    tp: int = 1
    dp: int = 1
    max_num_seqs: int = 1024
    max_model_len: int = 32768
    max_num_batched_tokens: int = 8192
    gpu_memory: float = 0.92
    block_size: int = 0
    speculative_tokens: int = 0
    dtypes: Dtypes = field(default_factory=Dtypes)
    text_only: bool = False


@dataclass(frozen=True)
class Reserve:
    """Bytes that vLLM takes beside weights and cache: an upper estimate, held to published logs by tests.

    Attributes:
        context: of the CUDA context, NCCL and compiled kernels, beside what the driver reports as total.
        graphs: of CUDA graphs.
        logits: of the largest sampling step, `max_num_seqs` rows over the vocabulary: logits, their copy in float32,
            probabilities, and the sorted order for top-p.
        hidden: of the largest prefill step: activations of the widest layer, experts' workspace.
        images: of the largest image, for a model that takes any.
    """

    context: int
    graphs: int
    logits: int
    hidden: int
    images: int

    @property
    def total(self) -> int:
        """Sampling and prefill do not overlap; an image precedes both."""
        return self.context + self.graphs + max(self.logits, self.hidden, self.images)


LOGIT_BYTES = 12
"""Bytes of one entry of the vocabulary for one sequence: 2.8 GiB for 1,024 sequences of 248,320; twice with drafts."""


def reserve(config: Config, flags: Flags) -> Reserve:
    """The memory that a node needs beside weights and cache."""
    text = {**config, **config.get("text_config", {})}
    hidden, experts = int(text["hidden_size"]), int(text.get("num_experts_per_tok") or 1)
    wide = max(2 * hidden * experts, 4 * int(text.get("intermediate_size") or 0) // flags.tp, 12 * hidden)
    images = 0 if flags.text_only or "vision_config" not in config else 2 * GIB
    return Reserve(
        context=GIB // 2,
        graphs=3 * GIB // 2,
        logits=LOGIT_BYTES * flags.max_num_seqs * int(text["vocab_size"]) * (2 if flags.speculative_tokens else 1),
        hidden=2 * flags.max_num_batched_tokens * wide * 2,
        images=images,
    )


@dataclass(frozen=True)
class Fit:
    """The memory that is left of one GPU, and how many sequences it holds.

    Attributes:
        total: bytes that vLLM may use of the GPU.
        weights: bytes on one GPU.
        reserved: bytes beside weights and cache.
        block_size: tokens of a block.
        block_bytes: bytes of a block on one GPU, over all layers that share it.
        request_blocks: blocks of one request of `--max-model-len`.
        state_blocks: those of them that hold states; the same for a request of any length.
        attention_groups: blocks that `block_size` tokens take.
    """

    flags: Flags
    total: int
    weights: int
    reserved: int
    block_size: int
    block_bytes: int
    state_blocks: int
    attention_groups: int

    @property
    def cache(self) -> int:
        """Bytes that are left for the cache."""
        return self.total - self.weights - self.reserved

    @property
    def blocks(self) -> int:
        """The number of blocks, one of which vLLM keeps for itself."""
        return max(0, self.cache // self.block_bytes)

    @property
    def request_blocks(self) -> int:
        """Blocks of one request of `--max-model-len`."""
        return self.state_blocks + self.attention_groups * math.ceil(self.flags.max_model_len / self.block_size)

    @property
    def longest(self) -> int:
        """Tokens of the longest request that the cache holds."""
        return max(0, (self.blocks - self.state_blocks) // self.attention_groups * self.block_size)

    @property
    def at_once(self) -> float:
        """How many requests of `--max-model-len` the cache holds: vLLM's "maximum concurrency"."""
        return self.blocks / self.request_blocks

    def refusals(self) -> list[str]:
        """Why vLLM would end at start, each with the flag that mends it; empty where it starts."""
        flags = self.flags
        if self.blocks == 0:
            takes = f"weights take {_gib(self.weights)}, activations and CUDA graphs {_gib(self.reserved)}"
            allowed = f"{_gib(self.total)} that --gpu-memory-utilization {flags.gpu_memory:g} allows"
            no_room = f"of {allowed}, {takes}: no room for a cache. Take more GPUs, or a quantized model"
            return [f"--tensor-parallel-size {flags.tp}: {no_room}"]
        found = []
        if flags.max_num_seqs > self.blocks:
            found.append(f"--max-num-seqs {flags.max_num_seqs}: the cache has {self.blocks} blocks, take no more")
        if self.longest < flags.max_model_len:
            found.append(f"--max-model-len {flags.max_model_len}: the cache holds {self.longest} tokens of one request")
        return found


def fit(loaded: Model, gib: float, flags: Flags) -> Fit:
    """The sequences that a GPU of so many GiB holds. Raises UnknownModelError."""
    config = loaded.config
    model, kept = read(config, flags.dtypes, flags.speculative_tokens), layers(config)
    if not model.fits(flags.tp):
        raise UnknownModelError(f"--tensor-parallel-size {flags.tp} does not divide the model's heads")
    block = block_size(model.token_bytes(flags.tp), model.state_bytes(flags.tp), max(GPU_MULTIPLE, flags.block_size))
    return Fit(
        flags=flags,
        total=int(gib * GIB * flags.gpu_memory),
        weights=weights(config, loaded.total).on_one_gpu(flags),
        reserved=reserve(config, flags).total,
        block_size=block,
        block_bytes=kept.in_group * block * model.token_bytes(flags.tp),
        state_blocks=kept.state_blocks(flags.speculative_tokens),
        attention_groups=kept.attention_groups,
    )


def with_room(model: Model, gib: float, flags: Flags) -> Fit:
    """The same for a GPU with `MARGIN` less memory."""
    return fit(model, gib * (1 - MARGIN), flags)


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"


def report(model: Model, gib: float, flags: Flags, sizes: Sequence[int]) -> tuple[str, bool]:
    """The table that the command prints, and whether all of the sizes start with room."""
    lines = [
        f"{'TP':>3} {'weights':>10} {'cache':>10} {'block':>6} {'blocks':>7} {'longest':>9} {'at once':>8}  verdict"
    ]
    good = True
    for tp in sizes:
        mine = replace(flags, tp=tp)
        found = fit(model, gib, mine)
        refused, close = found.refusals(), with_room(model, gib, mine).refusals()
        good = good and not close
        verdict = "; ".join(refused) or "; ".join(f"starts, near the edge: {each}" for each in close) or "starts"
        lines.append(
            f"{tp:3d} {_gib(found.weights):>10} {_gib(found.cache):>10} {found.block_size:6d} {found.blocks:7d}"
            f" {found.longest:9d} {found.at_once:8.1f}  {verdict}"
        )
    return "\n".join(lines) + "\n", good


def sentence(found: Fit) -> str:
    """The sentence about its node in an example's comment."""
    return (
        f"weights {_gib(found.weights)} a GPU, cache {_gib(found.cache)} in {found.blocks:,} blocks of"
        f" {found.block_size:,} tokens: {found.at_once:.0f} requests of {found.flags.max_model_len:,} tokens at a time"
    )


def flags_parser(**more: Any) -> argparse.ArgumentParser:
    """A parser of those flags of a node that decide what fits."""
    parser = argparse.ArgumentParser(**more)
    parser.add_argument("--data-parallel-size", type=int, default=Flags.dp, help="experts are cut over all ranks")
    parser.add_argument("--max-num-seqs", type=int, default=Flags.max_num_seqs)
    parser.add_argument("--max-model-len", type=int, default=Flags.max_model_len)
    parser.add_argument("--max-num-batched-tokens", type=int, default=Flags.max_num_batched_tokens)
    parser.add_argument("--gpu-memory-utilization", type=float, default=Flags.gpu_memory)
    parser.add_argument("--block-size", type=int, default=Flags.block_size)
    parser.add_argument("--speculative-tokens", type=int, default=Flags.speculative_tokens, help=SPECULATIVE)
    parser.add_argument("--language-model-only", action="store_true")
    for name in ("dtype", "kv-cache-dtype", "mamba-cache-dtype", "mamba-ssm-cache-dtype"):
        parser.add_argument(f"--{name}", default="auto", help="as the nodes' flag")
    return parser


SPECULATIVE = "num_speculative_tokens of --speculative-config"


def _flags(given: argparse.Namespace) -> Flags:
    return Flags(
        dp=given.data_parallel_size,
        max_num_seqs=given.max_num_seqs,
        max_model_len=given.max_model_len,
        max_num_batched_tokens=given.max_num_batched_tokens,
        gpu_memory=given.gpu_memory_utilization,
        block_size=given.block_size,
        speculative_tokens=given.speculative_tokens,
        dtypes=Dtypes(given.dtype, given.kv_cache_dtype, given.mamba_cache_dtype, given.mamba_ssm_cache_dtype),
        text_only=given.language_model_only,
    )


def flags_of(words: Sequence[str]) -> Flags:
    """The flags of a command line of `vllm serve`; what does not decide what fits is passed over."""
    parser = flags_parser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--tensor-parallel-size", type=int, default=Flags.tp)
    given, _ = parser.parse_known_args(list(words))
    return replace(_flags(given), tp=given.tensor_parallel_size)


def main(words: Sequence[str]) -> int:
    """Print the table. 1 where a size does not start with room, 2 where the model cannot be read."""
    parser = flags_parser(prog="python -m deploy.memory", description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--model", required=True, help=f"a folder with config.json and {INDEX}, or a name of docs/memory.md"
    )
    parser.add_argument("--gpu", type=float, default=80, help=f"GB as in the GPU's name: {', '.join(map(str, GPUS))}")
    parser.add_argument("--tp", default="1,2,4,8", help="tensor parallel sizes (default: %(default)s)")
    given = parser.parse_args(list(words))
    try:
        model = load(given.model)
        sizes = [int(word) for word in given.tp.split(",")]
        text, good = report(model, gpu_gib(given.gpu), _flags(given), sizes)
    except (OSError, UnknownModelError) as error:
        sys.stderr.write(f"{given.model}: {error}\n")
        return 2
    sys.stdout.write(text)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
