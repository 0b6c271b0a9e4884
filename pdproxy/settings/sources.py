"""Where settings come from: the environment, the command line, and `yaml_file`. Each can name the place of a value.

Flags are argparse's: pydantic-settings' own have dots in their names, take JSON for whole sections, and show Python's
types in their help.
"""

import argparse
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from pydantic_settings import EnvSettingsSource, InitSettingsSource

from pdproxy.errors import SettingsError
from pdproxy.settings.catalog import PREFIX, SHORT, did_you_mean, every_setting, sections
from pdproxy.settings.model import Settings
from pdproxy.settings.types import Role

CONFIG = PREFIX + "CONFIG"
ROLES = {**{role.value: (role,) for role in Role}, "node": tuple(Role)}
"""The roles of a node that is named so, by a flag or a variable."""
NODES = {PREFIX + word.upper(): roles for word, roles in ROLES.items()}

Location: TypeAlias = tuple[str | int, ...]
"""The path of keys to a value: ``("deadlines", "stall")``, ``("nodes", 0, "url")``."""

_FOREIGN = re.compile(
    # the connector's, which a launcher may hand to all that it starts
    r"PDPROXY_(TICKET|CONNECTOR|TEST)_\w+=.*"
    # what Kubernetes sets in every pod beside a service called pdproxy
    r"|PDPROXY_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)=.*"
    r"|PDPROXY_(\w+_)?PORT=(tcp|udp|sctp)://.*",
    re.DOTALL,
)
"""A variable with its value that begins with our prefix and is none of the proxy's settings."""


class EnvironmentSource(EnvSettingsSource):
    """The variables that begin with ``PDPROXY_``. ``faults``: a sentence for each variable that names no setting."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        super().__init__(
            Settings, case_sensitive=False, env_prefix=PREFIX, env_nested_delimiter="_", env_nested_max_split=1
        )
        known = {setting.variable for setting in every_setting()}
        self.faults = _unknown_variables(environment, {*known, CONFIG, *NODES})
        self.env_vars = {name.lower(): value for name, value in environment.items() if name in known}
        self._nodes = [
            (name, {"url": url, "roles": roles})
            for name, roles in NODES.items()
            for url in environment.get(name, "").split(",")
            if url.strip()
        ]

    def __call__(self) -> dict[str, Any]:
        """The values, with the nodes."""
        return super().__call__() | _with_nodes(self._nodes)

    def where(self, location: Location) -> str:
        """A place like ``PDPROXY_LOG_LEVEL``."""
        return _node_origin(location, self._nodes) or PREFIX + "_".join(map(str, location)).upper()


class FlagSource(InitSettingsSource):
    """The command line, as argparse has parsed it with `add_flags`."""

    faults: Sequence[str] = ()

    def __init__(self, parsed: argparse.Namespace) -> None:
        given = vars(parsed)
        values: dict[str, Any] = {}
        for setting in every_setting():
            if given.get(setting.key) is not None:
                values.setdefault(setting.section, {})[setting.name] = given[setting.key]
        self._nodes = [
            (f"--{word}", {"url": url, "roles": roles}) for word, roles in ROLES.items() for url in given[word]
        ]
        super().__init__(Settings, values | _with_nodes(self._nodes))

    def where(self, location: Location) -> str:
        """A place like ``--log-level``."""
        return _node_origin(location, self._nodes) or "--" + "-".join(map(str, location)).replace("_", "-")


class SettingsSource(Protocol):
    """A source of settings."""

    @property
    def faults(self) -> Sequence[str]:
        """A sentence for each part of it that cannot be used at all."""

    def __call__(self) -> dict[str, Any]:
        """The values that it gives, by section."""

    def where(self, location: Location) -> str:
        """Where a value stands, in words."""


def add_flags(parser: argparse.ArgumentParser, words: Sequence[str] = ()) -> None:
    """Give a command's parser a flag for every setting.

    ``words``: the command line. Only where it asks for help are the descriptions read, which takes a while.
    """
    helps = not {"-h", "--help"}.isdisjoint(words)
    nodes = " ".join(f"[--{word} URL] …" for word in ROLES)
    parser.usage = f"{parser.prog} [--config FILE] {nodes} [--SECTION-SETTING VALUE] …"
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML file with settings.")
    for word in ROLES:
        kind = "node that does both" if word == "node" else f"{word} node"
        parser.add_argument(
            f"--{word}", action="append", default=[], metavar="URL", help=f"Address of a {kind}; repeatable."
        )
    groups = {name: parser.add_argument_group(name, kind.__doc__) for name, kind in sections().items()}
    for each in every_setting():
        names = [each.flag, SHORT[each.key]] if each.key in SHORT else [each.flag]
        text = f"{each.description} Takes {each.takes}.".replace("%", "%%") if helps else None
        groups[each.section].add_argument(*names, dest=each.key, metavar=each.metavar, help=text)


def refuse_unknown(unknown: Sequence[str]) -> None:
    """Refuse arguments that the parser did not recognise.

    Raises:
        SettingsError: there are any.
    """
    if unknown:
        flags = ("--config", *(f"--{word}" for word in ROLES), *SHORT.values(), *(s.flag for s in every_setting()))
        near = did_you_mean(unknown[0].partition("=")[0], {name: name for name in flags})
        raise SettingsError(f"{unknown[0]} is no flag of this command.{near}")


def _unknown_variables(environment: Mapping[str, str], known: set[str]) -> list[str]:
    names = {name.removeprefix(PREFIX): name for name in sorted(known)}
    return [
        f"the environment variable {name} names no setting."
        + did_you_mean(name.removeprefix(PREFIX), names, " `pdproxy settings` lists them.")
        for name, value in environment.items()
        if name.startswith(PREFIX) and name not in known and not _FOREIGN.fullmatch(f"{name}={value}")
    ]


def _with_nodes(nodes: Sequence[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    return {"nodes": [node for _, node in nodes]} if nodes else {}


def _node_origin(location: Location, nodes: Sequence[tuple[str, object]]) -> str:
    """The variable or flag that named a node, or all nodes; "" for a location outside of ``nodes``."""
    if location[0] != "nodes":
        return ""
    position = location[1] if len(location) > 1 else None
    return nodes[position][0] if isinstance(position, int) else " and ".join(dict.fromkeys(name for name, _ in nodes))
