"""The failure table: complete, ended by a final step, and what the documentation says."""

import itertools
from pathlib import Path

import pytest

from pdproxy.errors import Fault
from pdproxy.failures import (
    FAILURE_TABLE,
    LEG_BLAME,
    NOT_RESUMABLE,
    PROBE_BLAME,
    Blame,
    Moment,
    RetryOptions,
    Step,
    blame,
    decide,
    document,
    final_step,
)
from pdproxy.observe.labels import Leg
from pdproxy.reasons import NotContinuableReason
from pdproxy.settings.types import OnPrefillFailure

FINAL_STEPS = {Step.ANSWER, Step.FAIL, Step.ERROR_EVENT, Step.LEASE_END, Step.AT_ENDPOINT}

NOTHING = RetryOptions(OnPrefillFailure.FAIL, retries=0, ticket_works=False, moves_left=0, continuable=False)


def test_every_fault_has_its_row() -> None:
    opening = itertools.product(Leg, (Moment.OPENING,), Fault)
    others = itertools.product((Leg.DECODE,), (Moment.STREAMING, Moment.RESUMING), Fault)
    assert set(FAILURE_TABLE) == {*opening, *others}


def test_only_the_last_step_of_a_row_is_final() -> None:
    for row in FAILURE_TABLE.values():
        assert [step in FINAL_STEPS for step in row.steps] == [False] * (len(row.steps) - 1) + [True]


@pytest.mark.parametrize("key", FAILURE_TABLE, ids=str)
def test_without_any_chance_the_last_step_is_left(key: tuple[Leg, Moment, Fault]) -> None:
    assert decide(*key, NOTHING) is final_step(*key)


@pytest.mark.parametrize(
    ("leg", "fault", "options", "step"),
    [
        (Leg.PREFILL, Fault.RESET, RetryOptions(OnPrefillFailure.RETRY, 1, False, 0, False), Step.OTHER_PREFILL),
        (Leg.PREFILL, Fault.RESET, RetryOptions(OnPrefillFailure.RETRY, 0, False, 0, False), Step.LOCAL),
        (Leg.PREFILL, Fault.RESET, RetryOptions(OnPrefillFailure.LOCAL, 1, False, 0, False), Step.LOCAL),
        (Leg.PREFILL, Fault.RESET, RetryOptions(OnPrefillFailure.FAIL, 1, False, 0, False), Step.OTHER_PREFILL),
        (Leg.PREFILL, Fault.RESET, RetryOptions(OnPrefillFailure.FAIL, 0, False, 0, False), Step.FAIL),
        (Leg.PREFILL, Fault.CLIENT_ERROR, RetryOptions(OnPrefillFailure.RETRY, 2, False, 3, True), Step.ANSWER),
        (Leg.DECODE, Fault.RESET, RetryOptions(OnPrefillFailure.RETRY, 1, True, 0, False), Step.SAME_TICKET),
        (Leg.DECODE, Fault.RESET, RetryOptions(OnPrefillFailure.RETRY, 1, False, 0, False), Step.PREFILL_AGAIN),
        (Leg.DECODE, Fault.BUSY, RetryOptions(OnPrefillFailure.RETRY, 0, True, 0, False), Step.ANSWER),
        (Leg.DECODE, Fault.NO_ROUTE, RetryOptions(OnPrefillFailure.RETRY, 0), Step.AT_ENDPOINT),
        (Leg.FORWARD, Fault.REFUSED, RetryOptions(OnPrefillFailure.RETRY, 1), Step.OTHER_NODE),
        (Leg.FORWARD, Fault.REFUSED, RetryOptions(OnPrefillFailure.RETRY, 0), Step.FAIL),
        (Leg.FORWARD, Fault.RESET, RetryOptions(OnPrefillFailure.RETRY, 1), Step.FAIL),
        (Leg.RELEASE, Fault.RESET, RetryOptions(OnPrefillFailure.RETRY, 1), Step.LEASE_END),
        (Leg.RELEASE, Fault.REFUSED, RetryOptions(OnPrefillFailure.RETRY, 1), Step.LEASE_END),
    ],
)
def test_the_first_step_that_is_possible_is_taken(leg: Leg, fault: Fault, options: RetryOptions, step: Step) -> None:
    assert decide(leg, Moment.OPENING, fault, options) is step


@pytest.mark.parametrize(("moves", "continuable"), [(0, True), (1, False)])
def test_a_stream_moves_only_while_it_may_and_can(moves: int, continuable: bool) -> None:
    options = RetryOptions(OnPrefillFailure.RETRY, 0, False, moves, continuable)
    assert decide(Leg.DECODE, Moment.STREAMING, Fault.RESET, options) is Step.ERROR_EVENT
    able = RetryOptions(OnPrefillFailure.RETRY, 0, False, 1, continuable=True)
    assert decide(Leg.DECODE, Moment.STREAMING, Fault.RESET, able) is Step.MIGRATE


@pytest.mark.parametrize("fault", Fault)
def test_a_node_that_does_not_resume_a_stream_gives_way_to_another(fault: Fault) -> None:
    for retries, step in ((1, Step.PREFILL_AGAIN), (0, Step.ERROR_EVENT)):
        assert decide(Leg.DECODE, Moment.RESUMING, fault, RetryOptions(OnPrefillFailure.RETRY, retries)) is step


def test_for_every_fault_it_is_known_whether_it_counts_against_a_node() -> None:
    assert set(LEG_BLAME) == set(PROBE_BLAME) == set(Fault)
    assert Blame.IN_DOUBT not in PROBE_BLAME.values()
    assert {blame(Leg.RELEASE, fault) for fault in Fault} == {Blame.NO}


@pytest.mark.parametrize("leg", Leg)
def test_only_a_refused_connection_counts_whatever_became_of_the_request(leg: Leg) -> None:
    """Nothing else is there that no request could cause on a healthy node."""
    assert {fault for fault in Fault if blame(leg, fault) is Blame.YES} <= {Fault.REFUSED}
    assert all(blame(leg, fault) is not Blame.IF_SILENT for fault in Fault)


def test_a_request_under_which_two_nodes_broke_off_is_sent_to_no_third() -> None:
    for leg, last in ((Leg.PREFILL, Step.LOCAL), (Leg.DECODE, Step.FAIL)):
        for broken, first in ((1, True), (2, False)):
            options = RetryOptions(OnPrefillFailure.RETRY, 5, ticket_works=True, broken=broken)
            assert (decide(leg, Moment.OPENING, Fault.RESET, options) is not last) is first
    for broken, step in ((1, Step.MIGRATE), (2, Step.ERROR_EVENT)):
        options = RetryOptions(OnPrefillFailure.RETRY, 0, moves_left=3, continuable=True, broken=broken)
        assert decide(Leg.DECODE, Moment.STREAMING, Fault.RESET, options) is step


def test_every_reason_against_continuing_is_documented() -> None:
    assert NOT_RESUMABLE.keys() == set(NotContinuableReason)


def test_the_documentation_is_the_table() -> None:
    page = Path(__file__).parents[1] / "docs" / "failures.md"
    assert page.read_text() == document(), "run: python -m pdproxy.failures > docs/failures.md"
