"""The settings described for those who write them: the page docs/settings.md, and a JSON schema for editors."""

import enum
import importlib.resources
import json
import string
from typing import Any

from pydantic_core import PydanticUndefined

from pdproxy.settings.catalog import SHORT, Setting, every_setting, node_settings, sections, unit_of
from pdproxy.settings.model import Settings

LINE = 100
"""The longest line of printed JSON, without the key before it."""


def reference() -> str:
    """The whole page, Markdown: reference.md with the tables of all settings."""
    page = importlib.resources.files("pdproxy.settings").joinpath("reference.md").read_text(encoding="utf-8")
    tables = [
        f"## {name}\n\n{kind.__doc__}\n\n" + _table(tuple(each for each in every_setting() if each.section == name))
        for name, kind in sections().items()
    ]
    return string.Template(page).substitute(nodes=_table(node_settings()), sections="\n".join(tables))


def schema() -> dict[str, Any]:
    """The JSON schema of the file. It has no references, so that it can stand inside another schema."""
    whole = Settings.model_json_schema()
    properties = {name: _inlined(each, whole["$defs"]) for name, each in whole["properties"].items()}
    for each in properties.values():
        each["type"] = [each["type"], "null"]  # as of `keys:` with nothing below it
        del each["default"]
    for setting in every_setting():
        _describe(properties[setting.section]["properties"], setting)
    for setting in node_settings():
        _describe(properties["nodes"]["items"]["properties"], setting)
    description = "Settings of pdproxy, by section: docs/settings.md."
    return {"description": description, "type": "object", "properties": properties, "additionalProperties": False}


def printed_schema() -> str:
    """The JSON schema as a file of its own."""
    return printed({"$schema": "https://json-schema.org/draft/2020-12/schema", **schema()}) + "\n"


def printed(value: Any, indent: int = 0) -> str:
    """JSON in which an object that fits into one line stands on one."""
    line = json.dumps(value)
    if indent + len(line) <= LINE or not isinstance(value, dict):
        return line
    pad = " " * (indent + 2)
    inner = ",\n".join(f"{pad}{json.dumps(key)}: {printed(each, indent + 2)}" for key, each in value.items())
    return "{\n" + inner + "\n" + " " * indent + "}"


def _describe(properties: dict[str, Any], setting: Setting) -> None:
    described = {**properties[setting.name], "description": setting.description}
    properties[setting.name] = dict(sorted(described.items()))  # as pydantic has them


def _inlined(node: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """A schema with its references resolved, and without titles, which only repeat names."""
    if "$ref" in node:
        node = definitions[node["$ref"].rpartition("/")[2]] | node
    inlined = {key: each for key, each in node.items() if key not in ("$ref", "title")}
    if "items" in inlined:
        inlined["items"] = _inlined(inlined["items"], definitions)
    if "properties" in inlined:
        inlined["properties"] = {name: _inlined(each, definitions) for name, each in inlined["properties"].items()}
    return inlined


def _table(rows: tuple[Setting, ...]) -> str:
    lines = ["| setting | takes | default | what it does |", "|---|---|---|---|"]
    for row in rows:
        short = f" (`{SHORT[row.key]}`)" if row.key in SHORT else ""
        lines.append(f"| `{row.name}`{short} | {row.takes} | {_default(row)} | {row.description} |")
    return "\n".join(lines) + "\n"


def _default(row: Setting) -> str:
    value = row.field.default
    if value is PydanticUndefined:
        return "needed"
    if value is None or value in ((), ""):
        return "none"
    if isinstance(value, enum.StrEnum):
        return f"`{value.value}`"
    if isinstance(value, tuple):
        return f"`[{', '.join(value)}]`"
    if unit_of(row.field) == "bytes":
        return f"`{value >> 20}MiB`" if value % 2**20 == 0 else f"`{value >> 10}KiB`"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"
