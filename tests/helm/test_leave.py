"""The script that a node runs before it ends, against a small proxy."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from tests.fakes.http_server import QuietHandler, served
from tests.helm.engine import CHART

SCRIPT = (CHART / "files" / "leave.py").read_text().replace("EVERY = 2.0", "EVERY = 0.02").replace("= 60.0", "= 0.3")
SCRIPT = SCRIPT.replace("/proc/1/fd/1", "/nonexistent/log")
GO: tuple[int, object] = (200, {"leave": True, "why": "enough stay"})
STAY: tuple[int, object] = (200, {"leave": False, "why": "d2 joins"})


@contextmanager
def proxy(answers: Sequence[tuple[int, object]]) -> Iterator[tuple[str, list[str]]]:
    """One that gives these answers in turn, the last one again and again; its address, and what it was asked."""
    asked: list[str] = []

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            status, said = answers[min(len(asked), len(answers) - 1)]
            asked.append(self.path)
            self.answer_json(status, said)

    with served(Handler) as address:
        yield address, asked


def leave(address: str, most: float = 30, pause: float = 0, **more: str) -> str:
    """Run it as a pod does; what it says."""
    command = [sys.executable, "-c", SCRIPT, address, "8000", str(most), str(pause)]
    environment = {**os.environ, "POD_IP": "10.0.0.7", "no_proxy": "127.0.0.1", **more}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout


def test_it_goes_after_three_answers_in_a_row_that_it_may() -> None:
    with proxy([GO, STAY, GO, GO, STAY, GO]) as (address, asked):
        said = leave(address)
    assert asked == ["/may-leave?host=10.0.0.7&port=8000"] * 8
    assert said.splitlines() == ["pdproxy preStop: waits: d2 joins", "pdproxy preStop: goes: enough stay"]


def test_it_waits_no_longer_than_said() -> None:
    with proxy([STAY]) as (address, _):
        assert "goes: it has waited 0.2 s" in leave(address, 0.2)


@pytest.mark.parametrize("answer", [(500, {}), (200, {"leave": True}), (200, [])])
def test_a_proxy_that_answers_nothing_useful_is_waited_for_a_while(answer: tuple[int, object]) -> None:
    with proxy([answer]) as (address, asked):
        assert "goes: no answer" in leave(address)
    assert len(asked) > 3


def test_a_proxy_that_is_gone_is_waited_for_a_while() -> None:
    with proxy([GO]) as (address, _):
        pass
    assert "goes: no answer" in leave(address)


def test_an_older_proxy_is_not_waited_for() -> None:
    with proxy([(404, {})]) as (address, asked):
        assert "goes: the proxy is of a version" in leave(address)
    assert len(asked) == 3


def test_machines_of_one_node_ask_for_their_leader() -> None:
    with proxy([GO]) as (address, asked):
        leave(address, LWS_LEADER_ADDRESS="10.0.0.9")
    assert set(asked) == {"/may-leave?host=10.0.0.9&port=8000"}


def test_then_tickets_get_their_time() -> None:
    began = time.monotonic()
    with proxy([GO]) as (address, _):
        leave(address, pause=0.5)
    assert time.monotonic() - began >= 0.5
