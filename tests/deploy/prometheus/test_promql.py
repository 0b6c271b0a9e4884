"""The evaluator gives what Prometheus gives."""

import math
from pathlib import Path

import pytest

from tests.deploy.prometheus.evaluate import evaluate
from tests.deploy.prometheus.promtool import NO_PROMTOOL, promtool
from tests.deploy.prometheus.rule_tests import Case, cases, values_of
from tests.deploy.prometheus.storage import Storage
from tests.deploy.prometheus.syntax import parse, seconds
from tests.deploy.prometheus.tree import Unsupported

TOLD = Path(__file__).parent / "promql_test.yml"


@pytest.mark.parametrize("case", cases(TOLD), ids=lambda case: case.name)
def test_queries_are_worth_what_they_should(case: Case) -> None:
    case.check()


@pytest.mark.skipif(NO_PROMTOOL, reason="there is no promtool on this machine")
def test_prometheus_thinks_so_too() -> None:
    promtool("test", "rules", str(TOLD))


def test_a_histogram_that_saw_nothing_has_no_quantile() -> None:
    storage = Storage()
    storage.scraped('# TYPE took histogram\ntook_bucket{le="1"} 0\ntook_bucket{le="+Inf"} 0\n', 0.0)
    [value] = evaluate("histogram_quantile(0.5, took_bucket)", storage, 10.0).values()
    assert math.isnan(value)


def test_a_page_is_read_with_its_labels() -> None:
    storage = Storage()
    storage.scraped('# TYPE asked counter\nasked_total{by="me"} 3.0\n# TYPE on gauge\non 1.0\n', 60.0)
    assert evaluate('asked_total{by="me"} or on', storage, 61.0) == {
        frozenset({("__name__", "asked_total"), ("by", "me")}): 3.0,
        frozenset({("__name__", "on")}): 1.0,
    }
    assert evaluate("on", storage, 59.0) == {}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "up[5m]",
        "sum(up",
        "up up",
        "up offset 5m",
        "avg(up)",
        "rate(up)",
        "1 + 1",
        "sum(1)",
        "up{a='b'}",
        "2 > up",
        "topk(3, up)",
    ],
)
def test_what_it_does_not_know_it_refuses(text: str) -> None:
    with pytest.raises(Unsupported):
        evaluate(text, Storage(), 0.0)


def test_durations_and_values_are_promtools() -> None:
    assert seconds("1h30m5s") == 5405.0
    assert list(values_of("1x2 _ 0+2x2 _x2 5")) == [1, 1, 1, None, 0, 2, 4, None, None, 5]
    assert parse("a - b - c") != parse("a - (b - c)")
    for wrong in (lambda: seconds("5"), lambda: list(values_of("1y2"))):
        with pytest.raises(Unsupported):
            wrong()
