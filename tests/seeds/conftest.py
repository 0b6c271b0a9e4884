"""The tests of the seeds run at every pace, as the connector's do."""

from tests.connector.conftest import every_pace

__all__ = ["every_pace"]
