"""Reads PromQL; what the tree has no place for is refused."""

import re

from tests.deploy.prometheus.tree import Aggregation, Binary, Call, Expression, Matcher, Number, Selector, Unsupported

AGGREGATIONS = frozenset({"sum", "max", "min", "count"})
PRECEDENCE = {"or": 1, "==": 2, "!=": 2, ">": 2, "<": 2, ">=": 2, "<=": 2, "+": 3, "-": 3, "*": 4, "/": 4}
UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"(\d+)(ms|s|m|h|d)")
_TOKEN = re.compile(
    r"(?P<duration>(?:\d+(?:ms|s|m|h|d))+)\b|(?P<number>\d+(?:\.\d+)?)|(?P<name>[A-Za-z_:][\w:]*)"
    r'|(?P<string>"[^"\\]*")|(?P<sign>=~|!~|==|!=|>=|<=|[-+*/(){}\[\],=<>])'
)


def seconds(text: str) -> float:
    """A duration such as ``1m30s``.

    Raises:
        Unsupported: it is none.
    """
    if not re.fullmatch(f"(?:{_DURATION.pattern})+", text):
        raise Unsupported(f"no duration: {text!r}")
    return sum(int(count) * UNITS[unit] for count, unit in _DURATION.findall(text))


def parse(text: str) -> Expression:
    """The tree of an expression.

    Raises:
        Unsupported: it cannot be read.
    """
    parser = _Parser(text)
    tree = parser.binary(0)
    parser.end()
    return tree


class _Parser:
    """Precedence climbing over a list of tokens; all binary operators group from the left."""

    def __init__(self, text: str) -> None:
        self._tokens: list[tuple[str, str]] = []
        at = 0
        while at < len(text.rstrip()):
            space = re.compile(r"\s*").match(text, at)
            found = _TOKEN.match(text, space.end() if space else at)
            if found is None or found.lastgroup is None:
                raise Unsupported(f"cannot read {text[at:]!r}")
            self._tokens.append((found.lastgroup, found[0]))
            at = found.end()
        self._at = 0

    def binary(self, least: int) -> Expression:
        """Operators that bind as strongly as ``least`` or stronger."""
        left = self._operand()
        while (strength := PRECEDENCE.get(self._peek(), 0)) > least:
            left = Binary(self._take(), left, self.binary(strength))
        return left

    def end(self) -> None:
        """Nothing may follow."""
        if self._at < len(self._tokens):
            raise Unsupported(f"cannot go on at {self._peek()!r}")

    def _operand(self) -> Expression:
        kind, word = self._tokens[self._at] if self._at < len(self._tokens) else ("", "the end")
        self._at += 1
        if kind == "number":
            return Number(float(word))
        if word == "(":
            inner = self.binary(0)
            self._expect(")")
            return inner
        if kind != "name":
            raise Unsupported(f"an operand cannot be {word!r}")
        if word in AGGREGATIONS:
            return self._aggregation(word)
        return self._call(word) if self._peek() == "(" else self._selector(word)

    def _aggregation(self, how: str) -> Aggregation:
        by = self._by()
        [of] = self._arguments()
        return Aggregation(how, by or self._by(), of)

    def _by(self) -> tuple[str, ...]:
        if self._peek() != "by":
            return ()
        self._take()
        self._expect("(")
        words = []
        while (word := self._take()) != ")":
            if word != ",":
                words.append(word)
        return tuple(words)

    def _call(self, function: str) -> Call:
        return Call(function, tuple(self._arguments()))

    def _arguments(self) -> list[Expression]:
        self._expect("(")
        given = [self.binary(0)]
        while self._peek() == ",":
            self._take()
            given.append(self.binary(0))
        self._expect(")")
        return given

    def _selector(self, name: str) -> Selector:
        matchers: list[Matcher] = []
        if self._peek() == "{":
            self._take()
            while self._peek() != "}":
                matchers.append(Matcher(self._take(), self._take(), self._take()[1:-1]))
                if self._peek() == ",":
                    self._take()
            self._take()
        if self._peek() != "[":
            return Selector(name, tuple(matchers))
        self._take()
        window = seconds(self._take())
        self._expect("]")
        return Selector(name, tuple(matchers), window)

    def _peek(self) -> str:
        return self._tokens[self._at][1] if self._at < len(self._tokens) else ""

    def _take(self) -> str:
        if self._at >= len(self._tokens):
            raise Unsupported("it ends too early")
        self._at += 1
        return self._tokens[self._at - 1][1]

    def _expect(self, word: str) -> None:
        if (found := self._take()) != word:
            raise Unsupported(f"{found!r} where {word!r} should be")
