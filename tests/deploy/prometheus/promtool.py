"""Runs ``promtool``, Prometheus' own checker, on rules and on queries over recorded `/metrics` pages."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.samples import Sample

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None,
    reason="promtool is not on the PATH; it comes with Prometheus (on Debian and Ubuntu: apt install prometheus)",
)


def promtool(*arguments: str) -> None:
    """Run it, and fail with what it printed if it is not content."""
    environment = {**os.environ, "GOGC": "800"}  # a third less CPU, for some megabytes
    ran = subprocess.run(
        ["promtool", *arguments], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


@dataclass(frozen=True, slots=True)
class Recording:
    """Scraped samples, as ``input_series`` of a promtool test; ``interval`` is in seconds."""

    interval: float
    series: list[dict[str, str]]


def recorded(scrapes: Iterable[Iterable[Sample]], interval: float) -> Recording:
    """One value of each series for each scrape, and ``_`` where a series was not there."""
    values: dict[str, list[str]] = {}
    count = 0
    for samples in scrapes:
        for sample in samples:
            row = values.setdefault(_written(sample), [])
            row += ["_"] * (count - len(row)) + [repr(float(sample.value))]
        count += 1
    rows = ((series, row + ["_"] * (count - len(row))) for series, row in values.items())
    return Recording(interval, [{"series": series, "values": " ".join(row)} for series, row in rows])


def run_query_tests(path: Path, history: Recording, tests: Sequence[Mapping[str, Any]], *rules: Path) -> None:
    """Run ``promtool test rules`` with these series, rules and tests of queries.

    Args:
        path: where the test file is written; as JSON, which is YAML too.
    """
    test = {"interval": f"{history.interval:g}s", "input_series": history.series, "promql_expr_test": tests}
    file = {"rule_files": [str(each) for each in rules], "evaluation_interval": test["interval"], "tests": [test]}
    path.write_text(json.dumps(file))
    promtool("test", "rules", str(path))


def gives(expression: str, at: float, *series: str) -> dict[str, Any]:
    """A test that an expression gives exactly these series, each of value 1, so many seconds after the first scrape."""
    return {
        "expr": expression,
        "eval_time": f"{at:g}s",
        "exp_samples": [{"labels": labels, "value": 1} for labels in series],
    }


def shows_values(query: str, labels: Iterable[str], at: float) -> list[dict[str, Any]]:
    """Tests that a query gives at least one finite value, and no series without one of the labels."""
    finite = gives(f"count(abs({query}) < Inf) > bool 0", at, "{}")
    return [finite, *(_all_have(label, query, at) for label in labels)]


def _all_have(label: str, query: str, at: float) -> dict[str, Any]:
    marked = f'label_replace({query}, "lacking", "{label}", "{label}", "")'
    return gives(f"count by (lacking) ({marked}) > bool 0", at, "{}")


def _written(sample: Sample) -> str:
    labels = ",".join(
        f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in sorted(sample.labels.items())
    )
    return f"{sample.name}{{{labels}}}"
