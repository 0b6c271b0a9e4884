"""In a checkout, `pdproxy_connector` is the folder `connector`: one set of modules under both names.

The wheel `pdproxy-connector` installs that folder as `pdproxy_connector`, the name in compose, the chart and the docs.
A development environment has the folder itself and this file instead. If both names were loaded as modules of their
own, a test's connector and our plugins would have different classes of the same name in one process.
"""

import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

import connector

INSTALLED = __name__
FOLDER = connector.__name__


class FolderFinder(MetaPathFinder, Loader):
    """Finds `pdproxy_connector.x` as the module `connector.x`."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:  # noqa: ARG002 - importlib's signature
        """None for all other names."""
        if not name.startswith(f"{INSTALLED}."):
            return None
        return ModuleSpec(name, self, loader_state=import_module(FOLDER + name.removeprefix(INSTALLED)).__spec__)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The module that is there already."""
        return sys.modules[FOLDER + spec.name.removeprefix(INSTALLED)]

    def exec_module(self, module: ModuleType) -> None:
        """Give it its own spec back: the import machinery has replaced it. The module itself ran when it was found."""
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


sys.meta_path.insert(0, FolderFinder())
sys.modules[INSTALLED] = connector
