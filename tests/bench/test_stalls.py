"""A decode node that dies or freezes costs its streams little time: the whole proxy, and nodes that are processes."""

import signal

import pytest

from deploy.bench.stalls import measure

MOST = {signal.SIGKILL: 5.0, signal.SIGSTOP: 8.0}
"""Seconds on a machine that is busy elsewhere; on one that is not, 0.1 s and 1.8 s. By probes at their interval alone a
frozen node would cost 16 s."""


@pytest.mark.timeout(120)
@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.long)])
async def test_streams_leave_a_node_that_dies_or_freezes(number: signal.Signals) -> None:
    measured = await measure(number, 2, seed=3)
    assert measured.ended.keys() == {"right"}
    assert [stall for stall in measured.stalls if stall.seconds > MOST[number]] == []
    assert (measured.probes["given_up"] >= 2) == (number is signal.SIGSTOP)
