"""Every single setting, found by walking the sections: what a file, the environment and flags may name."""

import dataclasses
import typing
from collections.abc import Iterator

from pdproxy.settings.meaning import Meaning
from pdproxy.settings.sections import NodeEntry, Settings

PREFIX = "PDPROXY_"


@dataclasses.dataclass(frozen=True, slots=True)
class Leaf:
    """One setting.

    Attributes:
        section: its section's name, "" for a field of a node entry.
        name: its own name.
        kind: its type, without the annotation.
        meaning: what it means.
        default: what it is when nobody says, `dataclasses.MISSING` where somebody must.
    """

    section: str
    name: str
    kind: object
    meaning: Meaning
    default: object

    @property
    def key(self) -> str:
        """As in the file and in messages: ``deadlines.connect``."""
        return f"{self.section}.{self.name}" if self.section else self.name

    @property
    def variable(self) -> str:
        """As in the environment: ``PDPROXY_DEADLINES_CONNECT``."""
        return PREFIX + self.key.replace(".", "_").upper()

    @property
    def flag(self) -> str:
        """As on the command line: ``--deadlines-connect``."""
        return "--" + self.key.replace(".", "-").replace("_", "-")


def sections() -> dict[str, type]:
    """The sections by name, without ``nodes``, which is a list."""
    kinds = typing.get_type_hints(Settings)
    return {field.name: kinds[field.name] for field in dataclasses.fields(Settings) if field.name != "nodes"}


def leaves() -> tuple[Leaf, ...]:
    """Every setting of every section, in the order of the sections."""
    return tuple(leaf for section, kind in sections().items() for leaf in _leaves_of(section, kind))


def node_leaves() -> tuple[Leaf, ...]:
    """What one entry of ``nodes`` may say."""
    return tuple(_leaves_of("", NodeEntry))


def _leaves_of(section: str, kind: type) -> Iterator[Leaf]:
    hints = typing.get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        bare, meaning = typing.get_args(hints[field.name])
        yield Leaf(section, field.name, bare, meaning, field.default)
