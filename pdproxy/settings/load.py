"""From all sources to one valid `Settings`, or to a message for each fault: who gave what, and what would work."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from pdproxy.errors import SettingsError
from pdproxy.settings.catalog import Setting, did_you_mean, every_setting, node_settings, sections
from pdproxy.settings.model import Settings
from pdproxy.settings.sources import CONFIG, EnvironmentSource, FileSource, FlagSource, Location, Source
from pdproxy.settings.types import UNSHOWN


def load(
    flags: FlagSource | None = None, config: Path | None = None, environment: Mapping[str, str] | None = None
) -> Settings:
    """The settings: flags over the environment over the file over the defaults.

    Args:
        flags: the command line.
        config: the file; where None, the one that ``PDPROXY_CONFIG`` names, if it names one.
        environment: the process's, or a test's; None is empty.

    Raises:
        SettingsError: something that was given cannot be used; one line for each fault.
    """
    variables = environment or {}
    path = config or (Path(variables[CONFIG]) if variables.get(CONFIG) else None)
    by_strength = (flags, EnvironmentSource(variables), FileSource(path) if path else None)
    sources = tuple(source for source in by_strength if source is not None)
    faults = [fault for source in sources for fault in source.faults]
    try:
        made = Settings(_build_sources=(sources, {}))  # type: ignore[call-arg] # BaseSettings' own
    except ValidationError as error:
        faults += [_sentence(each, sources) for each in error.errors(include_url=False)]
    if faults:
        raise SettingsError("\n".join(dict.fromkeys(faults)))
    return made


def _sentence(error: ErrorDetails, sources: Sequence[Source]) -> str:
    """One fault: where the value stands, what is wrong with it, what would work."""
    location, kind = error["loc"], error["type"]
    if kind == "value_error" and location[0] in sections() and len(location) == 1:
        return str(error["ctx"]["error"])  # of a section as a whole, which several sources may have filled
    whole = location[:-1] if kind == "missing" else location[: 3 if location[0] == "nodes" else 2]
    source = next(each for each in sources if _has(each(), whole))
    return f"{source.place(location)}: {_complaint(error, _value(source(), whole))}"


def _complaint(error: ErrorDetails, value: object) -> str:
    location = error["loc"]
    match error["type"]:
        case "extra_forbidden":
            return _unknown(location)
        case "missing":
            return f"a node needs {location[-1]}."
        case "path_not_file":
            return f"{_key(location)}: there is no file {value}."
        case kind if kind == UNSHOWN:
            return f"{_key(location)} must be {error['msg']}."
        case "value_error" if location == ("nodes",):
            return str(error["ctx"]["error"])
    setting = _setting(location)
    if setting is not None:
        return f"{setting.key} must be {setting.takes}, not {value!r}."
    if len(location) > 1:
        return f"{_key(location)} must map names to values, not be {value!r}."
    return "nodes must be a list of entries with url and role."


def _unknown(location: Location) -> str:
    """A name that nothing has: the nearest one in its section, the nearest of all, or what there is in its section."""
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


def _setting(location: Location) -> Setting | None:
    """The setting that a value is of, or is a part of."""
    known = node_settings() if location[0] == "nodes" else every_setting()
    return next((each for each in known if each.key == _key(location)), None)


def _key(location: Location) -> str:
    """As messages name a setting: "limits.body_bytes"; of a node, whose place says which it is: "url"."""
    if location[0] == "nodes" and len(location) > 1:
        return str(location[2]) if len(location) > 2 else "a node"
    return ".".join(str(each) for each in location[:2])


def _has(values: Any, location: Location) -> bool:
    try:
        _value(values, location)
    except (LookupError, TypeError):
        return False
    return True


def _value(values: Any, location: Location) -> Any:
    """What was written at a location. Raises LookupError or TypeError: nothing was."""
    for step in location:
        values = values[step]
    return values
