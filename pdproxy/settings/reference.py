"""What is made from the settings for those who write them: the page docs/settings.md, and a JSON schema for editors."""

import enum
import json
from typing import Any

from pydantic_core import PydanticUndefined

from pdproxy.settings.catalog import SHORT, Setting, every_setting, node_settings, sections
from pdproxy.settings.model import Settings
from pdproxy.settings.types import unit_of

_HEAD = """\
# Settings

Made by `pdproxy settings`; do not edit.

Settings come from a YAML file (`--config FILE` or `PDPROXY_CONFIG`), from environment variables and from flags.
A flag beats a variable, a variable beats the file, the file beats the default. Whatever names no setting is an error.
None is needed: `pdproxy serve --prefill http://HOST:PORT --decode http://HOST:PORT` serves.

The setting `connect` of the section `deadlines` is `deadlines: {connect: 5}` in the file,
`PDPROXY_DEADLINES_CONNECT=5` in the environment and `--deadlines-connect 5` on the command line.
Seconds may be written `500ms`, `30s`, `10m` or `1h`, sizes `512KiB`, `64MiB` or `1GiB`.

Editors complete and check the file with [settings.schema.json](settings.schema.json) (`pdproxy settings-schema` prints
it): begin the file with `# yaml-language-server: $schema=settings.schema.json`, or wherever it lies.
"""

_NODES = """\
## nodes

The vLLM nodes that are known from the start: a list in the file,
`PDPROXY_PREFILL` and `PDPROXY_DECODE` (addresses with commas between them) in the environment,
`--prefill URL` and `--decode URL` (repeatable) on the command line.
Where a stronger source names any node, those of the weaker ones are not used.
More can be found (`discovery`), or added while the proxy runs.

```yaml
nodes:
  - {url: "http://10.0.0.1:8000", role: prefill}
  - {url: "http://10.0.0.2:8000", role: decode, weight: 2}
```
"""

_FOOT = """\
## Files

`keys.file` has one key a line: `key [name [limit]]`. `name` goes to the logs, `limit` is the number of requests that
the key may have open at once. `#` begins a comment.
`listen.admin_token_file` and `upstream.credential_file` hold one word each.
"""

LINE = 100
"""Of JSON, without the key before it."""


def reference() -> str:
    """The whole page, Markdown."""
    parts = [_HEAD]
    for name in Settings.model_fields:
        kind = sections().get(name)
        if kind is None:
            parts.append(_NODES + "\n" + _table(node_settings()))
        else:
            table = _table(tuple(each for each in every_setting() if each.section == name))
            parts.append(f"## {name}\n\n{kind.__doc__}\n\n{table}")
    return "\n".join([*parts, _FOOT])


def schema() -> dict[str, Any]:
    """The JSON schema of the file. It has no references, so that it can stand inside another schema."""
    whole = Settings.model_json_schema()
    properties = {name: _plain(each, whole["$defs"]) for name, each in whole["properties"].items()}
    for each in properties.values():
        each["type"] = [each["type"], "null"]  # as of `keys:` with nothing below it
        del each["default"]
    description = "Settings of pdproxy, by section: docs/settings.md."
    return {"description": description, "type": "object", "properties": properties, "additionalProperties": False}


def printed_schema() -> str:
    """The JSON schema as a file of its own."""
    return printed({"$schema": "https://json-schema.org/draft/2020-12/schema", **schema()}) + "\n"


def printed(value: Any, indent: int = 0) -> str:
    """JSON with a line for whatever fits into one."""
    line = json.dumps(value)
    if indent + len(line) <= LINE or not isinstance(value, dict):
        return line
    pad = " " * (indent + 2)
    inner = ",\n".join(f"{pad}{json.dumps(key)}: {printed(each, indent + 2)}" for key, each in value.items())
    return "{\n" + inner + "\n" + " " * indent + "}"


def _plain(node: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """A schema without references, and without titles, which only repeat names."""
    if "$ref" in node:
        node = definitions[node["$ref"].rpartition("/")[2]] | node
    plain = {key: each for key, each in node.items() if key not in ("$ref", "title")}
    if "items" in plain:
        plain["items"] = _plain(plain["items"], definitions)
    if "properties" in plain:
        plain["properties"] = {name: _plain(each, definitions) for name, each in plain["properties"].items()}
    return plain


def _table(rows: tuple[Setting, ...]) -> str:
    lines = ["| setting | takes | default | what it does |", "|---|---|---|---|"]
    lines += [
        f"| `{row.name}`{_short(row)} | {row.takes} | {_default(row)} | {row.field.description} |" for row in rows
    ]
    return "\n".join(lines) + "\n"


def _short(row: Setting) -> str:
    return f" (`{SHORT[row.key]}`)" if row.key in SHORT else ""


def _default(row: Setting) -> str:
    value = row.field.default
    if value is PydanticUndefined:
        return "needed"
    if value is None or value in ((), ""):
        return "none"
    if isinstance(value, enum.StrEnum):
        return f"`{value.value}`"
    if unit_of(row.field) == "bytes":
        return f"`{value >> 20}MiB`" if value % 2**20 == 0 else f"`{value >> 10}KiB`"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"
