"""Warnings that the engine's own imports raise are not ours to mend; everything else stays an error."""

import pytest

from tests.connector.conftest import FOREIGN


def pytest_configure(config: pytest.Config) -> None:
    """The same exceptions as for the connector's tests."""
    for line in FOREIGN:
        config.addinivalue_line("filterwarnings", line)
