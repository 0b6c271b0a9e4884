"""Decode nodes that cannot wait for their tickets: the legs of every request follow one another."""

import pytest

from tests.fakes.node import FakeNode


@pytest.fixture(autouse=True)
def in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the module that imports it."""
    monkeypatch.setattr(FakeNode, "can_wait", False)
