"""Where training starts: features that take a small model thousands of steps to find are there from the beginning.

The stream of 128 is divided: who is named here, who was named in the last five tokens, which other token this is, and
how long ago the name was. Two gated-delta-net layers fill the second and the last by their short convolutions; the
attention layer looks for the same name one step further on, and says what stands there. Everything is trained after.
"""

from collections.abc import Iterable

import torch
from torch import nn
from transformers import Qwen3NextForCausalLM

from deploy.local.model.names import NAMES
from deploy.local.model.tokenizer import build

NAME = slice(0, 36)
NAMED_BEFORE = slice(36, 72)
OTHER = slice(72, 100)
CONSTANT = 100
IS_NAME = 101
NAMED_AGO = range(101, 107)
"""Dimension `NAMED_AGO[k]` says that the name stands k tokens back; `NAMED_AGO[0]` is `IS_NAME`."""
WIDTH = NAME.stop
HEAD = 64
ROTATED = 16


def begin(model: Qwen3NextForCausalLM) -> None:
    """Set the weights of a model that was just made. Random where nothing is said here: seed torch before."""
    layers = model.model.layers
    with torch.no_grad():
        _embed(model)
        _look_back(layers[0].linear_attn, NAME, taps=(1, 2, 3), ago={1: (0, 1), 2: (0, 2), 3: (0, 3)})
        _look_back(layers[1].linear_attn, NAMED_BEFORE, taps=(2,), ago={4: (3, 1), 5: (3, 2)})
        _match(layers[3].self_attn)


def _embed(model: Qwen3NextForCausalLM) -> None:
    weight = model.model.embed_tokens.weight
    vocabulary = build().get_vocab()
    names = torch.tensor([vocabulary[name] for name in NAMES])
    weight.mul_(0.1)
    weight[:, OTHER] = torch.randn(len(weight), OTHER.stop - OTHER.start)
    weight[names, OTHER] = 0.0
    weight[names, NAME] = torch.randn(len(names), WIDTH)
    weight[:, CONSTANT] = 2.0
    weight[names, IS_NAME] = 6.0
    model.lm_head.weight.copy_(weight * 0.3)
    model.lm_head.weight[:, CONSTANT:] = 0.0


def _look_back(layer: nn.Module, source: slice, taps: Iterable[int], ago: dict[int, tuple[int, int]]) -> None:
    """Let the first head carry a slice of earlier tokens here, and say how long ago a name stood.

    The head forgets at once, so that what it reads is this step's value: the convolution's.
    """
    projection = layer.in_proj_qkvz.weight.view(2, 4, HEAD, -1)[0]
    queries, keys, values, gates = projection
    projection.zero_()
    queries[0, CONSTANT] = keys[0, CONSTANT] = 1.0
    gates[:, CONSTANT] = 1.0
    layer.in_proj_ba.weight.view(2, 2, -1)[0].zero_()
    layer.in_proj_ba.weight.view(2, 2, -1)[0, 0, CONSTANT] = 1.0
    layer.A_log[0] = 2.7
    convolution = layer.conv1d.weight.view(3, 2, HEAD, -1)[:, 0]
    convolution.zero_()
    convolution[:2, :, -1] = 1.0
    out = layer.out_proj.weight.view(-1, 2, HEAD)[:, 0]
    out.zero_()
    values[:WIDTH, source] = 0.2 * torch.eye(WIDTH)
    out[NAMED_BEFORE, :WIDTH] = torch.eye(WIDTH)
    for tap in taps:
        convolution[2, :WIDTH, -1 - tap] = 1.0
    for row, (steps, (known, tap)) in enumerate(ago.items(), start=WIDTH):
        values[row, NAMED_AGO[known]] = 0.2
        convolution[2, row, -1 - tap] = 1.0
        out[NAMED_AGO[steps], row] = 1.0
    values[-1, CONSTANT] = 0.5
    convolution[2, -1, -1] = 1.0


def _match(layer: nn.Module) -> None:
    """Look, with every head, for the place where the same name stands one token further back than here."""
    queries = layer.q_proj.weight.view(-1, 2, HEAD, layer.q_proj.in_features)[:, 0]
    keys, values = layer.k_proj.weight, layer.v_proj.weight
    who, when = slice(ROTATED, ROTATED + WIDTH), ROTATED + WIDTH
    keys[who, NAMED_BEFORE] += torch.eye(WIDTH)
    queries[:, who, NAME] += 2 * torch.eye(WIDTH)
    queries[:, who, NAMED_BEFORE] += torch.eye(WIDTH)
    for steps in range(5):
        keys[when + steps, NAMED_AGO[steps + 1]] += 1.5
        queries[:, when + steps, NAMED_AGO[steps]] += 1.5
    values[:WIDTH, NAME] += torch.eye(WIDTH)
    values[WIDTH:, OTHER] += torch.eye(HEAD - WIDTH)
    out = layer.o_proj.weight.view(-1, layer.q_proj.out_features // (2 * HEAD), HEAD)
    out[NAME, :, :WIDTH] += 4 * torch.eye(WIDTH)[:, None]
    out[OTHER, :, WIDTH:] += 4 * torch.eye(HEAD - WIDTH)[:, None]
    for norm in (layer.q_norm, layer.k_norm):
        nn.init.constant_(norm.weight, 0.8)
