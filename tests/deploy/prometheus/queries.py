"""Series that a PromQL query reads, found by regular expressions: the tests need no more of the language."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

_SELECTOR = re.compile(r"(?<![\w:$])((?:pdproxy_|gen_ai_|vllm:)\w+|up(?=\{))(?:\{([^}]*)\})?")
_VARIABLES = re.compile(r'(?<==~)"\$(?!__)\w+"')
_MATCHER = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"')
_GROUPING = re.compile(r"\bby\s*\(([^)]*)\)")


@dataclass(frozen=True, slots=True)
class Matcher:
    """One condition on a label; a label that a series lacks counts as the empty string."""

    label: str
    operator: str
    value: str

    def matches(self, labels: Mapping[str, str]) -> bool:
        """Whether a series with these labels meets it."""
        actual = labels.get(self.label, "")
        same = re.fullmatch(self.value, actual) is not None if "~" in self.operator else actual == self.value
        return same is not self.operator.startswith("!")


@dataclass(frozen=True, slots=True)
class Selector:
    """The series that one term of a query reads."""

    metric: str
    matchers: tuple[Matcher, ...]

    def of(self, samples: Iterable[Sample]) -> list[Sample]:
        """The samples that it selects."""
        return [
            sample
            for sample in samples
            if sample.name == self.metric and all(matcher.matches(sample.labels) for matcher in self.matchers)
        ]


def selectors(query: str) -> list[Selector]:
    """Every selector of one of our metrics, of vLLM's, or of ``up`` in a query."""
    return [
        Selector(metric, tuple(Matcher(*found) for found in _MATCHER.findall(matchers)))
        for metric, matchers in _SELECTOR.findall(query)
    ]


def with_all_chosen(query: str) -> str:
    """A panel's query as Grafana sends it while every variable stands for all, over an hour."""
    return _VARIABLES.sub('".*"', query).replace("$__rate_interval", "1h")


def grouping(query: str) -> set[str]:
    """The labels that a query groups by."""
    return {label.strip() for labels in _GROUPING.findall(query) for label in labels.split(",")}


def legend_labels(legend: str) -> set[str]:
    """The labels that a panel's legend shows."""
    return set(re.findall(r"\{\{(\w+)\}\}", legend))


def samples_of(page: str) -> list[Sample]:
    """The samples of a `/metrics` page."""
    return [sample for family in text_string_to_metric_families(page) for sample in family.samples]
