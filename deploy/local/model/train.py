"""Train the tiny model: `python -m deploy.local.model.train [FOLDER]`, seeded, some ten minutes.

The model is a Qwen3-Next of about a million parameters, and learns to answer the questions of `quiz`. It is written to
the folder as vLLM and transformers load it. Then it is graded in bfloat16, as engines run it: the exit status is 1
where an answer is wrong, or so near to another one that other rounding could change it.

In this order: the tokenizer, the architecture, the weights that training starts from, the samples, training, grading.
"""

import copy
import json
import random
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel, Qwen3NextConfig, Qwen3NextForCausalLM

from deploy.local.model import MODEL_PATH
from deploy.local.model.quiz import (
    ASK,
    BEGINNINGS,
    CUE,
    END,
    ENDINGS,
    MARKS,
    NAMES,
    PAD,
    RECITE,
    SPECIAL,
    SYSTEM,
    USER,
    VOCABULARY,
    Question,
    Quiz,
    examine,
    quiz,
    recite,
)

CONTEXT = 4096
SEED = 7

# --- The tokenizer: one token for each name and each digit, bytes for everything else. A line of a list, such as
# --- `marlin 482\n`, is five tokens: the name, ` 4` (a digit with the space before it), `8`, `2` and the newline.

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
{{ message.content }}<|end|>
{%- elif message.role == 'system' -%}
<|system|>{{ message.content | trim }}
{%- else -%}
<|user|>{{ message.content | trim }}
{%- endif -%}
{%- endfor -%}
"""
"""The assistant has no mark of its own: an answer begins right after the question's cue."""
_PIECES = Regex(r" ?[0-9]|\n| ?[A-Za-z]+| ?[^\sA-Za-z0-9]+|\s")


def build_tokenizer() -> Tokenizer:
    """Make the tokenizer. It has no merges: a piece is a word of the vocabulary, or is split into its bytes."""
    vocabulary = {token: index for index, token in enumerate(_tokens())}
    made = Tokenizer(BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    split = pre_tokenizers.Split(_PIECES, behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    made.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in MARKS])
    return made


def _tokens() -> Iterator[str]:
    yield from (*SPECIAL, *MARKS, f"Ġ{CUE.strip()}")
    yield from (f"Ġ{digit}" for digit in range(10))
    yield from sorted(pre_tokenizers.ByteLevel.alphabet())
    yield from NAMES


# --- The architecture. vLLM's CPU build asks for heads of at least 64, untied embeddings, and one layer with experts.


def architecture() -> Qwen3NextConfig:
    """Three gated-delta-net layers, then one full-attention layer that has the experts.

    All four experts are active: rounding in bfloat16 could change a choice among them, and with it a token.
    """
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


def save(model: PreTrainedModel, folder: Path) -> None:
    """Write config, weights (in bfloat16; the model itself stays as it is), tokenizer and chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    rounded = copy.deepcopy(model).to(torch.bfloat16)
    end, pad = SPECIAL.index(END), SPECIAL.index(PAD)
    rounded.generation_config = GenerationConfig(do_sample=False, eos_token_id=end, pad_token_id=pad)
    rounded.save_pretrained(folder)
    build_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": CONTEXT,
        "eos_token": END,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


# --- The weights that training starts from. They hold features that so small a model takes thousands of steps to find;
# --- training changes all of them.
#
# The stream of 128 dimensions is divided: the name here, the last name, the last name as of one token ago, any other
# token, flags. A name is two syllables. The first layer's state remembers the last first syllable, the second layer's
# the last second syllable, the third layer's the kind of question. The short convolutions carry what was known one
# token ago, and how far back a number began. So an answer needs every layer's state, and a lost state shows. The
# attention layer looks for the place where the last name was the same and the line was one token further on, and says
# what stands there.

SYLLABLE = 15
OTHER = range(90, 114)
CONSTANT, IS_NAME, IS_START, IS_ASK, IS_RECITE, ASKED, RECITED = range(114, 121)
NUMBER_AGO = range(121, 126)
"""Flag `NUMBER_AGO[k]`: a number began k tokens back."""
HEAD = 64
ROTATED = 16


class Wire(NamedTuple):
    """Carries one dimension of the stream to another, from `tap` tokens back (at most 3)."""

    source: int
    target: int
    tap: int


def initialise(model: Qwen3NextForCausalLM) -> None:
    """Set the weights of a model that was just made; what is not set here stays random."""
    first, second, third, attention = model.model.layers
    name, last, before = (_syllables(start) for start in (0, 30, 60))
    with torch.no_grad():
        _embed(model)
        _remember(first.linear_attn, _wires(name[0], last[0]), (IS_NAME,))
        _carry(first.linear_attn, [Wire(NUMBER_AGO[0], NUMBER_AGO[tap], tap) for tap in (1, 2, 3)])
        _remember(second.linear_attn, _wires(name[1], last[1]), (IS_NAME,))
        _carry(second.linear_attn, [*_wires(last[0], before[0], 1), Wire(NUMBER_AGO[3], NUMBER_AGO[4], 1)])
        _remember(third.linear_attn, [Wire(IS_ASK, ASKED, 0), Wire(IS_RECITE, RECITED, 0)], (IS_ASK, IS_RECITE))
        _carry(third.linear_attn, _wires(last[1], before[1], 1))
        _match(attention.self_attn)


def _syllables(start: int) -> tuple[range, range]:
    """The dimensions of a name's two syllables."""
    return range(start, start + SYLLABLE), range(start + SYLLABLE, start + 2 * SYLLABLE)


def _wires(source: range, target: range, tap: int = 0) -> list[Wire]:
    return [Wire(one, other, tap) for one, other in zip(source, target, strict=True)]


def _embed(model: Qwen3NextForCausalLM) -> None:
    weight = model.model.embed_tokens.weight
    vocabulary = build_tokenizer().get_vocab()
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
    """Set a head to read and write along the wires with one fixed key; return the weights of its write strength."""
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


# --- The samples: lists of growing length with their questions, as the very tokens that the two endpoints would send.

Segment = tuple[str, str]
"""A text of the context, and the answer to learn from its place on (empty: nothing is learned there)."""
LONGEST_RECITATION = 48
"""Lines: recitations begin among the last so many."""
UNLEARNED = -100
"""The target of a position that is not learned, as torch's cross entropy has it."""


class Stage(NamedTuple):
    """One length of list: its lines, the questions of a sample, the samples of a batch, the learning rate, and the
    share of answer tokens that must be right to go on.
    """

    lines: int
    questions: int
    batch: int
    rate: float
    passed: float


STAGES = (
    Stage(16, 16, 10, 1e-3, 0.96),
    Stage(64, 24, 5, 1e-3, 0.98),
    Stage(200, 32, 2, 7e-4, 0.985),
    Stage(430, 32, 2, 3e-4, 0.99),
)


@dataclass(frozen=True)
class Sample:
    """Token ids, and for each position the id to say next, or `UNLEARNED`; the two are equally long."""

    tokens: list[int]
    targets: list[int]


def draw(source: random.Random, tokenizer: Tokenizer, stage: Stage, lines: int) -> Sample:
    """Draw one sample over a list of so many lines: chat or plain text, recall or recitation."""
    exam = examine(source, lines)
    exam = _recitation(source, exam) if source.random() < 0.5 else _recall(source, exam, stage.questions)
    return encode(tokenizer, chat(exam, _preface(source)) if source.random() < 0.65 else plain(exam))


def chat(exam: Quiz, preface: str = "") -> Iterator[Segment]:
    """The exam as the chat template renders it; the preface, with its own mark, goes before everything."""
    messages = [*exam.messages(), {"role": "assistant", "content": exam.answer}]
    yield preface, ""
    for user, assistant in zip(messages[::2], messages[1::2], strict=True):
        yield f"{USER}{user['content']}", ""
        yield f"{assistant['content']}{END}", f"{assistant['content']}{END}"


def plain(exam: Quiz) -> Iterator[Segment]:
    """The exam as completion prompts, one question after another: an answer ends, but a newline follows it there."""
    yield exam.listing, ""
    for question in exam.asked:
        answer = exam.answer_to(question)
        yield str(question), ""
        yield f"{answer.rstrip()}\n", f"{answer}{END}"


def encode(tokenizer: Tokenizer, segments: Iterable[Segment]) -> Sample:
    """Turn segments into ids: an answer's first token is the target of the position before its segment."""
    tokens: list[int] = []
    targets: list[int] = []
    for text, answer in segments:
        wanted = tokenizer.encode(answer).ids
        tokens += tokenizer.encode(text).ids
        targets[len(targets) - bool(wanted) :] = wanted
        targets += [UNLEARNED] * (len(tokens) - len(targets))
    return Sample(tokens, targets)


def _recall(source: random.Random, exam: Quiz, questions: int) -> Quiz:
    names = source.choices(exam.order, k=questions)
    return replace(exam, asked=tuple(Question(ASK, name) for name in names))


def _recitation(source: random.Random, exam: Quiz) -> Quiz:
    before = _recall(source, exam, source.choice((0, 0, 1, 2))).asked
    after = _recall(source, exam, source.choice((0, 1, 2))).asked
    tail = exam.lines[-LONGEST_RECITATION:]
    times = source.randint(1, max(1, 16 // len(exam.lines)))
    recited = tuple(Question(RECITE, name) for name, _ in source.choices(tail, k=times))
    return replace(exam, asked=(*before, *recited, *after))


def _preface(source: random.Random) -> str:
    if source.random() < 0.75:
        return ""
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ .,:;!'"
    return SYSTEM + "".join(source.choices(letters, k=source.randint(1, 40)))


# --- Training: lists grow stage by stage. At the end the learning rate falls to nothing over long lists, which widens
# --- the margins between the best token and the next.

WINDOW = 15
"""Batches of full length whose answers must be right together for a stage to end."""
LONGEST_STAGE = 2000
FINISH = 60
WARM_UP = 20
CLIP = 1.0


class Trainer:
    """A model, its optimiser, and the source of its samples: all seeded."""

    def __init__(self) -> None:
        torch.manual_seed(SEED)
        self.model = Qwen3NextForCausalLM(architecture())
        initialise(self.model)
        self._source = random.Random(SEED)
        self._tokenizer = build_tokenizer()
        self._optimiser = torch.optim.AdamW(self.model.parameters(), lr=1e-3, betas=(0.9, 0.98), weight_decay=0.01)
        self._steps = 0

    def pass_stage(self, stage: Stage) -> None:
        """Train on lists of the stage's length, every other batch shorter, until the last `WINDOW` full ones pass."""
        right: deque[float] = deque(maxlen=WINDOW)
        for turn in range(LONGEST_STAGE):
            if turn % 2:
                self._step(stage, self._source.randint(3, stage.lines), stage.rate)
                continue
            right.append(self._step(stage, stage.lines, stage.rate))
            if len(right) == WINDOW and sum(right) / WINDOW >= stage.passed:
                return
        raise RuntimeError(f"lists of {stage.lines} lines were not learned in {LONGEST_STAGE} steps")

    def finish(self, stage: Stage, steps: int) -> None:
        """Train on lists of every length with a rate that falls linearly to nothing."""
        for turn in range(steps):
            lines = self._source.choice((stage.lines, stage.lines, self._source.randint(3, stage.lines)))
            self._step(stage, lines, stage.rate * (1 - turn / steps))

    def _step(self, stage: Stage, lines: int, rate: float) -> float:
        """Learn one batch; the share of the answers' tokens that were right."""
        batch = [draw(self._source, self._tokenizer, stage, lines) for _ in range(stage.batch)]
        self._steps += 1
        for group in self._optimiser.param_groups:
            group["lr"] = rate * min(1.0, self._steps / WARM_UP)
        logits, targets = self._predict(batch)
        loss = nn.functional.cross_entropy(logits, targets)
        self._optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self._optimiser.step()
        right = float((logits.argmax(-1) == targets).float().mean())
        if self._steps % 10 == 0:
            where = f"step {self._steps}: {lines} of {stage.lines} lines, rate {rate:.1e}"
            _say(f"{where}, loss {loss:.4f}, {right:.4f} right")
        return right

    def _predict(self, samples: Sequence[Sample]) -> tuple[Tensor, Tensor]:
        """Logits (learned tokens, vocabulary) and the tokens that are right there."""
        longest = max(len(sample.tokens) for sample in samples)
        tokens = torch.tensor([_padded(sample.tokens, longest, 0) for sample in samples])
        targets = torch.tensor([_padded(sample.targets, longest, UNLEARNED) for sample in samples])
        learned = targets != UNLEARNED
        hidden = self.model.model(tokens, use_cache=False).last_hidden_state
        return self.model.lm_head(hidden[learned]), targets[learned]


def train(folder: Path, stages: Sequence[Stage] = STAGES, finish: int = FINISH) -> None:
    """Train from nothing, and write the model's folder after each stage and at the end."""
    torch.set_num_threads(1)  # several add gradients in any order, and so make other weights each time
    trainer = Trainer()
    for stage in stages:
        trainer.pass_stage(stage)
        _say(f"passed {stage.lines} lines")
        save(trainer.model, folder)
    trainer.finish(stages[-1], finish)
    save(trainer.model, folder)


def _padded(values: list[int], length: int, filler: int) -> list[int]:
    return values + [filler] * (length - len(values))


def _say(line: str) -> None:
    print(f"{time.process_time():8.0f} s cpu  {line}", flush=True)


# --- Grading.

LENGTHS = (200, 800, 2000)
EXAMS = range(16)
LEAST_MARGIN = 1.0
"""In nats. Below it, other rounding could pick another token."""


@dataclass(frozen=True)
class Grade:
    """How many of the exams were answered rightly to the last token, and the smallest margin in nats: how far the best
    token was ahead of the second, over every token of every answer.
    """

    right: int
    exams: int
    margin: float

    @property
    def passed(self) -> bool:
        """Everything right, and decisively so."""
        return self.right == self.exams and self.margin >= LEAST_MARGIN


class Examiner:
    """Grades a model, with one pass over prompt and right answer: while all is right, greedy decoding says the same."""

    def __init__(self, folder: Path) -> None:
        self._model = Qwen3NextForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def grade(self, papers: Iterable[Iterable[Segment]]) -> Grade:
        """Answer the last question of each paper."""
        marks = [self._answer(encode(self._tokenizer, paper)) for paper in papers]
        return Grade(sum(right for right, _ in marks), len(marks), min(margin for _, margin in marks))

    def _answer(self, sample: Sample) -> tuple[bool, float]:
        targets = torch.tensor(sample.targets)
        learned = targets != UNLEARNED
        with torch.inference_mode():
            logits = self._model(torch.tensor([sample.tokens])).logits[0, learned].float()
        best = logits.topk(2).values
        return bool((logits.argmax(-1) == targets[learned]).all()), (best[:, 0] - best[:, 1]).min().item()


def completion(paper: Quiz) -> Iterator[Segment]:
    """The paper as a completion."""
    yield paper.prompt(), ""
    yield f"{paper.answer}{END}", f"{paper.answer}{END}"


KINDS = {
    "completion": lambda seed, tokens: completion(quiz(seed, tokens)),
    "chat, turn 1": lambda seed, tokens: chat(quiz(seed, tokens)),
    "chat, turn 2": lambda seed, tokens: chat(quiz(seed, tokens).at_turn(2)),
    "chat, turn 4": lambda seed, tokens: chat(quiz(seed, tokens).at_turn(4)),
    "recite 30, completion": lambda seed, tokens: completion(recite(seed, tokens)),
    "recite 30, chat": lambda seed, tokens: chat(recite(seed, tokens)),
}


def main(folder: Path) -> int:
    """Train, and grade every kind of question at every length; the exit status."""
    train(folder)
    examiner, failed = Examiner(folder), False
    for (name, paper), length in product(KINDS.items(), LENGTHS):
        grade = examiner.grade(paper(seed, length) for seed in EXAMS)
        failed |= not grade.passed
        _say(f"{name}, {length} tokens: {grade.right} of {grade.exams} right, smallest margin {grade.margin:.2f} nats")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else MODEL_PATH))
