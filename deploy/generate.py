"""Write what is made from the settings' models (`make generate`): a page, a JSON schema, and its copy in the chart."""

import json
from pathlib import Path

from deploy.local.paths import ROOT
from pdproxy.settings.reference import printed, printed_schema, reference, schema

PAGE = ROOT / "docs" / "settings.md"
SCHEMA = ROOT / "docs" / "settings.schema.json"
VALUES = ROOT / "helm" / "pdproxy" / "values.schema.json"

_KEY = '        "settings": '
"""Where the values' schema has the schema of ``proxy.settings``."""


def values_schema(text: str) -> str:
    """The values' schema with the schema of the settings in it, the rest as it was."""
    start = text.index(_KEY) + len(_KEY)
    _, length = json.JSONDecoder().raw_decode(text[start:])
    return text[:start] + printed(schema(), indent=8) + text[start + length :]


def generated() -> dict[Path, str]:
    """Each file, and what should be in it."""
    return {PAGE: reference(), SCHEMA: printed_schema(), VALUES: values_schema(VALUES.read_text(encoding="utf-8"))}


if __name__ == "__main__":
    for path, text in generated().items():
        path.write_text(text, encoding="utf-8")
