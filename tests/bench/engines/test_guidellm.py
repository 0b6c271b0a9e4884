"""Arguments of guidellm, and the figures in a report that it wrote (0.8.1, three requests to one engine; cut down)."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deploy.bench.engines.guidellm import TRIES, LostReportError, answers, scenario, until_reported
from deploy.bench.engines.loads import LOADS, MIXED, ONE, Question, Shape, questions, rows
from deploy.bench.rounds import BenchError

RECORDED = Path(__file__).parents[1] / "data" / "guidellm.json"
SHAPE = Shape("recorded", 800, 64)


@pytest.fixture
def report() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RECORDED.read_text(encoding="utf-8"))
    return found


def requests(report: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = report["benchmarks"][0]["requests"]["successful"]
    return found


def asked(report: dict[str, Any]) -> list[Question]:
    bodies = [json.loads(each["request_args"])["body"] for each in requests(report)]
    told = [each["output"] + "and so on" for each in requests(report)]
    return [Question(SHAPE, body["prompt"], text) for body, text in zip(bodies, told, strict=True)]


def test_the_times_of_each_request_are_read(report: dict[str, Any]) -> None:
    first, second, third = answers(report, asked(report))
    assert (first.first_token, second.first_token, third.first_token) == pytest.approx((83.18, 58.30, 52.03), abs=0.01)
    assert first.inter_token == pytest.approx(4.55, abs=0.01)
    assert (first.tokens, first.shape, first.right) == (64, SHAPE, True)
    assert first.ended - first.began == pytest.approx(0.370, abs=0.001)


def test_they_come_in_the_order_in_which_they_were_sent(report: dict[str, Any]) -> None:
    wanted = answers(report, asked(report))
    requests(report).reverse()
    assert answers(report, asked(report)) == wanted


def test_a_text_that_the_model_should_not_say_is_wrong(report: dict[str, Any]) -> None:
    wanted = asked(report)
    wanted[1] = wanted[1]._replace(answer=" 000\n")
    assert [each.right for each in answers(report, wanted)] == [True, False, True]


def _fails(report: dict[str, Any]) -> None:
    failed = copy.deepcopy(requests(report)[0])
    failed["info"]["error"] = "ReadError: the connection was lost"
    report["benchmarks"][0]["requests"]["errored"] = [failed]


def _is_missing(report: dict[str, Any]) -> None:
    del requests(report)[0]


def _is_cut(report: dict[str, Any]) -> None:
    requests(report)[0]["output_tokens"] = 63


def _has_no_text(report: dict[str, Any]) -> None:
    requests(report)[0]["time_to_first_token_ms"] = None


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_fails, "1 failed: ReadError: the connection was lost"),
        (_is_missing, "tells of 2 of 3 requests, and of no failure"),
        (_is_cut, "63 tokens instead of 64"),
        (_has_no_text, "first token after None ms"),
    ],
)
def test_a_request_that_failed_leaves_no_figures(
    report: dict[str, Any], spoil: Callable[[dict[str, Any]], None], said: str
) -> None:
    wanted = asked(report)
    spoil(report)
    with pytest.raises(BenchError, match=said) as found:
        answers(report, wanted)
    assert isinstance(found.value, LostReportError) is (spoil is _is_missing)


def test_the_tool_is_told_everything_that_is_to_be_equal(tmp_path: Path) -> None:
    spec = scenario("http://127.0.0.1:1", MIXED, tmp_path)["spec"]
    assert spec["profile"] == {"kind": "constant", "rate": [5.0]}
    assert {each["kind"]: each for each in spec["constraints"]}["max_requests"]["count"] == MIXED.requests
    assert spec["backend"]["extras"] == {"body": {"temperature": 0}}


def test_no_two_runs_share_a_prompt_and_each_is_the_same_again() -> None:
    prompts = [each.prompt for load in LOADS.values() for run in (1, 2) for each in questions(load, run)]
    assert questions(MIXED, 1) == questions(MIXED, 1)
    of_one_load = [each.prompt for run in (1, 2) for each in questions(ONE, run)]
    assert len(set(of_one_load)) == 2 * ONE.requests
    assert len(prompts) == 2 * sum(load.requests for load in LOADS.values())


def test_answers_are_longer_than_what_is_asked_for() -> None:
    for load in LOADS.values():
        for each, row in zip(questions(load, 1), rows(questions(load, 1)).splitlines(), strict=True):
            assert json.loads(row) == {"prompt": each.prompt, "output_tokens_count": each.shape.answer}
            assert 5 * (each.answer.count("\n")) - 1 > each.shape.answer


def test_a_smaller_load_has_all_shapes() -> None:
    small = MIXED.sized(0.01)
    assert {each.shape for each in questions(small, 1)[small.first :]} == set(MIXED.shapes)
    assert MIXED.sized(1.0) == MIXED


def test_only_a_lost_report_is_tried_again() -> None:
    said = list[str]()
    failures: list[BenchError] = [LostReportError("one is missing"), LostReportError("another one")]

    def attempt() -> str:
        if failures:
            raise failures.pop(0)
        return "answers"

    assert until_reported(attempt, said.append) == "answers"
    assert [line.partition(";")[0] for line in said] == ["one is missing", "another one"]
    failures[:] = [LostReportError("lost")] * TRIES
    with pytest.raises(LostReportError):
        until_reported(attempt, said.append)
    failures[:] = [BenchError("a request failed")]
    with pytest.raises(BenchError, match="a request failed"):
        until_reported(attempt, said.append)
    assert len(said) == 2 + TRIES - 1
