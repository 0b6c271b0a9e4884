"""Write what is made of something else (`make generate`), with the chart's copies: Helm reads its own folder alone.

The settings' models make a page and a JSON schema, the commands and routes a page each, the list of models the page of
what starts on which GPU, the tests that passed the tables of what was run, `deploy.dashboard` the dashboard, and the
alert rules those of the chart, which speak of its own release alone.
"""

import json
from pathlib import Path

import yaml

from deploy.dashboard import dashboard
from deploy.local.paths import ROOT
from deploy.memory import known
from deploy.memory_page import page
from deploy.pictures import pictures
from deploy.promql import with_matchers
from deploy.reference import cli_page, http_page
from deploy.tested import pages, read
from pdproxy.settings.reference import printed, printed_schema, reference, schema

DOCS = ROOT / "docs"
PAGE = DOCS / "settings.md"
MEMORY = DOCS / "memory.md"
SCHEMA = DOCS / "settings.schema.json"
VALUES = ROOT / "helm" / "pdproxy" / "values.schema.json"
CHART_FILES = ROOT / "helm" / "pdproxy" / "files"
ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yml"
BOARD = ROOT / "deploy" / "grafana" / "dashboards" / "pdproxy.json"
OF_ONE_RELEASE = {"namespace": '="__NAMESPACE__"', "release": '="__RELEASE__"'}
"""Conditions on labels, into which the chart's template puts the names of its release."""

_KEY = '        "settings": '
"""Where the values' schema has the schema of ``proxy.settings``."""


def values_schema(text: str) -> str:
    """The values' schema with the schema of the settings in it, the rest as it was."""
    start = text.index(_KEY) + len(_KEY)
    _, length = json.JSONDecoder().raw_decode(text[start:])
    return text[:start] + printed(schema(), indent=8) + text[start + length :]


def rules_of_one_release(text: str) -> str:
    """The alert rules, as they are about the series of one release."""
    rules = yaml.safe_load(text)
    for group in rules["groups"]:
        for rule in group["rules"]:
            rule["expr"] = with_matchers(rule["expr"], lambda _: OF_ONE_RELEASE)
    note = "# Made from deploy/prometheus/alerts.yml by `make generate`.\n"
    return note + yaml.safe_dump(rules, sort_keys=False, allow_unicode=True, width=4096)


def generated() -> dict[Path, str]:
    """Each file, and what should be in it."""
    board = dashboard()
    return {
        PAGE: reference(),
        DOCS / "cli.md": cli_page(),
        DOCS / "http.md": http_page(),
        MEMORY: page(known()),
        SCHEMA: printed_schema(),
        VALUES: values_schema(VALUES.read_text(encoding="utf-8")),
        BOARD: board,
        CHART_FILES / "dashboard.json": board,
        CHART_FILES / "alerts.yaml": rules_of_one_release(ALERTS.read_text(encoding="utf-8")),
        **pages(read()),
        **{DOCS / name: picture for name, picture in pictures().items()},
    }


if __name__ == "__main__":
    for path, text in generated().items():
        path.write_text(text, encoding="utf-8")
