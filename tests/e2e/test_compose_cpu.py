"""The services of `docker compose --profile cpu up`, run without containers, answer by hand-overs."""

import os
import signal
from collections.abc import Iterator

import pytest

from deploy.local.model.quiz import quiz, recite
from deploy.local.stack import logs_of
from deploy.local.supervise import Supervisor
from deploy.local.watchdog import parents
from tests.e2e.composed import Composed, Running, chat, healthy, start
from tests.e2e.metrics_reader import watch

pytestmark = [pytest.mark.e2e, pytest.mark.own_engines]


@pytest.fixture(scope="module")
def composed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Composed]:
    """All services of the profile, healthy. Logs: `.run/e2e-compose`."""
    with Supervisor(logs_of("e2e-compose")) as supervisor:
        yield start(supervisor, tmp_path_factory.mktemp("compose"))


def tell(running: Running) -> None:
    """Send SIGTERM to the first process, as a container engine does."""
    [first] = [pid for pid, parent in parents().items() if parent == running.part.process.pid]
    os.kill(first, signal.SIGTERM)


def test_the_proxy_is_there_while_the_nodes_still_load(composed: Composed) -> None:
    assert composed.order[0] == "cpu-proxy"


def test_a_chat_is_answered_by_both_nodes(composed: Composed) -> None:
    question = quiz(901, 900)
    pulled = watch(composed.urls["cpu-decode"], "prompt_tokens", source="pulled")
    with chat(composed, question) as told:
        assert "".join(told) == question.answer
    pulled.reaches(1)


def test_all_stay_healthy(composed: Composed) -> None:
    assert all(healthy(each.container) for each in composed.running.values())


def test_all_end_in_time_when_they_are_told_to_and_cut_no_stream(composed: Composed) -> None:
    """A container engine kills what still runs after its grace period."""
    question = recite(902, 900, 30)
    with chat(composed, question) as told:
        begun = next(told)
        for each in composed.running.values():
            tell(each)
        assert begun + "".join(told) == question.answer
    for each in composed.running.values():
        assert each.part.process.wait(each.container.grace) == 0, each.part.last_lines()
