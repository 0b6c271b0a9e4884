"""The negative control of every transfer test: `python -m deploy.local.model.ablation [FOLDER]`.

Prefill all but the last token, then lose one thing, as a broken transfer would: one layer's state, or one block of
attention keys and values. Then decode greedily. The answer must come out wrong, else a test could not see the loss.
Prints how many answers are still right; exits 1 where more than `MOST_RIGHT` are.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import DynamicCache, Qwen3NextForCausalLM

from deploy.local.model import MODEL_PATH
from deploy.local.model.quiz import TOKENS_PER_LINE, Quiz, quiz
from deploy.local.model.vocabulary import END

SEEDS = range(8)
TOKENS = 800
BLOCK = 256
MOST_RIGHT = 6
STATE_LAYERS = (0, 1, 2)
ATTENTION_LAYER = 3

Loss = Callable[[DynamicCache, Quiz], None]


def nothing(cache: DynamicCache, paper: Quiz) -> None:
    """The positive control: every answer must be right."""


def state(layer: int) -> Loss:
    """Lose what one layer remembers and what its convolution saw."""

    def lose(cache: DynamicCache, _: Quiz) -> None:
        for kept in (*cache.layers[layer].conv_states.values(), *cache.layers[layer].recurrent_states.values()):
            kept.zero_()

    return lose


def block(cache: DynamicCache, paper: Quiz) -> None:
    """Lose the attention block that holds the line asked for."""
    line = [name for name, _ in paper.lines].index(paper.asked[-1].name)
    start = line * TOKENS_PER_LINE // BLOCK * BLOCK
    for kept in (cache.layers[ATTENTION_LAYER].keys, cache.layers[ATTENTION_LAYER].values):
        kept[:, :, start : start + BLOCK].zero_()


def answer(model: Qwen3NextForCausalLM, tokenizer: Tokenizer, paper: Quiz, lose: Loss) -> str:
    """What the model says after the loss, the end mark included where it says one."""
    prompt = tokenizer.encode(paper.prompt()).ids
    cache = DynamicCache(config=model.config)
    said: list[int] = []
    with torch.inference_mode():
        model(torch.tensor([prompt[:-1]]), past_key_values=cache)
        lose(cache, paper)
        token = prompt[-1]
        for _ in tokenizer.encode(f"{paper.answer}{END}").ids:
            token = int(model(torch.tensor([[token]]), past_key_values=cache).logits[0, -1].argmax())
            said.append(token)
    return tokenizer.decode(said, skip_special_tokens=False)


def main(folder: Path) -> int:
    """Try every loss; the exit status."""
    model = Qwen3NextForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    losses = {"nothing": nothing, **{f"state of layer {layer}": state(layer) for layer in STATE_LAYERS}, "block": block}
    seen = True
    for name, lose in losses.items():
        papers = [quiz(seed, TOKENS) for seed in SEEDS]
        right = sum(answer(model, tokenizer, paper, lose) == f"{paper.answer}{END}" for paper in papers)
        print(f"lost: {name:18} {right} of {len(papers)} still right", flush=True)
        seen &= right == len(papers) if lose is nothing else right <= MOST_RIGHT
    return 0 if seen else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else MODEL_PATH))
