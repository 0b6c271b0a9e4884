"""Where training starts: features that so small a model takes thousands of steps to find are there from the beginning.

The stream of 128 is divided: the name here, the last name, the last name as of one token ago, any other token, flags.
A name is two syllables. The first layer's state remembers the last first syllable, the second layer's the last second
syllable, the third layer's the kind of question; the short convolutions carry what was known one token ago, and how far
back a number began. So every layer's state is needed for an answer, and a lost one shows. The attention layer looks for
the place where the same name was the last one and the line was one token further on, and says what stands there.
All weights are trained after this.
"""

from collections.abc import Iterable
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import Qwen3NextForCausalLM

from deploy.local.model.tokenizer import build
from deploy.local.model.vocabulary import ASK, BEGINNINGS, CUE, ENDINGS, RECITE

SYLLABLE = 15
OTHER = range(90, 114)
CONSTANT, IS_NAME, IS_START, IS_ASK, IS_RECITE, ASKED, RECITED = range(114, 121)
NUMBER_AGO = range(121, 126)
"""Flag `NUMBER_AGO[k]`: a number began k tokens back."""
HEAD = 64
ROTATED = 16


class Wire(NamedTuple):
    """Carry one dimension of the stream to another, from `tap` tokens back (at most 3)."""

    source: int
    target: int
    tap: int


def begin(model: Qwen3NextForCausalLM) -> None:
    """Set the weights of a model that was just made. Random where nothing is said here: seed torch before."""
    first, second, third, attention = model.model.layers
    with torch.no_grad():
        _embed(model)
        _remember(first.linear_attn, _wires(_name(0), _last(0)), (IS_NAME,))
        _carry(first.linear_attn, [Wire(NUMBER_AGO[0], NUMBER_AGO[tap], tap) for tap in (1, 2, 3)])
        _remember(second.linear_attn, _wires(_name(1), _last(1)), (IS_NAME,))
        _carry(second.linear_attn, [*_wires(_last(0), _before(0), 1), Wire(NUMBER_AGO[3], NUMBER_AGO[4], 1)])
        _remember(third.linear_attn, [Wire(IS_ASK, ASKED, 0), Wire(IS_RECITE, RECITED, 0)], (IS_ASK, IS_RECITE))
        _carry(third.linear_attn, _wires(_last(1), _before(1), 1))
        _match(attention.self_attn)


def _name(syllable: int) -> range:
    return range(SYLLABLE * syllable, SYLLABLE * (syllable + 1))


def _last(syllable: int) -> range:
    return range(30 + SYLLABLE * syllable, 30 + SYLLABLE * (syllable + 1))


def _before(syllable: int) -> range:
    return range(60 + SYLLABLE * syllable, 60 + SYLLABLE * (syllable + 1))


def _wires(source: range, target: range, tap: int = 0) -> list[Wire]:
    return [Wire(one, other, tap) for one, other in zip(source, target, strict=True)]


def _embed(model: Qwen3NextForCausalLM) -> None:
    weight = model.model.embed_tokens.weight
    vocabulary = build().get_vocab()
    weight.mul_(0.1)
    weight[:, list(OTHER)] = torch.randn(len(weight), len(OTHER))
    weight[:, CONSTANT] = 2.0
    codes = torch.randn(2, max(len(BEGINNINGS), len(ENDINGS)), SYLLABLE)
    for (i, beginning), (j, ending) in product(enumerate(BEGINNINGS), enumerate(ENDINGS)):
        row = weight[vocabulary[beginning + ending]]
        row[list(OTHER)] = 0.0
        row[: 2 * SYLLABLE] = torch.cat([codes[0, i], codes[1, j]])
        row[IS_NAME] = row[IS_START] = 6.0
    weight[vocabulary[f"Ġ{CUE.strip()}"], IS_START] = 6.0
    weight[vocabulary[ASK], IS_ASK] = weight[vocabulary[RECITE], IS_RECITE] = 6.0
    weight[[vocabulary[f"Ġ{digit}"] for digit in range(10)], NUMBER_AGO[0]] = 6.0
    model.lm_head.weight.copy_(weight * 0.3)
    model.lm_head.weight[:, CONSTANT:] = 0.0
    model.lm_head.weight[:, : 2 * SYLLABLE] *= 2.0


def _remember(layer: nn.Module, wires: Iterable[Wire], when: Iterable[int]) -> None:
    """Let the first head's state hold what stood at the last token with one of these flags, and forget nothing."""
    write = _wire(layer, 0, wires)
    write[CONSTANT] = -5.0
    write[list(when)] = 4.0
    layer.A_log[0] = -10.0


def _carry(layer: nn.Module, wires: Iterable[Wire]) -> None:
    """Let the second head bring what its convolution sees, and forget it at once."""
    write = _wire(layer, 1, wires)
    write[CONSTANT] = 3.0
    layer.A_log[1] = 2.7


def _wire(layer: nn.Module, head: int, wires: Iterable[Wire]) -> Tensor:
    """Set a head to read and write along the wires, with one fixed key; the weights of its write strength come back."""
    projection = layer.in_proj_qkvz.weight.view(2, 4, HEAD, -1)[head]
    convolution = layer.conv1d.weight.view(3, 2, HEAD, -1)[:, head]
    out = layer.out_proj.weight.view(-1, 2, HEAD)[:, head]
    strength = layer.in_proj_ba.weight.view(2, 2, -1)[head]
    for weight in (projection, convolution, out, strength):
        weight.zero_()
    queries, keys, values, gates = projection
    queries[0, CONSTANT] = keys[0, CONSTANT] = 1.0
    gates[:, CONSTANT] = 1.0
    convolution[:2, :, -1] = 1.0
    for row, wire in enumerate(wires):
        values[row, wire.source] = 0.2
        convolution[2, row, -1 - wire.tap] = 1.0
        out[wire.target, row] = 0.3 if wire.target >= CONSTANT else 1.0
    values[-1, CONSTANT] = 0.5
    convolution[2, -1, -1] = 1.0
    return strength[0]


def _match(layer: nn.Module) -> None:
    """Let every head look for the last name here where it was the last name before, one token further in the line."""
    width, out_width = 2 * SYLLABLE, 2 * SYLLABLE + len(OTHER)
    queries = layer.q_proj.weight.view(-1, 2, HEAD, layer.q_proj.in_features)[:, 0]
    keys, values = layer.k_proj.weight, layer.v_proj.weight
    who, when = slice(ROTATED, ROTATED + width), ROTATED + width
    keys[who, 60:90] += torch.eye(width)
    queries[:, who, 30:60] += torch.eye(width)
    for step, here in enumerate((IS_START, *NUMBER_AGO[:4])):
        keys[when + step, NUMBER_AGO[step]] += 2.5
        queries[:, when + step, here] += 2.5
    said = [*range(width), *OTHER]
    values[:out_width, said] += torch.eye(out_width)
    out = layer.o_proj.weight.view(-1, layer.q_proj.out_features // (2 * HEAD), HEAD)
    out[said, :, :out_width] += 4 * torch.eye(out_width)[:, None]
    for norm in (layer.q_norm, layer.k_norm):
        nn.init.constant_(norm.weight, 1.0)
