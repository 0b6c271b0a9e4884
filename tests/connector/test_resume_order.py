"""Resume orders: made by a node's API server, believed by its engine alone, each for one request."""

from typing import Any

import pytest

from connector.config import KEYS_VARIABLE, SECRET_VARIABLE, ConfigError, set_node_secret
from connector.resume_order import KEY, LARGEST_ID, node_secret, sign, verify, without_order
from connector.ticket_fields import Refusal, RefusalReason

SECRET = b"s" * 32
IDS = [0, 5, 70_000, LARGEST_ID]


def params(**changes: Any) -> dict[str, Any]:
    return {KEY: sign(SECRET, "req-1", IDS) | changes}


def refusal(given: Any, secret: bytes = SECRET, request_id: str = "req-1") -> RefusalReason | None:
    found = verify(secret, request_id, given)
    return found.reason if isinstance(found, Refusal) else None


def test_an_order_gives_its_request_the_ids() -> None:
    assert verify(SECRET, "req-1", params()) == IDS
    assert verify(SECRET, "req-1", {KEY: sign(SECRET, "req-1", [])}) == []


@pytest.mark.parametrize("given", [None, {}, {"do_remote_prefill": True}, [KEY], KEY, 7])
def test_params_without_an_order(given: Any) -> None:
    assert verify(SECRET, "req-1", given) is None
    assert without_order(given) == given


@pytest.mark.parametrize(
    "order",
    [
        None,
        [],
        "x",
        {},
        {"token_ids": IDS},
        {"mac": "0" * 64},
        {"token_ids": "12", "mac": "0" * 64},
        {"token_ids": [1, True], "mac": "0" * 64},
        {"token_ids": [1, -1], "mac": "0" * 64},
        {"token_ids": [1, LARGEST_ID + 1], "mac": "0" * 64},
        {"token_ids": [1, 2.0], "mac": "0" * 64},
        {"token_ids": [[1]], "mac": "0" * 64},
        {"token_ids": [1], "mac": "é" * 64},
        {"token_ids": [1], "mac": 7},
        {"token_ids": [1], "mac": None},
    ],
)
def test_what_is_no_order_is_refused_and_not_overlooked(order: Any) -> None:
    assert refusal({KEY: order}) in (RefusalReason.NOT_AN_OBJECT, RefusalReason.BAD_FIELD)


@pytest.mark.parametrize(
    "changes",
    [{"token_ids": IDS[:-1]}, {"token_ids": [*IDS, 1]}, {"token_ids": [1, *IDS[1:]]}, {"mac": "0" * 64}, {"mac": ""}],
)
def test_a_changed_order_is_refused(changes: dict[str, Any]) -> None:
    assert refusal(params(**changes)) is RefusalReason.BAD_SIGNATURE


def test_an_order_is_good_for_its_request_on_its_node() -> None:
    assert refusal(params(), request_id="req-2") is RefusalReason.BAD_SIGNATURE
    assert refusal(params(), secret=b"t" * 32) is RefusalReason.BAD_SIGNATURE


def test_bytes_do_not_move_between_the_request_id_and_the_ids() -> None:
    mac = sign(SECRET, "req", [0x31313131])["mac"]
    assert refusal({KEY: {"token_ids": [], "mac": mac}}, request_id="req1111") is RefusalReason.BAD_SIGNATURE


@pytest.mark.parametrize("ids", [[-1], [LARGEST_ID + 1], [True], ["1"]])
def test_ids_that_cannot_be_ordered_are_not_signed(ids: list[Any]) -> None:
    with pytest.raises(ValueError, match="whole numbers"):
        sign(SECRET, "req-1", ids)


def test_what_stands_beside_the_order_is_left() -> None:
    ticket = {"do_remote_prefill": True, "remote_port": 7}
    assert without_order({**ticket, **params()}) == ticket
    assert without_order(params()) is None


def test_the_first_process_sets_the_secret_and_the_others_have_it() -> None:
    first: dict[str, str] = {}
    set_node_secret(first)
    child = dict(first)
    set_node_secret(child)
    other: dict[str, str] = {}
    set_node_secret(other)
    assert node_secret(child) == node_secret(first) != node_secret(other)


def test_the_ticket_keys_of_the_environment_make_the_same_secret_everywhere() -> None:
    here, there = {KEYS_VARIABLE: "k" * 16}, {KEYS_VARIABLE: " " + "k" * 16 + ", another" * 3}
    set_node_secret(here)
    set_node_secret(there)
    assert node_secret(here) == node_secret(there)
    assert b"k" * 16 not in node_secret(here)


def test_the_operator_s_own_is_kept() -> None:
    environ = {SECRET_VARIABLE: "o" * 20, KEYS_VARIABLE: "k" * 16}
    set_node_secret(environ)
    assert node_secret(environ) == b"o" * 20


@pytest.mark.parametrize("environ", [{}, {SECRET_VARIABLE: "short"}])
def test_without_a_secret_nothing_can_be_signed(environ: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=SECRET_VARIABLE):
        node_secret(environ)
