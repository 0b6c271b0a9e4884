"""Settings from a YAML file."""

from collections.abc import Hashable
from pathlib import Path

import yaml

from pdproxy.errors import SettingsError
from pdproxy.settings.given import Given, Said, did_you_mean
from pdproxy.settings.leaves import Leaf, leaves, node_leaves, sections


class _Loader(yaml.SafeLoader):
    """YAML without the silent loss: of two equal keys the first would be forgotten."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, object]:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        twice = next((key for key in keys if keys.count(key) > 1), None)
        if twice is not None:
            raise yaml.constructor.ConstructorError(None, None, f"{twice!r} is there twice", node.start_mark)
        return super().construct_mapping(node, deep)


def read_file(path: Path) -> Given:
    """What a file says.

    Raises:
        SettingsError: it cannot be read, is not YAML, or names a setting that does not exist.
    """
    where = f"the file {path}"
    tree = _mapping(_parse(path), where, "the file")
    known = sections()
    values: dict[str, Said] = {}
    for section, fields in tree.items():
        if section == "nodes":
            continue
        if section not in known:
            raise SettingsError(f"{where}: there is no section {section!r}." + did_you_mean(section, [*known, "nodes"]))
        for name, value in _mapping(fields, where, section).items():
            values[f"{section}.{name}"] = Said(value, where)
    _refuse_unknown(values, leaves(), where)
    return Given(values, _nodes(tree.get("nodes"), where))


def _parse(path: Path) -> object:
    try:
        return yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except OSError as error:
        raise SettingsError(f"the file {path} cannot be read: {error.strerror}.") from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise SettingsError(f"the file {path} is not YAML: {error}") from error


def _mapping(value: object, where: str, what: str) -> dict[str, object]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise SettingsError(f"{where}: {what} must map names to values, not be {value!r}.")
    return {str(key): each for key, each in value.items()}


def _nodes(value: object, where: str) -> tuple[dict[str, Said], ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise SettingsError(f"{where}: nodes must be a list of entries with url and role.")
    nodes = []
    for position, entry in enumerate(value):
        place = f"{where}, nodes[{position}]"
        node = {name: Said(each, place) for name, each in _mapping(entry, where, f"nodes[{position}]").items()}
        _refuse_unknown(node, node_leaves(), place)
        nodes.append(node)
    return tuple(nodes)


def _refuse_unknown(values: dict[str, Said], known: tuple[Leaf, ...], where: str) -> None:
    keys = {leaf.key for leaf in known}
    for key in values:
        if key not in keys:
            raise SettingsError(f"{where}: there is no setting {key!r}." + did_you_mean(key, keys))
