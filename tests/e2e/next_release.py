"""Our connector as another release's image has it: the same code, with another version.

A node loads this module instead of `connector.nixl_connector`. The environment has the version.
"""

import os

from connector import nixl_connector
from connector.nixl_connector import NixlConnector

__all__ = ["NixlConnector"]

vars(nixl_connector)["__version__"] = os.environ["PDPROXY_TEST_RELEASE"]
