"""From everything that was said to one valid `Settings`."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pdproxy.errors import SettingsError
from pdproxy.settings.agree import agree
from pdproxy.settings.convert import Unfit, convert
from pdproxy.settings.environment import CONFIG, read_environment
from pdproxy.settings.file import read_file
from pdproxy.settings.given import Given, Said, over
from pdproxy.settings.leaves import Leaf, leaves, node_leaves, sections
from pdproxy.settings.sections import NodeEntry, Settings


def load(
    flags: Given | None = None, config: Path | None = None, environment: Mapping[str, str] | None = None
) -> Settings:
    """The settings: flags over the environment over the file over the defaults.

    Args:
        flags: what the command line says.
        config: the file; where None, the one that ``PDPROXY_CONFIG`` names, if it names one.
        environment: the process's, or a test's; None is empty.

    Raises:
        SettingsError: something that was said cannot be used; the message says what would work.
    """
    variables = environment or {}
    path = config or (Path(variables[CONFIG]) if variables.get(CONFIG) else None)
    given = read_file(path) if path else Given()
    return build(over(over(given, read_environment(variables)), flags or Given()))


def build(given: Given) -> Settings:
    """Valid settings from what was said.

    Raises:
        SettingsError: a value does not fit, or two do not go together.
    """
    by_section: dict[str, dict[str, object]] = {name: {} for name in sections()}
    for leaf in leaves():
        if leaf.key in given.values:
            by_section[leaf.section][leaf.name] = _value(leaf, given.values[leaf.key], leaf.key)
    parts = {name: kind(**by_section[name]) for name, kind in sections().items()}
    settings = Settings(nodes=tuple(map(_node, given.nodes)), **parts)
    agree(settings)
    return settings


def _node(said: Mapping[str, Said]) -> NodeEntry:
    where = next((each.where for each in said.values()), "nodes")
    values: dict[str, Any] = {
        leaf.name: _value(leaf, said[leaf.name], leaf.name) for leaf in node_leaves() if leaf.name in said
    }
    for leaf in node_leaves():
        if leaf.default is dataclasses.MISSING and leaf.name not in values:
            raise SettingsError(f"{where}: a node needs {leaf.name}.")
    values["url"] = values["url"].rstrip("/")
    return NodeEntry(**values)


def _value(leaf: Leaf, said: Said, key: str) -> object:
    try:
        return convert(said.value, leaf.kind, leaf.meaning)
    except Unfit as unfit:
        raise SettingsError(f"{said.where}: {key} must be {unfit}, not {said.value!r}.") from None
