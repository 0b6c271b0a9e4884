"""Request ids, and the headers that are passed on to nodes."""

import pytest

from pdproxy.intake.auth import headers_for_node, request_id
from pdproxy.settings.types import Credential

CAME = (
    ("host", "front"),
    ("connection", "keep-alive, X-Private"),
    ("x-private", "1"),
    ("authorization", "Bearer sk-client"),
    ("cookie", "a=b"),
    ("content-length", "3"),
    ("content-type", "text/plain"),
    ("accept", "text/plain"),
    ("transfer-encoding", "chunked"),
    ("x-pdproxy-anything", "1"),
    ("x-data-parallel-rank", "1"),
    ("x-tenant", "blue"),
    ("traceparent", "00-1-1-01"),
)


def test_only_end_to_end_headers_are_passed_on() -> None:
    names = dict(headers_for_node(CAME, dict(CAME), "req-1", Credential.NONE, ""))
    assert names == {
        "x-tenant": "blue",
        "traceparent": "00-1-1-01",
        "x-request-id": "req-1",
    }


@pytest.mark.parametrize(
    ("credential", "expected"),
    [(Credential.PASS, "Bearer sk-client"), (Credential.REPLACE, "Bearer ours"), (Credential.NONE, None)],
)
def test_the_credential_is_the_operators_choice(credential: Credential, expected: str | None) -> None:
    assert dict(headers_for_node(CAME, dict(CAME), "req-1", credential, "ours")).get("authorization") == expected


@pytest.mark.parametrize("theirs", ["abc-1", "a" * 128, "A.b:c_d"])
def test_a_usable_request_id_is_kept(theirs: str) -> None:
    assert request_id({"x-request-id": theirs}, iter(["new"])) == theirs


@pytest.mark.parametrize("theirs", ["", "a" * 129, "with space", 'quote"', "line\nbreak", "é"])
def test_any_other_request_id_is_replaced(theirs: str) -> None:
    assert request_id({"x-request-id": theirs}, iter(["new"])) == "req-new"
