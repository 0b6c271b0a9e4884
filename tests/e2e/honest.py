"""An honest hand-over, to show that two nodes still work together."""

from deploy.local.model.exam import Exam
from tests.e2e.legs import complete, prefill
from tests.e2e.meters import watch


def hand_over(give: str, take: str, question: Exam) -> None:
    """Prefill here, decode there: the answer is right, and the read was verified, not computed."""
    verified, ended = watch(take, "reads", outcome="verified"), watch(take, "reads")
    assert complete(take, question.prompt(), params=prefill(give, question.prompt())).text == question.answer
    ended.reaches(1)
    assert verified.grown() == 1
