"""Each key's running prompts, and which keys run more than their shares."""

from hypothesis import given
from hypothesis import strategies as st

from pdproxy.planning.shares import (
    NO_LIMITS,
    PRESENT_SECONDS,
    KeyLimits,
    KeyShares,
    LimitsByKey,
    ShareUse,
)


def shares_of(**weights: float) -> KeyShares:
    """The shares of keys that all ask at second 0."""
    shares = KeyShares(LimitsByKey({key: KeyLimits(weight=weight) for key, weight in weights.items()}))
    for key in weights:
        shares.asked(key, 0.0)
    return shares


def over(shares: KeyShares, key: str, now: float) -> bool:
    return shares.share_use(key, now) is ShareUse.OVER


def test_a_key_alone_may_have_everything() -> None:
    shares = shares_of(a=1.0)
    shares.began("a", 1000.0)
    assert not over(shares, "a", 1.0)


def test_a_key_that_runs_everything_is_over_its_share_as_soon_as_another_asks() -> None:
    shares = shares_of(a=1.0, b=1.0)
    assert not over(shares, "a", 0.0), "it runs nothing"
    shares.began("a", 10.0)
    assert over(shares, "a", 0.0)
    shares.began("b", 10.0)
    assert not over(shares, "a", 0.0), "half is its share"
    shares.began("a", 1.0)
    assert over(shares, "a", 0.0)
    shares.ended("a", 10.0)
    assert not over(shares, "a", 0.0)


def test_a_share_is_used_up_where_one_more_prompt_would_be_more_than_that() -> None:
    shares = shares_of(a=1.0, b=1.0)
    shares.began("b", 12.0)
    assert shares.share_use("a", 0.0) is ShareUse.WITHIN, "it runs nothing"
    shares.began("a", 10.0)
    assert shares.share_use("a", 0.0) is ShareUse.FULL
    shares.began("b", 12.0)
    assert shares.share_use("a", 0.0) is ShareUse.WITHIN
    assert shares.share_use("b", 0.0) is ShareUse.OVER
    assert shares.share_use("a", PRESENT_SECONDS + 0.1) is ShareUse.WITHIN, "nobody asks any more"


def test_shares_are_by_weight_and_follow_new_weights() -> None:
    limits = LimitsByKey({"a": KeyLimits(weight=3.0)})
    shares = KeyShares(limits)
    for key in "ab":
        shares.asked(key, 0.0)
    shares.began("a", 30.0)
    shares.began("b", 10.0)
    assert (over(shares, "a", 0.0), over(shares, "b", 0.0)) == (False, False)
    limits.replace(LimitsByKey({"b": KeyLimits(weight=3.0)}))
    assert (over(shares, "a", 0.0), over(shares, "b", 0.0)) == (True, False)


def test_a_key_that_asks_no_more_counts_no_more() -> None:
    shares = shares_of(a=1.0, b=1.0)
    shares.began("a", 10.0)
    shares.asked("a", PRESENT_SECONDS)
    assert over(shares, "a", PRESENT_SECONDS)
    assert not over(shares, "a", PRESENT_SECONDS + 0.1)
    shares.asked("b", PRESENT_SECONDS + 0.2)
    assert over(shares, "a", PRESENT_SECONDS + 0.3)


def test_keys_whose_prompts_are_longer_than_the_others_are_known() -> None:
    shares = KeyShares(LimitsByKey())
    for _ in range(100):
        shares.asked("flood", 0.0, 300)
    assert not shares.asks_longer("flood"), "it is alone"
    shares.asked("quiet", 0.0, 100)
    assert (shares.asks_longer("flood"), shares.asks_longer("quiet")) == (True, False)
    for _ in range(100):
        shares.asked("quiet", PRESENT_SECONDS, 500)
    assert (shares.asks_longer("flood"), shares.asks_longer("quiet")) == (False, True)
    shares.asked("third", 2 * PRESENT_SECONDS, 900)
    shares.began("third", 1.0)
    assert over(shares, "third", 2 * PRESENT_SECONDS)
    assert (shares.asks_longer("flood"), shares.asks_longer("quiet"), shares.asks_longer("third")) == (
        False, False, True,
    )  # fmt: skip


def test_a_keys_own_limit_counts_its_prompts() -> None:
    limits = LimitsByKey({"a": KeyLimits(concurrency=2)})
    shares = KeyShares(limits)
    for cost in (1.0, 5.0):
        assert shares.may_run("a")
        shares.began("a", cost)
    assert not shares.may_run("a")
    assert shares.may_run("b")
    limits.replace(LimitsByKey({"a": KeyLimits(concurrency=3)}))
    assert shares.may_run("a")
    limits.replace(LimitsByKey())
    assert shares.may_run("a")
    assert limits.of_key("a") is NO_LIMITS


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 100)), max_size=40))
def test_not_all_keys_are_over_their_shares_and_nothing_is_left(prompts: list[tuple[str, int]]) -> None:
    shares = shares_of(a=1.0, b=2.0, c=5.0)
    for key, cost in prompts:
        shares.began(key, float(cost))
        assert not all(over(shares, each, 0.0) for each in "abc")
    for key, cost in prompts:
        shares.ended(key, float(cost))
    assert not any(over(shares, key, 0.0) or shares.running(key) for key in "abc")
    assert not shares._costs
