"""Every request that ends anywhere in these tests leaves a log line that says how."""

import logging
from collections.abc import Iterator

import pytest

from pdproxy.reasons import NoNodeReason

ACCESS_LOG = logging.getLogger("pdproxy.orchestration.access_log")
WITHOUT_NODE = {NoNodeReason.NO_DECODE, NoNodeReason.EXCLUDED, "deadline", "shutting_down"}
"""Codes of errors that may come where no node works on a request."""


class Lines(logging.Handler):
    """Keeps records."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture(autouse=True)
def access_log() -> Iterator[list[logging.LogRecord]]:
    """The lines of requests; at the test's end, those of failed ones are found to be warnings that say why."""
    lines = Lines()
    level = ACCESS_LOG.level
    ACCESS_LOG.addHandler(lines)
    ACCESS_LOG.setLevel(logging.INFO)
    yield lines.records
    ACCESS_LOG.removeHandler(lines)
    ACCESS_LOG.setLevel(level)
    for record in lines.records:
        check(vars(record))


def check(line: dict[str, object]) -> None:
    """A line tells what its outcome needs."""
    failed = line["outcome"] == "failed"
    assert line["levelname"] == ("WARNING" if failed else "INFO"), line
    if line["outcome"] in ("ok", "client_gone"):
        assert "status" not in line, line
        return
    assert line["request_id"], line
    assert "model" in line, line
    assert isinstance(line["status"], int), line
    assert line["code"] not in ("", "internal_error"), line
    assert line["reason"], line
    if failed and "tried" in line:
        assert line["node"], line
        assert line["fault"], line
        assert line["detail"], line
    if failed and "node" not in line:
        assert line["code"] in WITHOUT_NODE, line
