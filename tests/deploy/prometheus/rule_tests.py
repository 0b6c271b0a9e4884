"""Runs test files in the format of ``promtool test rules``: series, and what queries then give."""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.deploy.prometheus.evaluate import evaluate
from tests.deploy.prometheus.rules import Rule, run
from tests.deploy.prometheus.storage import NAME, Labels, Storage
from tests.deploy.prometheus.syntax import parse, seconds
from tests.deploy.prometheus.tree import Selector, Unsupported

_RUN = re.compile(r"(?P<first>_|-?\d+(?:\.\d+)?)(?P<step>[+-]\d+(?:\.\d+)?)?(?:x(?P<times>\d+))?")


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """One test of a file."""

    name: str
    rules: tuple[Mapping[str, Any], ...]
    every: float
    test: Mapping[str, Any]

    def metrics(self) -> set[str]:
        """The names of the series that it feeds."""
        return {re.split(r"[{ ]", each["series"])[0] for each in self.test["input_series"]}

    def expected(self) -> list[Labels]:
        """The labels of everything that its queries shall give."""
        asked = self.test["promql_expr_test"]
        return [labels_of(sample["labels"]) for each in asked for sample in each.get("exp_samples", [])]

    def check(self) -> None:
        """Run it; every query must give exactly what is expected."""
        for each in self.test["promql_expr_test"]:
            at = seconds(each["eval_time"])
            storage = self._fed()
            run(map(Rule.of, self.rules), storage, _moments(self.every, at))
            got = dict(evaluate(each["expr"], storage, at))
            want = {labels_of(sample["labels"]): float(sample["value"]) for sample in each.get("exp_samples", [])}
            assert got.keys() == want.keys(), f"{self.name}: {each['expr']}: {sorted(map(sorted, got))}"
            for labels, value in want.items():
                assert math.isclose(got[labels], value, rel_tol=1e-9), f"{self.name}: {each['expr']}: {got[labels]}"

    def _fed(self) -> Storage:
        storage, interval = Storage(), seconds(self.test["interval"])
        for series in self.test["input_series"]:
            labels = labels_of(series["series"])
            for number, value in enumerate(values_of(series["values"])):
                if value is not None:
                    storage.add(labels, number * interval, value)
        return storage


def cases(path: Path) -> list[Case]:
    """The tests of a file."""
    told = yaml.safe_load(path.read_text())
    files = [yaml.safe_load((path.parent / name).read_text()) for name in told.get("rule_files", [])]
    rules = tuple(rule for file in files for group in file["groups"] for rule in group["rules"])
    return [Case(test["name"], rules, seconds(told["evaluation_interval"]), test) for test in told["tests"]]


def labels_of(text: str) -> Labels:
    """The labels of a series as it is written down; ``{}`` has none.

    Raises:
        Unsupported: it is no series.
    """
    tree = parse(text if text[0] != "{" else f"nameless{text}")
    if not isinstance(tree, Selector) or any(each.sign != "=" for each in tree.matchers):
        raise Unsupported(f"no series: {text}")
    named = {} if text[0] == "{" else {NAME: tree.name}
    return frozenset({**named, **{each.label: each.value for each in tree.matchers}}.items())


def values_of(text: str) -> Iterator[float | None]:
    """Promtool's notation: ``0+2x3`` is 0 2 4 6, ``5x2`` is 5 5 5, ``_x2`` is two that are missing."""
    for part in text.split():
        found = _RUN.fullmatch(part)
        if found is None:
            raise Unsupported(f"no values: {part}")
        times = int(found["times"] or 0)
        if found["first"] == "_":
            yield from [None] * max(1, times)
        else:
            yield from (float(found["first"]) + float(found["step"] or 0) * number for number in range(times + 1))


def _moments(every: float, end: float) -> Iterator[float]:
    return (number * every for number in range(int(end // every) + 1))
