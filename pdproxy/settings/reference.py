"""The page docs/settings.md, made from the settings themselves."""

import dataclasses
import enum

from pdproxy.settings.convert import expected
from pdproxy.settings.flags import SHORT
from pdproxy.settings.leaves import Leaf, leaves, node_leaves, sections
from pdproxy.settings.sections import Settings

_HEAD = """\
# Settings

Made by `pdproxy settings`; do not edit.

Settings come from a YAML file (`--config FILE` or `PDPROXY_CONFIG`), from environment variables and from flags.
A flag beats a variable, a variable beats the file, the file beats the default. Whatever names no setting is an error.
None is needed: `pdproxy serve --prefill http://HOST:PORT --decode http://HOST:PORT` serves.

The setting `connect` of the section `deadlines` is `deadlines: {connect: 5}` in the file,
`PDPROXY_DEADLINES_CONNECT=5` in the environment and `--deadlines-connect 5` on the command line.
Seconds may be written `500ms`, `30s`, `10m` or `1h`, sizes `512KiB`, `64MiB` or `1GiB`.
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


def reference() -> str:
    """The whole page, Markdown."""
    parts = [_HEAD]
    for name, kind in sections().items():
        parts.append(f"## {name}\n\n{kind.__doc__}\n\n" + _table([leaf for leaf in leaves() if leaf.section == name]))
        if name == _before_nodes():
            parts.append(_NODES + "\n" + _table(list(node_leaves())))
    return "\n".join([*parts, _FOOT])


def _before_nodes() -> str:
    names = [field.name for field in dataclasses.fields(Settings)]
    return names[names.index("nodes") - 1]


def _table(rows: list[Leaf]) -> str:
    lines = ["| setting | takes | default | what it does |", "|---|---|---|---|"]
    lines += [
        f"| `{leaf.name}`{_short(leaf)} | {expected(leaf.kind, leaf.meaning)} "
        f"| {_default(leaf)} | {leaf.meaning.text} |"
        for leaf in rows
    ]
    return "\n".join(lines) + "\n"


def _short(leaf: Leaf) -> str:
    return f" (`{SHORT[leaf.key]}`)" if leaf.key in SHORT else ""


def _default(leaf: Leaf) -> str:
    value = leaf.default
    if value is dataclasses.MISSING:
        return "needed"
    if value is None or value in ((), ""):
        return "none"
    if isinstance(value, enum.StrEnum):
        return f"`{value.value}`"
    if leaf.meaning.unit == "bytes" and isinstance(value, int):
        return f"`{value >> 20}MiB`" if value % 2**20 == 0 else f"`{value >> 10}KiB`"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"
