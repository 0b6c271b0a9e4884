"""docs/memory.md: which model starts on which GPUs, by `deploy.memory`."""

from collections.abc import Mapping
from typing import Any

from deploy.block_sizes import UnknownModelError
from deploy.memory import GPUS, MARGIN, Flags, Model, gpu_gib, with_room

SEQUENCES = (1024, 512, 256, 128, 64, 32)
"""Values of `--max-num-seqs` that are tried, the largest first."""
SIZES = (1, 2, 4, 8)
LONG = 32768
"""Tokens of a long request: the context that compose and the chart have by default."""
GPU_MEMORY = 0.9
"""Part of the GPU's memory, as compose and the chart have it by default."""

PAGE = """\
# What starts on which GPU

*Made by `make generate` from `deploy/models.json`.* Each cell has three figures: the largest `--max-num-seqs` of
{sequences} with which a node starts, how many requests of {long:,} tokens its cache then holds at a time, and the
longest context. "No": it does not start. All are with {margin:.0%} of the GPU's memory to spare,
`--gpu-memory-utilization` {gpu_memory}, `--max-num-batched-tokens` 8,192 and vLLM's own types of cache and state.

{tables}
The default of compose and of the chart, Qwen3.6-35B-A3B in FP8, starts on one GPU of 80 GB for each role,
with `--max-num-seqs` 256 and a context of 32,768 tokens (`MAX_NUM_SEQS` and `MAX_MODEL_LEN` in `.env`,
`model.maxSequences` and `model.maxLength` of the chart). In bfloat16 it does not.

Always set `--max-num-seqs`. Its default is 1,024 on GPUs of 70 GB and more, and a node of a hybrid model ends at start
where it exceeds the number of blocks: "max_num_seqs (1024) exceeds available Mamba cache blocks (614)".

## Another model, other flags

```sh
python -m deploy.memory --model PATH --gpu 80 --tp 1,2 --max-num-seqs 256 --max-model-len 32768
```

`PATH` is a folder with the model's `config.json` and `model.safetensors.index.json` (the weights need not be there),
or a name of the table. The command needs no GPU and no vLLM. For each size that does not start it names the flag to
change, and its exit status is then 1.

| column | is |
|---|---|
| weights | of one GPU, by the index: 1 to 3 % more than vLLM loads where drafts and images are in it |
| cache | what `--gpu-memory-utilization` allows, less weights, activations and CUDA graphs |
| block | tokens of a block, as vLLM's log says ("Setting attention block size to") |
| blocks | the most sequences that `--max-num-seqs` may name |
| longest | tokens of the longest request |
| at once | requests of `--max-model-len` that the cache holds: vLLM's "Maximum concurrency" |

**How good it is.** Block size, bytes of a block, number of blocks and concurrency are to the digit those of published
start-up logs, and of starts of ours on an H100 with vLLM 0.33.0: the tiny model, and the text part of Qwen3.6-35B-A3B
in bfloat16 with made-up weights, which vLLM refused (`tests/deploy/test_memory.py`, `tests/deploy/data/`). Weights,
activations and CUDA graphs are upper estimates, held to the same logs: 0.3 to 2 GiB more than was taken. *Limits:*
the estimate does not know draft models, LoRA adapters, FP4 weights, pipeline and context parallelism; what CUDA
graphs and kernels take varies by version and GPU, which the {margin:.0%} are for.

## Parsers

A node without `--tool-call-parser` refuses tool calls, and without `--reasoning-parser` leaves reasoning in the
answer. Each model family has its own: `TOOL_PARSER` and `REASONING_PARSER` in `.env`, `model.toolParser` and
`model.reasoningParser` of the chart.

| model | `--tool-call-parser` | `--reasoning-parser` |
|---|---|---|
{parsers}
"""


def largest(model: Model, gib: float, tp: int) -> str:
    """A cell: the most sequences with which a node starts, long requests at a time, the longest context."""
    for most in SEQUENCES:
        try:
            found = with_room(model, gib, Flags(tp=tp, max_num_seqs=most, max_model_len=LONG, gpu_memory=GPU_MEMORY))
        except UnknownModelError:
            return "no"
        if not found.refusals():
            text = {**model.config, **model.config.get("text_config", {})}
            longest = min(found.longest, text["max_position_embeddings"])
            return f"{most:,} · {found.at_once:.0f} · {_short(longest)}"
    return "no"


def _short(tokens: int) -> str:
    return f"{tokens // 1024}k"


def _table(models: Mapping[str, Model], gpu: int) -> str:
    rows = [f"| on {gpu} GB | {' | '.join(f'TP {tp}' for tp in SIZES)} |", f"|---|{'---|' * len(SIZES)}"]
    for name, model in models.items():
        cells = " | ".join(largest(model, gpu_gib(gpu), tp) for tp in SIZES)
        rows.append(f"| {name} | {cells} |")
    return "\n".join(rows) + "\n"


def page(listed: Mapping[str, Mapping[str, Any]]) -> str:
    """The page, of these models."""
    models = {name: Model(each["config"], each["bytes"]) for name, each in listed.items()}
    parsers = "\n".join(
        f"| {name} | {each['tool_parser']} | {each['reasoning_parser'] or 'none'} |" for name, each in listed.items()
    )
    tables = "\n".join(_table(models, gpu) for gpu in GPUS)
    tried = f"{', '.join(f'{most:,}' for most in SEQUENCES[:-1])} and {SEQUENCES[-1]}"
    return PAGE.format(gpu_memory=GPU_MEMORY, margin=MARGIN, long=LONG, sequences=tried, tables=tables, parsers=parsers)
