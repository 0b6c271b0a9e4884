"""Names of a request's session."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdproxy.intake.session import LONGEST_KEY, session_of

SOURCES = ["x-session-affinity", "x-session-id", "prompt_cache_key", "x-correlation-id", "user"]
"""The first that a request has is its key."""


def session(tenant: str = "t", **named: object) -> int | None:
    fields = {name.replace("_", "-") if name.startswith("x_") else name: value for name, value in named.items()}
    headers = {name: str(value) for name, value in fields.items() if name.startswith("x-")}
    return session_of(headers, {name: value for name, value in fields.items() if not name.startswith("x-")}, tenant)


@pytest.mark.parametrize("place", range(len(SOURCES)))
def test_the_first_of_the_sources_counts(place: int) -> None:
    from_here = {name: name for name in SOURCES[place:]}
    headers = {name: value for name, value in from_here.items() if name.startswith("x-")}
    body = {name: value for name, value in from_here.items() if not name.startswith("x-")}
    assert session_of(headers, body, "t") == session(user=SOURCES[place])


def test_a_request_that_names_none_has_none() -> None:
    assert session_of({"x-request-id": "r"}, {"model": "m"}, "t") is None


@pytest.mark.parametrize("unusable", ["", "  ", 7, None, {"a": 1}, "k" * (LONGEST_KEY + 1)])
def test_what_is_no_key_is_passed_over(unusable: object) -> None:
    assert session(prompt_cache_key=unusable) is None
    assert session(prompt_cache_key=unusable, user="u") == session(user="u")


def test_a_key_of_the_greatest_length_counts() -> None:
    assert session(user="k" * LONGEST_KEY) is not None


def test_tenants_do_not_meet() -> None:
    assert session("one", user="u") != session("other", user="u")
    assert session("one", user="u") == session("one", x_session_id="u")


@given(st.text(max_size=LONGEST_KEY + 10), st.text(max_size=20))
def test_a_session_is_a_number_of_64_bits(key: str, tenant: str) -> None:
    """Anything that JSON may hold has one, lone surrogates too."""
    found = session(tenant, user=key)
    assert found is None or 0 <= found < 2**64


def test_a_lone_surrogate_is_a_key_like_any_other() -> None:
    assert session(user="\ud800") is not None
