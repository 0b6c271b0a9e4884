"""Requests and tokens of a key in a minute."""

import pytest
from prometheus_client import CollectorRegistry

from pdproxy.errors import ClientError
from pdproxy.intake.auth import ApiKey
from pdproxy.intake.rate_limits import RateCharge, RateLimits, TokenBucket, duration
from pdproxy.observe.labels import Rejection
from pdproxy.observe.metrics import Metrics
from pdproxy.orchestration.client_errors import TurnedAway
from pdproxy.planning.shares import KeyLimits
from tests.fakes.clock import FakeClock

INPUT = KeyLimits(input_tokens_per_minute=6000)
BOTH = KeyLimits(requests_per_minute=60, input_tokens_per_minute=6000, output_tokens_per_minute=600)


class Setup:
    """The buckets of one key."""

    def __init__(self, limits: KeyLimits) -> None:
        self.clock = FakeClock()
        self.registry = CollectorRegistry()
        self.rates = RateLimits(self.clock, Metrics(self.registry))
        self.limits = limits

    def charge_request(self) -> RateCharge:
        charge = self.rates.charge_request(ApiKey("k", self.limits))
        assert charge is not None
        return charge

    def ask(self, prompt: int, answers: int = 0) -> RateCharge:
        """One that is answered."""
        charge = self.charge_request()
        charge.expect(prompt, answers)
        charge.confirm()
        return charge

    def refused(self, prompt: int = 1, answers: int = 0) -> ClientError:
        with pytest.raises(ClientError) as caught:
            self.ask(prompt, answers)
        return caught.value


def test_a_bucket_fills_evenly_and_no_further_than_a_minutes_worth() -> None:
    bucket = TokenBucket(600, 0.0)
    bucket.spend(600, 0.0)
    assert bucket.level(3.0) == pytest.approx(30)
    assert bucket.seconds_until(100, 3.0) == pytest.approx(7.0)
    assert bucket.level(1000.0) == 600
    bucket.spend(700, 1000.0)
    assert bucket.seconds_until(1, 1000.0) == pytest.approx(10.1), "a debt"


def test_a_request_that_is_larger_than_the_bucket_goes_when_that_is_full() -> None:
    setup = Setup(INPUT)
    setup.ask(20_000).settle()
    assert int(dict(setup.refused().headers)["retry-after"]) == 141
    setup.clock.advance(199)
    assert dict(setup.refused(20_000).headers)["retry-after"] == "1"
    setup.clock.advance(1)
    setup.ask(20_000)


def test_without_such_limits_there_is_nothing_to_charge() -> None:
    assert Setup(INPUT).rates.charge_request(ApiKey("k", KeyLimits(weight=2.0, concurrency=1, open=1))) is None


def test_a_refusal_says_what_openais_says() -> None:
    setup = Setup(BOTH)
    setup.ask(5000, 10)
    error = setup.refused(1500)
    assert (error.status, error.kind, error.code) == (429, "tokens", "rate_limit_exceeded")
    assert isinstance(error, TurnedAway)
    assert error.limit is Rejection.INPUT_RATE
    assert error.message == (
        "Rate limit of this API key reached on input tokens per minute: limit 6000, left 1000, wanted 1500. "
        "Try again in 5 s."
    )
    assert dict(error.headers) == {
        "retry-after": "5",
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "58",
        "x-ratelimit-reset-requests": "2s",
        "x-ratelimit-limit-tokens": "6000",
        "x-ratelimit-remaining-tokens": "1000",
        "x-ratelimit-reset-tokens": "50s",
    }
    assert setup.registry.get_sample_value("pdproxy_rejected_total", {"reason": "input_rate"}) == 1
    labels = {"key": "k", "reason": "input_rate"}
    assert setup.registry.get_sample_value("pdproxy_key_rejected_total", labels) == 1


def test_the_tokens_that_are_shown_are_those_of_the_tightest_limit() -> None:
    setup = Setup(BOTH)
    shown = dict(setup.ask(600, 300).headers())
    assert (shown["x-ratelimit-limit-tokens"], shown["x-ratelimit-remaining-tokens"]) == ("600", "300")


def test_requests_are_counted_when_they_come() -> None:
    setup = Setup(KeyLimits(requests_per_minute=2))
    for _ in range(2):
        setup.charge_request().settle()
    error = setup.refused()
    assert (error.kind, dict(error.headers)["retry-after"]) == ("requests", "30")
    setup.clock.advance(30)
    setup.charge_request()


def test_what_a_request_really_cost_takes_the_place_of_what_was_expected() -> None:
    setup = Setup(BOTH)
    charge = setup.ask(3000, 500)
    charge.used(1000, 10)
    charge.used(500, 20)
    charge.settle()
    left = dict(setup.ask(0).headers())
    assert (left["x-ratelimit-limit-tokens"], left["x-ratelimit-remaining-tokens"]) == ("6000", "4500")


def test_a_longer_answer_than_expected_leaves_a_debt() -> None:
    setup = Setup(BOTH)
    charge = setup.ask(10, 100)
    charge.used(10, 900)
    charge.settle()
    error = setup.refused(1, 0)
    assert "output tokens per minute" in error.message
    assert dict(error.headers)["retry-after"] == "31", "300 to pay, and one token for whoever comes"
    setup.clock.advance(31)
    setup.ask(1)


def test_one_that_was_not_answered_costs_no_tokens_and_one_that_nobody_counted_what_was_expected() -> None:
    setup = Setup(INPUT)
    failed = setup.charge_request()
    failed.expect(6000, 0)
    failed.settle()
    setup.ask(5000).settle()
    assert dict(setup.refused(1500).headers)["retry-after"] == "5"


def test_new_limits_hold_at_once_and_what_was_taken_stays_so() -> None:
    setup = Setup(INPUT)
    setup.ask(5000)
    setup.limits = KeyLimits(input_tokens_per_minute=12_000, output_tokens_per_minute=60)
    assert dict(setup.ask(0).headers())["x-ratelimit-remaining-tokens"] == "7000"
    setup.limits = KeyLimits(input_tokens_per_minute=60)
    assert dict(setup.refused().headers)["retry-after"] == "4941"
    setup.limits = KeyLimits(requests_per_minute=5)
    setup.ask(10**6)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0ms"), (0.0121, "13ms"), (6.5, "6.5s"), (60, "1m0s"), (90.25, "1m30.25s")]
)
def test_durations_are_written_as_openai_writes_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text
