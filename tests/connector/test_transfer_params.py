"""Which action `kv_transfer_params` stand for, by role, whatever a client sends."""

from typing import Any

import pytest
from hypothesis import given, settings

from connector.config import Role
from connector.ticket_fields import Refusal, RefusalReason, token_digest
from connector.transfer_params import (
    Action,
    ComputeLocally,
    IssueTicket,
    ParamsValidator,
    ReadTicket,
    ReleaseHandOver,
    RequestFacts,
)
from tests.connector.tickets import ANYTHING, EXAMPLES, EXPECTED, PROMPT, good, good_wire, spoiled

ID = "hand-over-0123456789"
PREFILL, DECODE, BOTH = (ParamsValidator(role, EXPECTED) for role in (Role.PREFILL, Role.DECODE, Role.BOTH))


def facts(prompt: list[int] = PROMPT, unsuitable: str | None = None, expected: int | None = 99) -> RequestFacts:
    return RequestFacts(unsuitable, expected, lambda number: token_digest(prompt[:number], [None, None, []]))


def reason(order: Action) -> RefusalReason:
    assert isinstance(order, Refusal)
    return order.reason


@pytest.mark.parametrize("raw", [None, {}, {"do_remote_prefill": False}, {"remote_host": None}, {"unknown": 1}])
def test_nothing_asked_is_nothing_done(raw: Any) -> None:
    assert BOTH.validate(raw, facts()) == ComputeLocally()


@pytest.mark.parametrize("raw", [[], "x", 3, 0, True, ["do_remote_prefill"]])
def test_what_is_no_object_is_refused(raw: Any) -> None:
    assert reason(BOTH.validate(raw, facts())) is RefusalReason.NOT_AN_OBJECT


@pytest.mark.parametrize("flag", [1, 0, "yes", [], {}, 1.0])
def test_a_flag_is_true_false_or_null(flag: Any) -> None:
    assert reason(BOTH.validate({"do_remote_decode": flag}, facts())) is RefusalReason.BAD_FIELD


def test_both_flags_contradict() -> None:
    assert (
        reason(BOTH.validate({"do_remote_decode": True, "do_remote_prefill": True}, facts()))
        is RefusalReason.CONTRADICTORY
    )


def test_a_prefill_leg_is_taken_as_every_proxy_writes_it() -> None:
    raw = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None}
    assert PREFILL.validate(raw, facts()) == IssueTicket(None, 1)


def test_a_prefill_leg_may_name_a_hand_over_and_readers() -> None:
    raw = {"do_remote_decode": True, "pdproxy_hand_over": ID, "pdproxy_readers": 3}
    assert PREFILL.validate(raw, facts()) == IssueTicket(ID, 3)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"remote_block_ids": [[1], [2]]}, RefusalReason.REMOTE_FIELDS),
        ({"remote_host": "10.0.0.1"}, RefusalReason.REMOTE_FIELDS),
        ({"pdproxy_hand_over": "short"}, RefusalReason.BAD_FIELD),
        ({"pdproxy_hand_over": 7}, RefusalReason.BAD_FIELD),
        ({"pdproxy_readers": 0}, RefusalReason.BAD_FIELD),
        ({"pdproxy_readers": True}, RefusalReason.BAD_FIELD),
        ({"pdproxy_readers": 1 << 40}, RefusalReason.BAD_FIELD),
    ],
)
def test_a_bad_prefill_leg_is_refused(more: dict[str, Any], why: RefusalReason) -> None:
    assert reason(PREFILL.validate({"do_remote_decode": True, **more}, facts())) is why


def test_a_prefill_leg_s_clean_params_carry_nothing_of_the_sender_s() -> None:
    order = PREFILL.validate({"do_remote_decode": True, "_p_side_truncated": True, "x": 1}, facts())
    assert isinstance(order, IssueTicket)
    assert order.params() == {"do_remote_decode": True, "do_remote_prefill": False}


def test_each_role_does_only_its_own() -> None:
    assert reason(DECODE.validate({"do_remote_decode": True}, facts())) is RefusalReason.WRONG_ROLE
    assert reason(PREFILL.validate(good_wire(), facts())) is RefusalReason.WRONG_ROLE
    assert reason(DECODE.validate({"pdproxy_release": ID}, facts())) is RefusalReason.WRONG_ROLE


def test_a_good_ticket_for_this_prompt_is_taken() -> None:
    assert DECODE.validate(good_wire(), facts()) == ReadTicket(good())


def test_a_ticket_for_another_prompt_is_refused() -> None:
    assert reason(DECODE.validate(good_wire(), facts(PROMPT[::-1]))) is RefusalReason.DIGEST


def test_a_ticket_for_another_number_of_tokens_is_refused() -> None:
    assert reason(DECODE.validate(good_wire(), facts(expected=98))) is RefusalReason.NUMBER


def test_a_request_that_only_gives_its_ticket_back_needs_no_prompt() -> None:
    assert DECODE.validate(good_wire(), facts([0], expected=None)) == ReadTicket(good())


def test_an_unsuitable_request_is_refused_on_both_sides() -> None:
    embeds = facts(unsuitable="prompt embeddings have no digest")
    assert reason(DECODE.validate(good_wire(), embeds)) is RefusalReason.UNSUITABLE_REQUEST
    assert reason(PREFILL.validate({"do_remote_decode": True}, embeds)) is RefusalReason.UNSUITABLE_REQUEST


def test_a_release_is_recognised() -> None:
    assert PREFILL.validate({"pdproxy_release": ID}, facts()) == ReleaseHandOver(ID)
    assert PREFILL.validate({"pdproxy_release": ID, "do_remote_decode": False}, facts()) == ReleaseHandOver(ID)


@pytest.mark.parametrize("name", [None, "", "short", 7, ["a"], "a" * 200, "with blanks in the name"])
def test_a_bad_release_is_refused(name: Any) -> None:
    assert reason(PREFILL.validate({"pdproxy_release": name}, facts())) is RefusalReason.BAD_FIELD


def test_remote_fields_without_a_flag_are_refused() -> None:
    raw = {**good_wire(), "do_remote_prefill": False}
    assert reason(DECODE.validate(raw, facts())) is RefusalReason.NO_FLAG


@settings(max_examples=EXAMPLES, deadline=None)
@given(spoiled() | ANYTHING)
def test_whatever_comes_to_a_decode_node_has_an_action(raw: Any) -> None:
    order = DECODE.validate(raw, facts())
    assert isinstance(order, ComputeLocally | Refusal) or order == ReadTicket(good())


@settings(max_examples=EXAMPLES, deadline=None)
@given(spoiled() | ANYTHING)
def test_whatever_comes_to_a_prefill_node_has_an_action(raw: Any) -> None:
    assert isinstance(PREFILL.validate(raw, facts()), ComputeLocally | Refusal | IssueTicket | ReleaseHandOver)
