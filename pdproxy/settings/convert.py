"""From what somebody wrote to what a setting is. Pure."""

import enum
import math
from pathlib import Path
from typing import cast

from pdproxy.settings.meaning import Meaning

_UNITS = {
    "bytes": {"KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "B": 1.0},
    "seconds": {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0},
}


class Unfit(Exception):
    """The value is not what the setting takes; the message says what it takes: "a number above 0"."""


def convert(value: object, kind: object, meaning: Meaning) -> object:
    """``value``, a string or what YAML made of it, as ``kind``.

    Raises:
        Unfit: it cannot be one, or lies outside its bounds.
    """
    if kind is int or kind is float:
        return _number(value, whole=kind is int, meaning=meaning)
    if isinstance(kind, type) and issubclass(kind, enum.StrEnum):
        return _word(value, kind)
    if kind == Path | None:
        return _path(value)
    return _texts(value) if kind == tuple[str, ...] else _text(value)


def expected(kind: object, meaning: Meaning) -> str:
    """What a setting takes, in words."""
    if kind is int or kind is float:
        return _expected_number(kind is int, meaning)
    if isinstance(kind, type) and issubclass(kind, enum.StrEnum):
        return "one of " + ", ".join(kind)
    if kind == Path | None:
        return "the path of a file"
    return "a list of texts" if kind == tuple[str, ...] else "a text"


def _number(value: object, *, whole: bool, meaning: Meaning) -> float:
    number = _parsed(value, meaning.unit)
    if number is None or not math.isfinite(number) or (whole and not float(number).is_integer()):
        raise Unfit(_expected_number(whole, meaning))
    low = meaning.least is not None and number < meaning.least
    high = meaning.most is not None and number > meaning.most
    if low or high or (meaning.above is not None and number <= meaning.above):
        raise Unfit(_expected_number(whole, meaning))
    return int(number) if whole else float(number)


def _parsed(value: object, unit: str) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    text, factor = str(value).strip(), 1.0
    for suffix, size in _UNITS.get(unit, {}).items():
        if text.endswith(suffix):
            text, factor = text.removesuffix(suffix).rstrip(), size
            break
    try:
        return float(text) * factor
    except ValueError:
        return None


def _expected_number(whole: bool, meaning: Meaning) -> str:
    words = ["a whole number" if whole else "a number"]
    if meaning.unit:
        words.append(f"of {meaning.unit}")
    if meaning.above is not None:
        words.append(f"above {meaning.above:g}")
    if meaning.least is not None and meaning.most is not None:
        words.append(f"from {meaning.least:g} to {meaning.most:g}")
    elif meaning.least is not None:
        words.append(f", at least {meaning.least:g}")
    return " ".join(words).replace(" ,", ",")


def _word(value: object, kind: type[enum.StrEnum]) -> enum.StrEnum:
    if isinstance(value, bool):  # YAML reads a bare on or off as a truth value
        value = "on" if value else "off"
    try:
        return kind(value.strip().lower() if isinstance(value, str) else "")
    except ValueError:
        raise Unfit("one of " + ", ".join(kind)) from None


def _path(value: object) -> Path | None:
    if value is None or value == "":
        return None
    if not isinstance(value, str):
        raise Unfit("the path of a file")
    return Path(value)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise Unfit("a text")
    return value.strip()


def _texts(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        value = [part for part in value.split(",") if part.strip()]
    if not isinstance(value, list) or not all(isinstance(part, str) for part in value):
        raise Unfit("a list of texts")
    return tuple(part.strip() for part in cast(list[str], value))
