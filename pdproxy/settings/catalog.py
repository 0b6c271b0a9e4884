"""Every setting with its names in the file, in the environment and on the command line, from the models."""

import ast
import dataclasses
import difflib
import functools
import inspect
import itertools
import re
from collections.abc import Mapping

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from pdproxy.settings import model
from pdproxy.settings.model import ConfiguredNode, Settings
from pdproxy.settings.types import OneOf, Quantity, Takes

PREFIX = "PDPROXY_"

_KIND = re.compile(r".*?(\w+)(?= such as| above| from|,|$)")
"""The noun in what a setting takes: "address" of "an address such as http://10.0.0.1:8000"."""

SHORT = {
    "listen.host": "--host",
    "listen.port": "--port",
    "listen.admin_port": "--admin-port",
}
"""Shorter flags for what is set most often."""


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """One setting: its section's name ("" for a field of a node), its own, and its type, bounds and default."""

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
    def description(self) -> str:
        """The description: the text below its field."""
        kind = sections()[self.section] if self.section else ConfiguredNode
        return descriptions()[kind.__name__, self.name]

    @property
    def takes(self) -> str:
        """The values that the setting takes, in words: "a number of seconds above 0"."""
        if isinstance(self.field.annotation, type) and issubclass(self.field.annotation, OneOf):
            return "one of " + ", ".join(self.field.annotation)
        words = next((each.words for each in self.field.metadata if isinstance(each, Takes)), "")
        return words or _number(self.field)

    @property
    def metavar(self) -> str:
        """The word for its value in a command's help: ``SECONDS``, ``FILE``, ``on|off``."""
        if isinstance(self.field.annotation, type) and issubclass(self.field.annotation, OneOf):
            return "|".join(self.field.annotation)
        if unit := unit_of(self.field):
            return unit.upper()
        noun = _KIND.match(self.takes)
        return noun[1].upper() if noun else "VALUE"

    def meant(self, value: object) -> str:
        """The short form of a number with its unit in words, "10m" for "10 minutes"; "" for anything else."""
        quantity = next((each for each in self.field.metadata if isinstance(each, Quantity)), None)
        return quantity.meant(value) if quantity is not None else ""


@functools.cache
def descriptions() -> Mapping[tuple[str, str], str]:
    """The texts below the fields, by class and field, from the source of the models.

    pydantic can do this itself, whenever a model's class is made: that took a twentieth of the proxy's start.
    """
    found: dict[tuple[str, str], str] = {}
    for kind in ast.parse(inspect.getsource(model)).body:
        if isinstance(kind, ast.ClassDef):
            for field, text in itertools.pairwise(kind.body):
                match field, text:
                    case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str() as said)):
                        found[kind.name, name] = inspect.cleandoc(said)
    return found


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
    """The fields of an entry of ``nodes``."""
    return tuple(Setting("", name, field) for name, field in ConfiguredNode.model_fields.items())


def unit_of(field: FieldInfo) -> str:
    """The unit of a number; "" for everything else."""
    return next((each.unit for each in field.metadata if isinstance(each, Quantity)), "")


def _number(field: FieldInfo) -> str:
    words = "a whole number" if field.annotation is int else "a number"
    if unit := unit_of(field):
        words += f" of {unit}"
    above, least, most = (_bound(field, name) for name in ("gt", "ge", "le"))
    if above is not None:
        words += f" above {above}"
    if least is not None:
        words += f", at least {least}" if most is None else f" from {least} to {most}"
    return words


def _bound(field: FieldInfo, name: str) -> object:
    return next((getattr(each, name) for each in field.metadata if hasattr(each, name)), None)


def did_you_mean(word: str, known: Mapping[str, str], otherwise: str = "") -> str:
    """A hint like " Did you mean x?", or `otherwise` when no known name resembles the word.

    ``known``: what to suggest, by the name that the word is compared with.
    """
    compared = {name.lower(): meant for name, meant in known.items()}
    near = difflib.get_close_matches(word.lower(), compared, n=1, cutoff=0.6)
    return f" Did you mean {compared[near[0]]}?" if near else otherwise
