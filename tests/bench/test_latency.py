"""One request at a time: what is timed, and that a wrong answer is no figure."""

import pytest

from deploy.bench.latency import WrongAnswerError, measure
from deploy.bench.node import Book
from deploy.bench.script import TOKENS, Line
from tests.bench.test_load import Indulgent, serving


@pytest.mark.parametrize("line", [Line.COMPLETIONS, Line.CHAT])
async def test_both_ways_are_timed(line: Line) -> None:
    async with serving(Indulgent()) as proxy, serving(Book()) as node:
        direct, proxied = await measure(line, 3, node, node, [proxy])
    for timed in (direct, proxied):
        assert len(timed.first) == 3
        assert len(timed.gaps) + timed.merged == 3 * (TOKENS - 1)
        assert all(0.0 <= each < 1000.0 for each in (*timed.first, *timed.gaps))


async def test_a_wrong_answer_is_an_error() -> None:
    async with serving(Book()) as node:
        with pytest.raises(WrongAnswerError, match="prefilled elsewhere"):
            await measure(Line.COMPLETIONS, 1, node, node, [node])
