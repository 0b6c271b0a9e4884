"""Families are exported as prometheus_client's own metrics are, and their series come and go."""

import re
from collections.abc import Iterable
from typing import Any

import prometheus_client
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics

from pdproxy.observe import families

BOUNDS = (0.001, 0.25, 1, 3600)


def fill(of: Any, registry: CollectorRegistry) -> None:
    """Make and use metrics of all types by what both modules have in common."""
    plain, labelled = of.Counter("a_total", "Help.", registry=registry), of.Counter(
        "b_total", 'Help "quoted"\nand \\ two lines.', ["one", "two"], registry=registry
    )  # fmt: skip
    (plain if of is prometheus_client else plain.labels()).inc()
    labelled.labels("x", 'quotes " and \\ and\n').inc(2.5)
    labelled.labels("x", "y")
    labelled.labels("gone", "y").inc()
    labelled.remove("gone", "y")
    labelled.remove("never", "y")
    gauge = of.Gauge("c", "Help.", ["one"], registry=registry)
    gauge.labels("x").set(7)
    gauge.labels("x").set(9.5)
    gauge.labels("y").set_function(lambda: 12)
    of.Gauge("d", "Help.", ["one"], registry=registry)
    of.Gauge("e", "Help.", registry=registry)
    histogram = of.Histogram("f_seconds", "Help.", ["one"], buckets=BOUNDS, registry=registry)
    for seconds in (0, 0.001, 0.2, 0.25, 0.26, 3600, 1e9):
        histogram.labels("x").observe(seconds)
    of.Histogram("g_seconds", "Help.", buckets=BOUNDS, registry=registry)


def pages(of: Any) -> Iterable[str]:
    """Both formats, without the times at which series began."""
    registry = CollectorRegistry()
    fill(of, registry)
    for encode in (generate_latest, openmetrics.generate_latest):
        yield re.sub(r"^(\w+_created(?:\{.*\})?) \S+$", r"\1", encode(registry).decode(), flags=re.MULTILINE)


def test_the_page_is_the_one_that_prometheus_client_would_export() -> None:
    ours, theirs = tuple(pages(families)), tuple(pages(prometheus_client))
    assert ours == theirs
    assert all("b_created" in page and 'f_seconds_bucket{le="+Inf",one="x"}' in page for page in ours)


def test_series_that_are_begun_are_there_at_zero_and_keep_what_they_counted() -> None:
    registry = CollectorRegistry()
    counter = families.Counter("a_total", "Help.", ["one", "two"], registry=registry)
    counter.labels("x", "y").inc()
    counter.export_zeros(("x", "z"), ("y",))
    assert registry.get_sample_value("a_total", {"one": "x", "two": "y"}) == 1
    assert registry.get_sample_value("a_total", {"one": "z", "two": "y"}) == 0


@pytest.mark.parametrize("values", [(), ("x",), ("x", "y", "z")])
def test_a_series_has_all_labels_of_its_family(values: tuple[str, ...]) -> None:
    counter = families.Counter("a_total", "Help.", ["one", "two"], registry=CollectorRegistry())
    with pytest.raises(ValueError, match="has the labels"):
        counter.labels(*values)


def test_counters_only_grow() -> None:
    counter = families.Counter("a_total", "Help.", registry=CollectorRegistry())
    with pytest.raises(ValueError, match="only grow"):
        counter.labels().inc(-1)


def test_a_name_is_registered_once() -> None:
    registry = CollectorRegistry()
    families.Counter("a_total", "Help.", registry=registry)
    with pytest.raises(ValueError, match="Duplicated"):
        families.Gauge("a", "Help.", registry=registry)
