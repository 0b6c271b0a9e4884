"""When an answer counts as the same, as different where that tells nothing, and as wrong."""

import pytest

from deploy.gpu.answers import compared, moved
from deploy.gpu.asking import Known, Verdict, from_json, long_prompt, texts, to_json
from deploy.gpu.attacks import forgeries
from deploy.local.model.quiz import recite

KNOWN = Known("?", "one two three", ("one", " two", " three"), (5.0, 0.1, 5.0))
GROWN = {"reads": 4.0, "verified": 4.0, "attention": 9.0, "state": 3.0, "local": 0.0, "recomputed": 0.0}


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("one two three", Verdict.SAME),
        ("one too three", Verdict.UNDECIDED),
        ("one", Verdict.UNDECIDED),
        ("One two three", Verdict.WRONG),
        ("one two thr33", Verdict.WRONG),
        ("one two three four", Verdict.WRONG),
        ("", Verdict.WRONG),
    ],
)
def test_a_difference_counts_where_the_one_engine_was_certain(text: str, verdict: Verdict) -> None:
    assert KNOWN.compare(text) is verdict


def test_one_wrong_answer_fails_and_shows_itself() -> None:
    check = compared("same", [(KNOWN, KNOWN.text)] * 9 + [(KNOWN, "no")])
    assert not check.holds
    assert "9 same, 0 undecided, 1 wrong" in check.detail
    assert "'no'" in check.detail


def test_answers_that_tell_nothing_do_not_pass() -> None:
    assert compared("same", [(KNOWN, KNOWN.text), (KNOWN, "one x")]).holds
    assert not compared("same", [(KNOWN, KNOWN.text), (KNOWN, "one x"), (KNOWN, "one y")]).holds


@pytest.mark.parametrize(
    ("change", "failing"),
    [
        ({}, []),
        ({"verified": 3.0}, ["every prompt was handed over"]),
        ({"verified": 3.0, "reads": 3.0}, ["every prompt was handed over"]),
        ({"recomputed": 1.0}, ["no prompt was computed twice"]),
        ({"local": 1.0}, ["no prompt was computed twice"]),
        ({"attention": 0.0}, ["attention blocks moved"]),
        ({"state": 0.0}, ["mamba states moved"]),
    ],
)
def test_counters_show_what_was_handed_over(change: dict[str, float], failing: list[str]) -> None:
    assert [check.name for check in moved(GROWN | change, 4, states=True) if not check.holds] == failing


def test_a_model_without_states_has_none_to_move() -> None:
    assert all(check.holds for check in moved(GROWN | {"state": 0.0}, 4, states=False))


def test_prompts_are_the_tiny_models_and_grow_beyond_them() -> None:
    assert long_prompt(7, 300, 8) == recite(7, 300, 8).prompt()
    short, long = (len(long_prompt(7, tokens, 8)) for tokens in (2000, 8000))
    assert 3.5 < long / short < 4.5
    assert long_prompt(7, 2151, 8).endswith(" =")
    assert long_prompt(7, 8000, 8) != long_prompt(8, 8000, 8)


def test_answers_are_kept_in_a_file() -> None:
    assert from_json(to_json([KNOWN])) == [KNOWN]


def test_an_error_in_a_stream_is_raised() -> None:
    assert list(texts('data: {"choices": [{"text": "a"}, {"text": ""}]}')) == ["a", ""]
    assert list(texts(": comment")) == list(texts("data: [DONE]")) == []
    with pytest.raises(ValueError, match="gone"):
        list(texts('data: {"error": {"message": "gone"}}'))


def test_every_forgery_differs_from_the_good_ticket_which_stays_as_it_is() -> None:
    good = {"remote_request_id": "a", "remote_host": "h", "pdproxy": {"readers": 1, "signature": "s", "v": 2}}
    before = repr(good)
    forged = list(forgeries(good, {"remote_request_id": "b"}))
    assert len(forged) == 8
    assert all(forgery.ticket != good for forgery in forged)
    assert repr(good) == before
