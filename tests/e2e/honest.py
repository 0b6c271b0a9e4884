"""An honest hand-over, to show that two nodes still work together."""

from collections.abc import Iterable

from deploy.local.model.exam import Exam
from tests.e2e.legs import complete, prefill
from tests.e2e.meters import watch


def hand_over(give: str, take: str, questions: Iterable[Exam]) -> None:
    """Ask one question after the other until a read was verified; every answer must be right.

    Several, since on a very busy machine a deadline of the connector may pass, and the decode node computes.
    """
    verified = watch(take, "reads", outcome="verified")
    for question in questions:
        ended = watch(take, "reads")
        assert complete(take, question.prompt(), params=prefill(give, question.prompt())).text == question.answer
        ended.reaches(1)
        if verified.grown():
            return
    raise AssertionError("no read was verified")
