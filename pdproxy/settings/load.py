"""From all sources to one valid `Settings`, or to a message for each fault: which source gave it, what would work."""

import contextlib
import functools
import itertools
import operator
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from pdproxy.errors import SettingsError
from pdproxy.settings.catalog import did_you_mean, every_setting, node_settings, sections
from pdproxy.settings.model import Settings
from pdproxy.settings.sources import CONFIG, EnvironmentSource, FlagSource, Location, SettingsSource
from pdproxy.settings.types import UNSHOWN


def load(
    flags: FlagSource | None = None, config: Path | None = None, environment: Mapping[str, str] | None = None
) -> Settings:
    """The settings: flags over the environment over the file over the defaults.

    Args:
        config: the file; where None, the one that ``PDPROXY_CONFIG`` names, if it names one.
        environment: None is empty.

    Raises:
        SettingsError: something that was given cannot be used; one line for each fault.
    """
    variables = environment or {}
    path = config or (Path(variables[CONFIG]) if variables.get(CONFIG) else None)
    by_precedence = (flags, EnvironmentSource(variables), _file(path) if path else None)
    sources = tuple(source for source in by_precedence if source is not None)
    faults = [fault for source in sources for fault in source.faults]
    try:
        settings = Settings(_build_sources=(sources, {}))  # type: ignore[call-arg] # BaseSettings' own
    except ValidationError as error:
        faults += [_message(each, sources) for each in error.errors(include_url=False)]
    if faults:
        raise SettingsError("\n".join(dict.fromkeys(faults)))
    return settings


def _file(path: Path) -> SettingsSource:
    from pdproxy.settings.yaml_file import YamlSource

    return YamlSource(path)


def _message(error: ErrorDetails, sources: Sequence[SettingsSource]) -> str:
    """One fault: where the value stands, what is wrong with it, what would work."""
    location, kind = error["loc"], error["type"]
    if kind == "value_error" and location[0] in sections() and len(location) == 1:
        return str(error["ctx"]["error"])  # of a section as a whole, which several sources may have filled
    setting = location[:-1] if kind == "missing" else location[: 3 if location[0] == "nodes" else 2]
    source, written, value = _origin(setting, sources)
    whole = (*written, *location[len(written) :])
    place = source.where(whole if location[0] == "nodes" else location[:2])  # of a list, not of what is in it
    return f"{place}: {_complaint(error, value)}"


def _origin(location: Location, sources: Sequence[SettingsSource]) -> tuple[SettingsSource, Location, Any]:
    """The first of the sources that has a value at a location; the location and the value as they were written."""
    short = tuple("role" if each == "roles" else each for each in location)
    for source, path in itertools.product(sources, (location, short)):
        with contextlib.suppress(LookupError, TypeError):
            return source, path, functools.reduce(operator.getitem, path, source())  # type: ignore[arg-type]
    raise LookupError(f"no source has {location}")


def _complaint(error: ErrorDetails, value: object) -> str:
    location = error["loc"]
    key = _key(location)
    match error["type"]:
        case "extra_forbidden":
            return _unknown(location)
        case "missing":
            return f"a node needs {location[-1]}."
        case "path_not_file":
            return f"{key}: there is no file {value}."
        case kind if kind == UNSHOWN:
            return f"{key} must be {error['msg']}."
        case "value_error" if location == ("nodes",):
            return str(error["ctx"]["error"])
    known = node_settings() if location[0] == "nodes" else every_setting()
    setting = next((each for each in known if each.key == key), None)
    if setting is not None:
        meant = setting.meant(value)
        return f"{key} must be {setting.takes}, not {value!r}." + (f" Write {meant}." if meant else "")
    if len(location) > 1:
        return f"{key} must map names to values, not be {value!r}."
    return "nodes must be a list of entries with url and roles."


def _unknown(location: Location) -> str:
    """An unknown name: suggests the nearest one of its section, or the nearest of all, or lists its section."""
    if len(location) == 1:
        names = {name: name for name in (*sections(), "nodes")}
        return f"there is no section {location[0]!r}." + did_you_mean(str(location[0]), names, _there_are(names))
    of_node = location[0] == "nodes"
    everywhere = node_settings() if of_node else every_setting()
    here = {each.name: each.key for each in everywhere if of_node or each.section == location[0]}
    others = {each.name: each.key for each in everywhere}
    name = str(location[-1])
    near = did_you_mean(name, here) or did_you_mean(name, others, _there_are(here.values()))
    return f"there is no setting {_key(location)!r}.{near}"


def _there_are(names: Iterable[str]) -> str:
    return f" There are {', '.join(names)}."


def _key(location: Location) -> str:
    """A setting's name in messages: "limits.body_bytes"; "url" of a node, whose place says which node it is."""
    if location[0] == "nodes" and len(location) > 1:
        return str(location[2]) if len(location) > 2 else "a node"
    return ".".join(str(each) for each in location[:2])
