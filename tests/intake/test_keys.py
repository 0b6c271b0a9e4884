"""API keys."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from pdproxy.errors import ClientError, SettingsError
from pdproxy.intake.auth import ANONYMOUS, ApiKey, ApiKeys, OpenRequests, parse_key_lines, priority_of, read_keys
from pdproxy.observe.metrics import Metrics
from pdproxy.planning.shares import KeyLimits

KEYS = ApiKeys(parse_key_lines(["# ours", "", "sk-one alice 3", "sk-two  # no name"]))


@pytest.mark.parametrize(
    ("header", "value", "api_key"),
    [
        ("authorization", "Bearer sk-one", ApiKey("alice", KeyLimits(open=3))),
        ("authorization", "bearer  sk-one ", ApiKey("alice", KeyLimits(open=3))),
        ("x-api-key", "sk-two", ApiKey("line-4")),
    ],
)
def test_a_known_key_is_accepted(header: str, value: str, api_key: ApiKey) -> None:
    assert KEYS.api_key({header: value}) == api_key


@pytest.mark.parametrize("value", ["Bearer sk-three", "Bearer", "", "Basic sk-one", "sk-one", "Bearer sk-one extra"])
def test_any_other_key_is_refused(value: str) -> None:
    with pytest.raises(ClientError) as caught:
        KEYS.api_key({"authorization": value})
    assert caught.value.status == 401
    assert ("www-authenticate", "Bearer") in caught.value.headers


def test_without_keys_every_request_is_accepted() -> None:
    assert read_keys(None).api_key({}) is ANONYMOUS


def limits_of(*lines: str) -> KeyLimits:
    """The limits of the key `k`."""
    return ApiKeys(parse_key_lines(lines)).api_key({"x-api-key": "k"}).limits


def test_limits_stand_after_the_name() -> None:
    line = "k a weight=2.5 open=9 concurrency=3 requests_per_minute=60 input_tokens_per_minute=200k"
    assert limits_of(f"{line} output_tokens_per_minute=1M  # what it may") == KeyLimits(
        2.5, 9, 3, 60, 200_000, 1_000_000
    )


def test_keys_of_one_name_have_their_limits_together() -> None:
    whole = KeyLimits(weight=2.0, open=7, concurrency=3)
    assert limits_of("k a weight=2 7", "other a concurrency=3 weight=2.0", "third b weight=9") == whole
    keys = ApiKeys(parse_key_lines(["k a 7", "other a"]))
    assert keys.limits.of_key("a") == KeyLimits(open=7)
    assert keys.names() == {"a"}


@pytest.mark.parametrize(
    ("limits", "why"),
    [
        ("0", "open must be a whole number of 1 or more"),
        ("two", "open must be"),
        ("-1", "open must be"),
        ("1 2", "open is another on an earlier line"),
        ("weight=0", "weight must be a number above 0"),
        ("weight=-1", "weight must be"),
        ("weight=nan", "weight must be"),
        ("weight=1e9", "weight must be"),
        ("concurrency=", "concurrency must be"),
        ("concurrency=1.5", "concurrency must be"),
        ("input_tokens_per_minute=200K", "must be a whole number of 1 or more, such as 200 or 200k"),
        ("tokens=5", "there is no such limit. Limits are weight, open, concurrency, requests_per_minute"),
        ("concurrency=9", "concurrency is another on an earlier line"),
    ],
)
def test_a_wrong_line_is_named_by_number_and_never_quoted(tmp_path: Path, limits: str, why: str) -> None:
    path = tmp_path / "keys"
    path.write_text(f"fine a concurrency=8\nsecret-word a {limits}\n")
    with pytest.raises(SettingsError, match="line 2") as caught:
        read_keys(path)
    assert why in str(caught.value)
    assert "secret-word" not in str(caught.value)


def test_limits_without_a_name_are_refused() -> None:
    """The first of them would be the name, and bound nothing."""
    with pytest.raises(SettingsError, match=r"line 2: there is no name before the limits; write 'key \[name"):
        parse_key_lines(["fine a", "secret-word concurrency=1 weight=2"])


def test_other_keys_and_limits_take_the_place_of_the_ones_in_use() -> None:
    keys = ApiKeys(parse_key_lines(["k a concurrency=1"]))
    limits = keys.limits
    keys.replace(ApiKeys(parse_key_lines(["k a concurrency=2", "l b"])))
    assert limits.of_key("a").concurrency == 2
    assert keys.api_key({"x-api-key": "l"}).name == "b"


def test_a_file_without_keys_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# nobody\n")
    with pytest.raises(SettingsError, match="holds no key"):
        read_keys(path)
    with pytest.raises(SettingsError, match="cannot be read"):
        read_keys(tmp_path / "absent")


@contextmanager
def one_open(limits: OpenRequests, api_key: ApiKey) -> Iterator[None]:
    """A request of a key is open while inside."""
    limits.check(api_key)
    limits.add(api_key.name)
    yield
    limits.remove(api_key.name)


@pytest.mark.parametrize(
    ("api_key", "key_limit"),
    [(ApiKey("k", KeyLimits(open=1)), 0), (ApiKey("k"), 1), (ApiKey("k", KeyLimits(open=1)), 9)],
)
def test_a_key_has_its_own_limit(api_key: ApiKey, key_limit: int) -> None:
    registry = CollectorRegistry()
    limits = OpenRequests(key_limit, Metrics(registry))
    with one_open(limits, api_key), one_open(limits, ApiKey("other", KeyLimits(open=1))):
        with pytest.raises(ClientError, match="1 requests open") as caught, one_open(limits, api_key):
            pass
        assert (caught.value.status, dict(caught.value.headers)) == (429, {"retry-after": "1"})
        assert registry.get_sample_value("pdproxy_rejected_total", {"reason": "key_limit"}) == 1
    with one_open(limits, api_key):
        pass


def test_who_has_no_key_has_no_limit() -> None:
    limits = OpenRequests(1, Metrics(CollectorRegistry()))
    with one_open(limits, ANONYMOUS), one_open(limits, ANONYMOUS):
        pass


@pytest.mark.parametrize(
    ("said", "body", "priority"),
    [
        (None, 0, 0),
        (None, -2, -2),
        ("3", -2, 3),
        (" -4 ", 0, -4),
        ("high", 7, 7),
        ("9" * 5000, 0, 0),
    ],
)
def test_the_priority_is_the_headers_else_the_bodys(said: str | None, body: int, priority: int) -> None:
    assert priority_of({"x-vllm-priority": said} if said else {}, body) == priority
