"""API keys."""

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from pdproxy.errors import ClientError, SettingsError
from pdproxy.intake.auth import ANONYMOUS, ApiKey, ApiKeys, OpenRequests, parse_key_lines, read_keys
from pdproxy.intake.auth import priority_of
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
    assert KEYS.api_key(((header, value),)) == api_key


@pytest.mark.parametrize("value", ["Bearer sk-three", "Bearer", "", "Basic sk-one", "sk-one", "Bearer sk-one extra"])
def test_any_other_key_is_refused(value: str) -> None:
    with pytest.raises(ClientError) as caught:
        KEYS.api_key((("authorization", value),))
    assert caught.value.status == 401
    assert ("www-authenticate", "Bearer") in caught.value.headers


def test_without_keys_every_request_is_accepted() -> None:
    assert read_keys(None).api_key(()) is ANONYMOUS


@pytest.mark.parametrize("line", ["secret-word a 0", "secret-word a two", "secret-word a 1 more", "secret-word a -1"])
def test_a_wrong_line_is_named_by_number_and_never_quoted(tmp_path: Path, line: str) -> None:
    path = tmp_path / "keys"
    path.write_text(f"fine\n{line}\n")
    with pytest.raises(SettingsError, match="line 2") as caught:
        read_keys(path)
    assert "secret-word" not in str(caught.value)


def test_a_file_without_keys_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# nobody\n")
    with pytest.raises(SettingsError, match="holds no key"):
        read_keys(path)
    with pytest.raises(SettingsError, match="cannot be read"):
        read_keys(tmp_path / "absent")


@pytest.mark.parametrize(
    ("api_key", "key_limit"),
    [(ApiKey("k", KeyLimits(open=1)), 0), (ApiKey("k"), 1), (ApiKey("k", KeyLimits(open=1)), 9)],
)
def test_a_key_has_its_own_limit(api_key: ApiKey, key_limit: int) -> None:
    registry = CollectorRegistry()
    limits = OpenRequests(key_limit, Metrics(registry))
    with limits.one_open(api_key), limits.one_open(ApiKey("other", KeyLimits(open=1))):
        with pytest.raises(ClientError, match="1 requests open") as caught, limits.one_open(api_key):
            pass
        assert (caught.value.status, dict(caught.value.headers)) == (429, {"retry-after": "1"})
        assert registry.get_sample_value("pdproxy_rejected_total", {"reason": "key_limit"}) == 1
    with limits.one_open(api_key):
        pass


def test_who_has_no_key_has_no_limit() -> None:
    limits = OpenRequests(1, Metrics(CollectorRegistry()))
    with limits.one_open(ANONYMOUS), limits.one_open(ANONYMOUS):
        pass


@pytest.mark.parametrize(
    ("said", "body", "priority"),
    [
        (None, {}, 0),
        (None, {"priority": None}, 0),
        (None, {"priority": -2}, -2),
        ("3", {"priority": -2}, 3),
        (" -4 ", {}, -4),
        ("high", {"priority": 7}, 7),
        ("9" * 5000, {}, 0),
    ],
)
def test_the_priority_is_the_headers_else_the_bodys(said: str | None, body: dict[str, object], priority: int) -> None:
    assert priority_of((("x-vllm-priority", said),) if said else (), body) == priority
