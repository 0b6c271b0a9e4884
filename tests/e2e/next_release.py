"""Our connector as another release's image has it: the same code, which calls itself by another version.

A node loads this module in the place of `connector.nixl_connector`, with the version in its environment.
"""

import os

from connector import nixl_connector
from connector.nixl_connector import NixlConnector

__all__ = ["NixlConnector"]

vars(nixl_connector)["__version__"] = os.environ["PDPROXY_TEST_RELEASE"]
