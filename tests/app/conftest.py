"""Traces of a start in this process are taken away again."""

import logging
from collections.abc import Iterator

import pytest

from pdproxy.observe.logs import JsonFormatter, TextFormatter


@pytest.fixture(autouse=True)
def no_handler_stays() -> Iterator[None]:
    """A handler on a stream that pytest has closed raises in every later record: a traceback each, on every request."""
    root, ours = logging.getLogger(), logging.getLogger("pdproxy")
    levels = root.level, ours.level
    yield
    for handler in list(root.handlers):
        if isinstance(handler.formatter, JsonFormatter | TextFormatter):
            root.removeHandler(handler)
    root.setLevel(levels[0])
    ours.setLevel(levels[1])
