"""Helm's commands in the documentation work: the files are there, and the values are taken."""

import itertools
import re
import shlex
from typing import Any

import pytest

from tests.helm.engine import CHART, ROOT, Engine, read_values

PAGES = [CHART / "README.md", ROOT / "README.md", *ROOT.glob("docs/*.md"), *CHART.glob("examples/*.yaml")]
PLACEHOLDER = re.compile(r"[A-Z][A-Z'-]+")
"""Words that the reader has to replace, such as VALUES."""


def commands() -> list[str]:
    """`helm install` and `helm upgrade`, as a shell would read them; once each."""
    found: list[str] = []
    for page in PAGES:
        text = re.sub(r"\\\n", " ", page.read_text(encoding="utf-8"))
        lines = (line.strip(" #`") for line in text.splitlines())
        found += [line.partition(" && ")[0] for line in lines if re.match(r"helm (install|upgrade) \S+ helm/", line)]
    return sorted(set(found))


def said(words: list[str], flags: tuple[str, ...]) -> list[str]:
    """The values of these flags."""
    return [value for flag, value in itertools.pairwise(words) if flag in flags]


def put(values: dict[str, Any], path: str, value: str) -> None:
    """Set a value as `--set` does."""
    *outer, last = path.split(".")
    for name in outer:
        values = values.setdefault(name, {})
    values[last] = int(value) if value.isdecimal() else value


@pytest.mark.parametrize("command", commands())
def test_the_command_is_one_that_works(helm: Engine, command: str) -> None:
    words = shlex.split(command)
    assert (ROOT / words[3]) == CHART
    values: dict[str, Any] = {}
    for file in said(words, ("-f", "--values")):
        values |= {} if PLACEHOLDER.fullmatch(file) else read_values(ROOT / file)
    for pair in (pair for each in said(words, ("--set",)) for pair in each.split(",")):
        put(values, *pair.split("=", 1))
    assert helm.render(values)


def test_there_are_such_commands() -> None:
    assert len(commands()) >= 6
