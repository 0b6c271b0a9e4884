"""Comparing answers: which differences rounding explains, and which it does not."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdproxy.orchestration.answers_agree import FLOOR, MOST, OWN_SPREADS, ScoredAnswer, compare, distance


def said(*tokens: int, off: float = 0.0, shown: int = 4) -> ScoredAnswer:
    """Each token the likeliest; the second likeliest is ``off`` nats from where it is usually."""
    return ScoredAnswer(
        tokens, [{f"t{token + rank}": -float(rank) - (rank == 1) * off for rank in range(shown)} for token in tokens]
    )


def test_the_same_answers_lie_nowhere_apart() -> None:
    far = distance(said(1, 2, 3), said(1, 2, 3))
    assert (far.nats, far.greatest, far.compared) == (0.0, 0.0, 3)


def test_the_distance_is_the_root_mean_square() -> None:
    assert distance(said(1, 2), said(1, 2, off=0.5)).nats == pytest.approx(math.sqrt(0.25 / 4))
    assert distance(said(1, 2), said(1, 2, off=0.5)).greatest == pytest.approx(0.5)


def test_after_tokens_that_differ_nothing_is_compared() -> None:
    one = ScoredAnswer((1, 5, 9), said(1, 5, 9).top_logprobs)
    other = ScoredAnswer((1, 6, 3), [said(1).top_logprobs[0], said(5).top_logprobs[0], said(500).top_logprobs[0]])
    far = distance(one, other)
    assert (far.compared, far.nats) == (2, 0.0)


def test_a_token_that_one_does_not_show_is_at_most_its_least_likely_one() -> None:
    one, other = ScoredAnswer((1,), [{"a": -0.1, "b": -3.0}]), ScoredAnswer((1,), [{"a": -0.1, "c": -2.0}])
    far = distance(one, other)
    assert far.greatest == pytest.approx(1.0), "c is at most -3 in the one; b may be less likely than -2 in the other"
    assert far.nats == pytest.approx(math.sqrt(1 / 3))


@pytest.mark.parametrize(
    "broken", [ScoredAnswer((), []), ScoredAnswer((1,), [{}]), ScoredAnswer((1,), [{"t1": math.nan}])]
)
def test_answers_without_numbers_are_infinitely_far_apart(broken: ScoredAnswer) -> None:
    comparison = compare(broken, said(1), said(1))
    assert comparison.distance.nats == math.inf
    assert not comparison.agrees()


def test_rounding_is_allowed_and_more_is_not() -> None:
    assert compare(said(1, 2, off=2 * FLOOR), said(1, 2), said(1, 2)).agrees()
    assert not compare(said(1, 2, off=2.1 * FLOOR), said(1, 2), said(1, 2)).agrees()


def test_a_node_that_rounds_more_is_allowed_more() -> None:
    alone, again = said(1, 2), said(1, 2, off=0.4)
    comparison = compare(said(1, 2, off=1.6), alone, again)
    assert comparison.allowed == pytest.approx(OWN_SPREADS * 0.2)
    assert comparison.agrees()
    assert not compare(said(1, 2, off=-2.4), alone, again).agrees()


def test_a_node_that_changes_its_own_answers_too_much_proves_nothing() -> None:
    alone, again = said(1, 2), said(1, 2, off=0.6)
    assert compare(said(1, 2, off=1.9), alone, again).agrees()
    apart = compare(said(1, 2, off=9.0), alone, again)
    assert apart.allowed == MOST
    assert not apart.agrees()
    assert apart.undecided()
    assert not compare(said(1, 2, off=9.0), alone, said(1, 2, off=0.4)).undecided()


def test_the_nearer_of_the_two_counts() -> None:
    assert compare(said(1, off=0.4), said(1), said(1, off=0.4)).distance.nats == 0


def test_the_sentence_has_the_figures() -> None:
    tokens = (1, 2, 3)
    other = ScoredAnswer(tokens, [*said(1, 2).top_logprobs, *said(3, off=3.0).top_logprobs])
    assert compare(other, said(*tokens), said(*tokens)).sentence() == (
        "log-probabilities differ by 0.866 nats (root mean square over 3 tokens; allowed are 0.25), at most by 3 at"
        " answer token 3; alone the decode node's answers, computed in two ways, differ by 0"
    )


_SAID = st.builds(
    lambda tokens, values: ScoredAnswer(tokens, [{str(at): value for at, value in enumerate(values)} for _ in tokens]),
    st.lists(st.integers(0, 3), min_size=1, max_size=5),
    st.lists(st.floats(-30, 0), min_size=1, max_size=5),
)


@given(_SAID, _SAID)
def test_a_distance_is_the_same_both_ways(one: ScoredAnswer, other: ScoredAnswer) -> None:
    there, back = distance(one, other), distance(other, one)
    assert there.nats == pytest.approx(back.nats)
    assert there.nats >= 0
    assert distance(one, one).nats == 0
