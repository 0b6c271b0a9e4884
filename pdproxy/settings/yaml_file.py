"""A YAML file as a source of settings. Imported only where there is one: PyYAML takes a thirtieth of the start.

It is parsed here rather than by pydantic-settings' own source, which takes a file that is missing for an empty one,
forgets the first of two equal keys, and knows no line numbers.
"""

from collections.abc import Hashable
from pathlib import Path

import yaml
from pydantic_settings import InitSettingsSource

from pdproxy.errors import SettingsError
from pdproxy.settings.catalog import sections
from pdproxy.settings.model import Settings
from pdproxy.settings.sources import Location


class YamlSource(InitSettingsSource):
    """A YAML file.

    Attributes:
        faults: a sentence for each section that is no mapping.

    Raises:
        SettingsError: it cannot be read, is not YAML, or holds no mapping.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        values, self._root = _parsed(path)
        values = {} if values is None else values
        if not isinstance(values, dict):
            raise SettingsError(f"the file {path}: the file must map names to values, not be {values!r}.")
        values = {name: value for name, value in values.items() if value is not None}
        odd = [name for name in sections() if not isinstance(values.get(name, {}), dict)]
        self.faults = [f"{self.where((n,))}: {n} must map names to values, not be {values.pop(n)!r}." for n in odd]
        super().__init__(Settings, values)

    def where(self, location: Location) -> str:
        """A place like ``the file a.yaml, line 3, nodes[0]``."""
        node = f", nodes[{location[1]}]" if location[0] == "nodes" and len(location) > 1 else ""
        return f"the file {self._path}, line {_line(self._root, location)}{node}"


class _Loader(yaml.SafeLoader):
    """YAML whose keys are all texts, and in which a key that stands twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, object]:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        twice = next((key for key in keys if keys.count(key) > 1), None)
        if twice is not None:
            raise yaml.constructor.ConstructorError(None, None, f"{twice!r} is there twice", node.start_mark)
        return {str(key): value for key, value in super().construct_mapping(node, deep).items()}


def _parsed(path: Path) -> tuple[object, yaml.Node | None]:
    """The contents of a file, and the syntax tree that they were made from."""
    try:
        loader = _Loader(path.read_text(encoding="utf-8"))
        root = loader.get_single_node()
        return (None if root is None else loader.construct_document(root)), root
    except OSError as error:
        raise SettingsError(f"the file {path} cannot be read: {error.strerror}.") from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise SettingsError(f"the file {path} is not YAML: {error}") from error


def _line(node: yaml.Node | None, location: Location) -> int:
    """The line of a value, or of the deepest key on the way to it that the file has."""
    line = 1
    for step in location:
        if isinstance(node, yaml.SequenceNode) and isinstance(step, int):
            node = node.value[step]
            line = node.start_mark.line + 1
        elif isinstance(node, yaml.MappingNode):
            found = [(key, value) for key, value in node.value if key.value == step]
            if not found:
                break
            key, node = found[-1]
            line = key.start_mark.line + 1
    return line
