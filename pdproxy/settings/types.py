"""The types of settings: numbers with units, texts, addresses, files. Each says what it takes, in words."""

import dataclasses
from typing import Annotated, Any
from urllib.parse import urlsplit

from annotated_types import Ge, Gt, Le, MinLen
from pydantic import (
    AfterValidator,
    BeforeValidator,
    FilePath,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    WithJsonSchema,
)
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError, core_schema

from pdproxy.settings.choices import Choice

UNSHOWN = "unshown"
"""The type of an error whose input must not be repeated: it may hold a password."""


@dataclasses.dataclass(frozen=True, slots=True)
class Takes:
    """Annotates a type with what it takes, in words: "the path of a file"."""

    words: str


@dataclasses.dataclass(frozen=True, slots=True)
class Quantity:
    """Annotates a number with the units in which it may be written, such as ``30s``.

    Attributes:
        unit: what the number counts: "seconds", "bytes", "tokens", or "" for a plain number.
        suffixes: units that may follow a number, and how much each is; a longer one stands before its own ending.
    """

    unit: str = ""
    suffixes: tuple[tuple[str, float], ...] = ()

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_before_validator_function(self.parse, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        number = handler(schema)
        units = "|".join(suffix for suffix, _ in self.suffixes)
        fraction = r"(\.[0-9]+)?" if units or number["type"] == "number" else ""
        pattern = f"^[0-9]+{fraction}" + (f" ?({units})?$" if units else "$")
        return {**number, "type": [number["type"], "string"], "pattern": pattern}

    def parse(self, value: object) -> float:
        """The number that a text or a number is. Raises ValueError: it is none."""
        text, factor = str(value).strip(), 1.0
        for suffix, size in self.suffixes:
            if text.endswith(suffix):
                text, factor = text.removesuffix(suffix).rstrip(), size
                break
        return float(text) * factor


_SECONDS = Quantity("seconds", (("ms", 0.001), ("s", 1.0), ("m", 60.0), ("h", 3600.0)))
_BYTES = Quantity("bytes", (("KiB", 2.0**10), ("MiB", 2.0**20), ("GiB", 2.0**30), ("B", 1.0)))


def address(text: str) -> str:
    """An http address, without a slash at its end. Raises ValueError or PydanticCustomError: it is none."""
    _, _, rest = text.rpartition("://")
    if "@" in rest.partition("/")[0] or "?" in text or "#" in text:
        raise PydanticCustomError(UNSHOWN, "an address without credentials, query or fragment")
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0 or " " in text:
        raise ValueError("no address")
    return text.rstrip("/")


def _address_or_nothing(text: str) -> str:
    return address(text) if text else ""


def _path_or_none(value: object) -> object:
    return None if value == "" else value


def _split(value: object) -> object:
    return [part for part in value.split(",") if part.strip()] if isinstance(value, str) else value


_ADDRESS = Takes("an address such as http://10.0.0.1:8000")

Number = Annotated[float, Quantity()]
Count = Annotated[int, Quantity()]
Tokens = Annotated[int, Quantity("tokens")]
Seconds = Annotated[float, _SECONDS]
Bytes = Annotated[int, _BYTES]
Port = Annotated[int, Ge(0), Le(65535), Quantity()]
Text = Annotated[str, Takes("a text")]
Texts = Annotated[
    tuple[str, ...],
    BeforeValidator(_split),
    WithJsonSchema({"type": ["array", "string"], "items": {"type": "string"}}),
    Takes("a list of texts"),
]
Host = Annotated[str, MinLen(1), Takes("an address such as 127.0.0.1")]
Address = Annotated[
    str,
    AfterValidator(address),
    WithJsonSchema({"type": "string", "pattern": r"^https?://[^ @/?#]+(/[^ ?#]*)?$"}),
    _ADDRESS,
]
OptionalAddress = Annotated[
    str,
    AfterValidator(_address_or_nothing),
    WithJsonSchema({"type": "string", "pattern": r"^(https?://[^ @/?#]+(/[^ ?#]*)?)?$"}),
    _ADDRESS,
]
OptionalFile = Annotated[
    FilePath | None,
    BeforeValidator(_path_or_none),
    WithJsonSchema({"type": ["string", "null"]}),
    Takes("the path of a file"),
]


def takes(field: FieldInfo) -> str:
    """What a setting takes, in words: "a number of seconds above 0"."""
    if isinstance(field.annotation, type) and issubclass(field.annotation, Choice):
        return "one of " + ", ".join(field.annotation)
    words = next((each.words for each in field.metadata if isinstance(each, Takes)), "")
    return words or _number(field)


def unit_of(field: FieldInfo) -> str:
    """What a number counts; "" for everything else."""
    return next((each.unit for each in field.metadata if isinstance(each, Quantity)), "")


def _number(field: FieldInfo) -> str:
    words = "a whole number" if field.annotation is int else "a number"
    if unit := unit_of(field):
        words += f" of {unit}"
    least = next((each.ge for each in field.metadata if isinstance(each, Ge)), None)
    most = next((each.le for each in field.metadata if isinstance(each, Le)), None)
    for each in field.metadata:
        if isinstance(each, Gt):
            words += f" above {each.gt}"
    if least is not None:
        words += f", at least {least}" if most is None else f" from {least} to {most}"
    return words
