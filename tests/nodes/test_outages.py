"""Log lines about nodes that cannot be reached."""

import logging

import pytest

from pdproxy.errors import Fault, NodeFault
from pdproxy.nodes.join import OutageLog
from pdproxy.nodes.node import Node, Role
from pdproxy.nodes.preflight import cause, symptom
from tests.fakes.clock import FakeClock

NODE = Node("d1", "http://d1:8000", (Role.DECODE,))
REFUSED = NodeFault(Fault.REFUSED, "d1:8000: connection refused")

FIRST = (
    "node d1 cannot be reached: d1:8000: connection refused. It gets no requests until it answers; "
    "every health check tries again"
)


@pytest.fixture
def log(clock: FakeClock, caplog: pytest.LogCaptureFixture) -> OutageLog:
    caplog.set_level(logging.INFO)
    return OutageLog(clock)


def minutes_of_lines(log: OutageLog, clock: FakeClock, caplog: pytest.LogCaptureFixture, hours: int) -> list[float]:
    """When lines are written, in minutes, of a node that is asked every second and never answers."""
    began, found = clock.now(), []
    for _ in range(hours * 3600):
        log.failed(NODE, REFUSED)
        found += [(clock.now() - began) / 60 for _ in caplog.messages]
        caplog.clear()
        clock.advance(1)
    return found


def test_it_is_logged_at_once_and_then_rarely(
    log: OutageLog, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    assert minutes_of_lines(log, clock, caplog, 2) == [0, 1, 5, 30, 60, 90]


def test_the_lines_are_sentences(log: OutageLog, clock: FakeClock, caplog: pytest.LogCaptureFixture) -> None:
    log.failed(NODE, REFUSED)
    clock.advance(60)
    log.failed(NODE, NodeFault(Fault.HEADERS_TIMEOUT, "d1:8000: nothing came for 5 s"))
    assert caplog.messages == [
        FIRST,
        "node d1 still cannot be reached, for 1 min now: d1:8000: nothing came for 5 s",
    ]
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]


def test_of_a_node_that_is_down_the_first_line_is_the_pools(
    log: OutageLog, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    log.down(NODE, REFUSED)
    assert caplog.messages == []
    clock.advance(60)
    log.down(NODE, REFUSED)
    assert caplog.messages == ["node d1 still cannot be reached, for 1 min now: d1:8000: connection refused"]


def test_the_next_outage_is_a_new_one(log: OutageLog, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        log.failed(NODE, REFUSED)
        log.preflight_succeeded(NODE)
    assert caplog.messages == [FIRST, FIRST]


def test_a_node_that_left_is_forgotten(log: OutageLog, caplog: pytest.LogCaptureFixture) -> None:
    log.failed(NODE, REFUSED)
    log.retain(["d2"])
    log.failed(NODE, REFUSED)
    assert caplog.messages == [FIRST, FIRST]


@pytest.mark.parametrize("status", [401, 403])
def test_a_credential_that_is_missing_names_its_setting(status: int) -> None:
    fault = NodeFault(Fault.SERVER_ERROR, f"/v1/models answers {status}", status=status)
    assert symptom(fault) == "cannot be used"
    assert cause(fault).startswith(f"/v1/models answers {status}: the proxy's own requests need a credential")
    assert "upstream.credential_file" in cause(fault)


def test_what_a_node_answers_wrongly_is_not_called_out_of_reach() -> None:
    fault = NodeFault(Fault.SERVER_ERROR, "/health answers 503", status=503)
    assert (symptom(fault), cause(fault)) == ("cannot be used", "/health answers 503")
    assert symptom(NodeFault(Fault.RESET, "")) == symptom(NodeFault(Fault.HEADERS_TIMEOUT, "")) == "cannot be reached"
