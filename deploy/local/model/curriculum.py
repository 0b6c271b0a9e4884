"""What the model is trained on: exams of growing length, as the very tokens that the two endpoints would send it."""

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from tokenizers import Tokenizer

from deploy.local.model.quiz import Question, Quiz, examine
from deploy.local.model.vocabulary import ASK, END, RECITE, SYSTEM, USER

Segment = tuple[str, str]
"""Text as it stands in the context, and the answer to learn from its place on (empty: nothing is learned there)."""
LONGEST_RECITATION = 48
"""Lines: recitations begin among the last so many."""
UNLEARNED = -100
"""The target of a position that is not learned, as torch's cross entropy has it."""


@dataclass(frozen=True)
class Stage:
    """One length of list: its lines, the questions per sample, the samples per batch, the learning rate."""

    lines: int
    questions: int
    batch: int
    rate: float
    passed: float
    """The share of answer tokens that must be right to go on."""


@dataclass(frozen=True)
class Sample:
    """Token ids, and for each position the id to say next, or `UNLEARNED`; the two are equally long."""

    tokens: list[int]
    targets: list[int]


STAGES = (
    Stage(16, 16, 10, 1e-3, 0.96),
    Stage(64, 24, 5, 1e-3, 0.98),
    Stage(200, 32, 2, 7e-4, 0.985),
    Stage(430, 32, 2, 3e-4, 0.99),
)


def draw(source: random.Random, tokenizer: Tokenizer, stage: Stage, lines: int) -> Sample:
    """Draw one sample over a list of that many lines: chat or plain text, recall or recitation."""
    exam = examine(source, lines)
    exam = _recitation(source, exam) if source.random() < 0.5 else _recall(source, exam, stage.questions)
    segments = chat(exam, _preface(source)) if source.random() < 0.65 else plain(exam)
    return encode(tokenizer, segments)


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
