"""What the supervisor asks of one worker; its answers are played here."""

import pytest

from pdproxy.settings.model import Settings
from pdproxy.workers.worker import Answer, NoAnswerError, OperatorRequest, Worker

ADDED = OperatorRequest("POST", "/nodes", {}, b"{}")


class SlowWorker(Worker):
    """Runs until it was asked ``lives`` times, and answers from the third time on."""

    def __init__(self, lives: int) -> None:
        super().__init__(0, Settings())
        self.lives = lives
        self.asked: list[OperatorRequest] = []

    @property
    def runs(self) -> bool:
        return len(self.asked) < self.lives

    async def ask(self, request: OperatorRequest) -> Answer:
        self.asked.append(request)
        if len(self.asked) < 3:
            raise NoAnswerError("timed out")
        return Answer(201, {}, b"")


async def test_a_worker_too_slow_to_answer_is_told_again() -> None:
    worker = SlowWorker(lives=9)
    assert (await worker.ask_again(ADDED)).ok
    assert worker.asked == [ADDED] * 3


async def test_a_worker_that_has_ended_is_not_told_again() -> None:
    worker = SlowWorker(lives=2)
    with pytest.raises(NoAnswerError):
        await worker.ask_again(ADDED)
    assert worker.asked == [ADDED] * 2
