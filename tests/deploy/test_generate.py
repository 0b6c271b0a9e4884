"""Generated files are as `make generate` would make them: no two copies drift apart."""

from pathlib import Path

import pytest

from deploy.generate import CHART_FILES, generated
from deploy.promql import with_matchers

ONE = {"release": '="a"'}


@pytest.mark.parametrize(("path", "text"), generated().items(), ids=[path.name for path in generated()])
def test_generated_files_are_up_to_date(path: Path, text: str) -> None:
    assert path.read_text(encoding="utf-8") == text, "run: make generate"


def test_the_chart_has_copies_of_what_compose_uses() -> None:
    assert {path.name for path in generated() if path.parent == CHART_FILES} == {"alerts.yaml", "dashboard.json"}


@pytest.mark.parametrize(
    ("query", "narrowed"),
    [
        ("pdproxy_body_bytes", 'pdproxy_body_bytes{release="a"}'),
        ('sum by (release) (rate(up{job="b"}[5m]))', 'sum by (release) (rate(up{release="a",job="b"}[5m]))'),
        ('pdproxy_node_up{state="up"} == 1', 'pdproxy_node_up{release="a",state="up"} == 1'),
        ("vllm:x_total / pdproxy_y * 0", 'vllm:x_total{release="a"} / pdproxy_y{release="a"} * 0'),
        ("other_pdproxy_x + up_to", "other_pdproxy_x + up_to"),
    ],
)
def test_every_series_of_ours_gets_the_condition(query: str, narrowed: str) -> None:
    assert with_matchers(query, lambda _: ONE) == narrowed
