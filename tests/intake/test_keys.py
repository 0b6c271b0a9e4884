"""API keys."""

from pathlib import Path

import pytest

from pdproxy.errors import ClientError, SettingsError
from pdproxy.intake.auth import ANONYMOUS, ApiKey, ApiKeys, parse_key_lines, read_keys

KEYS = ApiKeys(dict(parse_key_lines(["# ours", "", "sk-one alice 3", "sk-two  # no name"])))


@pytest.mark.parametrize(
    ("header", "value", "api_key"),
    [
        ("authorization", "Bearer sk-one", ApiKey("alice", 3)),
        ("authorization", "bearer  sk-one ", ApiKey("alice", 3)),
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
