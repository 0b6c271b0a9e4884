"""The fixtures of tests/connector that the tests here use too."""

from tests.connector.conftest import every_pace

__all__ = ["every_pace"]
