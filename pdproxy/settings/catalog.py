"""Every single setting with its names, found by walking the models: what a file, a variable and a flag may name."""

import dataclasses
import difflib
from collections.abc import Mapping

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from pdproxy.settings.model import NodeEntry, Settings
from pdproxy.settings.types import takes

PREFIX = "PDPROXY_"

SHORT = {
    "listen.host": "--host",
    "listen.port": "--port",
    "listen.admin_port": "--admin-port",
}
"""Shorter flags for what is set most often."""


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """One setting.

    Attributes:
        section: its section's name, "" for a field of a node entry.
        name: its own name.
        field: its type, bounds, default and description.
    """

    section: str
    name: str
    field: FieldInfo

    @property
    def key(self) -> str:
        """As in messages: ``deadlines.connect``."""
        return f"{self.section}.{self.name}" if self.section else self.name

    @property
    def variable(self) -> str:
        """As in the environment: ``PDPROXY_DEADLINES_CONNECT``."""
        return PREFIX + self.key.replace(".", "_").upper()

    @property
    def flag(self) -> str:
        """As on the command line: ``--deadlines-connect``."""
        return "--" + self.key.replace(".", "-").replace("_", "-")

    @property
    def takes(self) -> str:
        """What it takes, in words."""
        return takes(self.field)


def sections() -> dict[str, type[BaseModel]]:
    """The sections by name, without ``nodes``, which is a list."""
    kinds = {name: field.annotation for name, field in Settings.model_fields.items()}
    return {name: kind for name, kind in kinds.items() if isinstance(kind, type) and issubclass(kind, BaseModel)}


def every_setting() -> tuple[Setting, ...]:
    """Every setting of every section, in the order of the sections."""
    return tuple(
        Setting(section, name, field)
        for section, kind in sections().items()
        for name, field in kind.model_fields.items()
    )


def node_settings() -> tuple[Setting, ...]:
    """What one entry of ``nodes`` may hold."""
    return tuple(Setting("", name, field) for name, field in NodeEntry.model_fields.items())


def did_you_mean(word: str, known: Mapping[str, str], otherwise: str = "") -> str:
    """ " Did you mean x?", or `otherwise` when nothing is near.

    Args:
        word: what was written.
        known: what may be meant, by what the word is compared with.
    """
    compared = {name.lower(): meant for name, meant in known.items()}
    near = difflib.get_close_matches(word.lower(), compared, n=1, cutoff=0.6)
    return f" Did you mean {compared[near[0]]}?" if near else otherwise
