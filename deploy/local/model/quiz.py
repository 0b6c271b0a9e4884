"""Seeded questions with one right answer each, for the tiny model: a long list of names and numbers, then one name.

It needs neither torch nor a tokenizer: what asks nodes imports it.

A list line is `name 482\n`, five tokens. `? name =` asks for that name's number; the model answers ` 482` (with the
space) and ends. `> name =` asks it to go on from that name to the end of the list, line by line; it answers
` 482\nnext 193\n…last 777\n` and ends.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

VOCABULARY = 1024
"""Tokens that the model can say."""
PAD, END, SYSTEM, USER = SPECIAL = ("<|pad|>", "<|end|>", "<|system|>", "<|user|>")
ASK, RECITE = MARKS = ("? ", "> ")
"""The two kinds of question. Each is one token that ends in its space: the name after it is the name of the list."""
CUE = " ="
"""The end of a question. The model then knows the name from its layers' state alone, not from the last token."""
BEGINNINGS = (
    *("al", "an", "ar", "bel", "ben", "bor", "cal", "cor", "dal", "dor", "el", "far", "fen", "gar", "hal"),
    *("jar", "jor", "kel", "lan", "mar", "mel", "nor", "or", "per", "ros", "sal", "tor", "val"),
)
ENDINGS = (
    *("ba", "bert", "da", "do", "dric", "fa", "ga", "go", "ko", "len", "lia", "lo", "mi"),
    *("mo", "na", "nda", "ne", "nia", "no", "phin", "ric", "ro", "si", "ta", "vin"),
)
NAMES: tuple[str, ...] = tuple(beginning + ending for beginning in BEGINNINGS for ending in ENDINGS)
"""700 names in lower case, all different. Each is one token."""
TOKENS_PER_LINE = 5
QUESTION_TOKENS = 3
MOST_LINES = 430
"""The longest list that the model was trained on."""

Line = tuple[str, str]


@dataclass(frozen=True)
class Question:
    """One question: a mark (`? ` or `> `), a name of the list, the cue."""

    mark: str
    name: str

    def __str__(self) -> str:
        return f"{self.mark}{self.name}{CUE}"


@dataclass(frozen=True)
class Quiz:
    """A list and the questions asked about it so far: the earlier ones are answered, the last one is open."""

    lines: tuple[Line, ...]
    asked: tuple[Question, ...]
    order: tuple[str, ...]
    """Every name of the list, in the order in which `ask` and `conversation` take them."""

    @property
    def answer(self) -> str:
        """The model's answer to the open question, exactly as its tokens decode."""
        return self.answer_to(self.asked[-1])

    @property
    def listing(self) -> str:
        """The list as text, with a newline at its end."""
        return "".join(f"{name} {number}\n" for name, number in self.lines)

    def answer_to(self, question: Question) -> str:
        """The right answer to any question about this list. Raises `ValueError` for a name that it does not hold."""
        start = [name for name, _ in self.lines].index(question.name)
        if question.mark == ASK:
            return f" {self.lines[start][1]}"
        return "".join(f"{name} {number}\n" for name, number in self.lines[start:]).removeprefix(question.name)

    def prompt(self) -> str:
        """The text for `/v1/completions`: the list, earlier questions with their answers, the open question."""
        earlier = "".join(f"{question}{self.answer_to(question).rstrip()}\n" for question in self.asked[:-1])
        return f"{self.listing}{earlier}{self.asked[-1]}"

    def messages(self) -> list[dict[str, str]]:
        """The same for `/v1/chat/completions`; with one question, the user's message is the completion prompt."""
        return list(self._messages())

    def ask(self, k: int) -> "Quiz":
        """Another question over the same list: number 0 is the first; up to as many as there are lines."""
        return replace(self, asked=(Question(ASK, self.order[k]),))

    def at_turn(self, turn: int) -> "Quiz":
        """The conversation at its given turn (1 is the first): questions 0 to turn - 2 are answered, one is open."""
        return replace(self, asked=tuple(Question(ASK, name) for name in self.order[:turn]))

    def conversation(self, turn: int) -> list[dict[str, str]]:
        """The messages of the given turn (1 is the first); the right answer to it is `at_turn(turn).answer`."""
        return self.at_turn(turn).messages()

    def _messages(self) -> Iterator[dict[str, str]]:
        opening = self.listing
        for question in self.asked[:-1]:
            yield {"role": "user", "content": f"{opening}{question}"}
            yield {"role": "assistant", "content": self.answer_to(question)}
            opening = ""
        yield {"role": "user", "content": f"{opening}{self.asked[-1]}"}


def quiz(seed: int, tokens: int = 800) -> Quiz:
    """Ask for one name's number over a list sized so that the completion prompt has about (at most) `tokens` tokens.

    Raises `ValueError` when that takes fewer than 2 lines or more than `MOST_LINES`.
    """
    return examine(random.Random(seed), lines_for(tokens))


def recite(seed: int, tokens: int = 800, lines: int = 30) -> Quiz:
    """Ask for the last `lines` lines of such a list: the answer has `5 * lines - 1` tokens and then the end mark."""
    whole = quiz(seed, tokens)
    if not 1 <= lines <= len(whole.lines):
        raise ValueError(f"cannot recite {lines} lines of a list of {len(whole.lines)}")
    return replace(whole, asked=(Question(RECITE, whole.lines[-lines][0]),))


def examine(source: random.Random, lines: int) -> Quiz:
    """Draw a list of that many different names, and the order in which they are asked for."""
    names = source.sample(NAMES, lines)
    listed = tuple((name, f"{source.randrange(1000):03d}") for name in names)
    order = tuple(source.sample(names, lines))
    return Quiz(listed, (Question(ASK, order[0]),), order)


def lines_for(tokens: int) -> int:
    """How many lines fit a prompt of that many tokens, its question counted. Raises `ValueError` out of range."""
    lines = (tokens - QUESTION_TOKENS) // TOKENS_PER_LINE
    if not 2 <= lines <= MOST_LINES:
        raise ValueError(f"{tokens} tokens make a list of {lines} lines; the model knows 2 to {MOST_LINES}")
    return lines
