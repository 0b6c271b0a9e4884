"""Which rows of failures take a node out, by themselves and beside its peers."""

import itertools

import pytest

from pdproxy.nodes.outlier import LATELY, MOST_IN_A_ROW, RECENT, FailureEvidence, LegOrigin, LegRecord, failing_share

FAILURES = 3
"""Refused connections that are enough."""
NOW = 100.0


def record(*well: bool, client: str = "") -> LegRecord:
    """A node whose last legs ended well, or not."""
    made = LegRecord()
    for number, each in enumerate(well):
        if each:
            made.ended_well(client, 0.0)
        else:
            made.failed(LegOrigin(f"of a peer {number}"), FailureEvidence.SERVED, streaming=False)
    return made


GOOD = record(*[True] * RECENT)
HALF = record(*[True, False] * (RECENT // 2))
BAD = record(*[False] * RECENT)


def needed(evidence: FailureEvidence, *peers: LegRecord, client: str = "", failures: int = FAILURES) -> int | None:
    """How many failures in a row take a node out; None where no number does."""
    node = record()
    for number in range(MOST_IN_A_ROW):
        if node.is_outlier(peers, failures, NOW):
            return number
        node.failed(LegOrigin(f"r-{number}", client), evidence, streaming=False)
    return None


@pytest.mark.parametrize(
    ("peers", "served", "unserved"),
    [
        ((GOOD,), 5, 10),
        ((GOOD, GOOD), 5, 10),
        ((HALF,), 20, 40),
        ((BAD,), 299, None),
        ((record(),), 20, 40),
        ((), 20, None),
    ],
)
def test_how_many_failures_take_a_node_out_depends_on_its_peers(
    peers: tuple[LegRecord, ...], served: int, unserved: int | None
) -> None:
    assert needed(FailureEvidence.NODE, *peers) == FAILURES
    assert needed(FailureEvidence.SERVED, *peers) == (served if served < MOST_IN_A_ROW else None)
    assert needed(FailureEvidence.UNSERVED, *peers) == unserved


@pytest.mark.parametrize(("failures", "served"), [(1, 2), (2, 4), (3, 5), (10, 16)])
def test_the_operators_setting_scales_all_of_them(failures: int, served: int) -> None:
    assert needed(FailureEvidence.NODE, GOOD, failures=failures) == failures
    assert needed(FailureEvidence.SERVED, GOOD, failures=failures) == served


def test_a_request_and_a_session_count_once() -> None:
    node = record()
    for number in range(50):
        node.failed(LegOrigin("one request"), FailureEvidence.NODE, streaming=False)
        node.failed(LegOrigin("one request"), FailureEvidence.SERVED, streaming=False)
        node.failed(LegOrigin(f"r-{number}", session=1), FailureEvidence.SERVED, streaming=False)
    assert len(node.row) == 2
    assert not node.is_outlier([GOOD], FAILURES, NOW)
    for number in range(FAILURES - 1):  # of a session's requests, each connection is another one
        node.failed(LegOrigin(f"r-{number}", session=1), FailureEvidence.NODE, streaming=False)
    assert node.is_outlier([GOOD], FAILURES, NOW)


def test_a_request_that_another_node_served_after_all_counts_in_full() -> None:
    node = record()
    for evidence, number in itertools.product(
        (FailureEvidence.UNSERVED, FailureEvidence.SERVED, FailureEvidence.UNSERVED), range(5)
    ):
        node.failed(LegOrigin(f"r-{number}"), evidence, streaming=False)
    assert node.is_outlier([GOOD], FAILURES, NOW)


def test_one_client_alone_takes_no_node_out_while_another_is_served() -> None:
    others = record(*[True] * RECENT, client="other")
    for evidence in (FailureEvidence.SERVED, FailureEvidence.UNSERVED):
        assert needed(evidence, others, client="hostile") is None
        assert needed(evidence, record(*[True] * RECENT, client="hostile"), client="hostile") is not None, (
            "there is no other"
        )
        assert needed(evidence, others, client="") is not None, "whose it was is not known"
    node = record()
    for number in range(4):
        for client in ("hostile", "other"):
            node.failed(LegOrigin(f"{client}-{number}", client), FailureEvidence.SERVED, streaming=False)
    assert node.is_outlier([others], FAILURES, NOW)


def test_a_client_that_was_served_long_ago_says_nothing_for_a_node() -> None:
    node, others = record(), record(*[True] * RECENT, client="other")
    for number in range(5):
        node.failed(LegOrigin(f"r-{number}", "only"), FailureEvidence.SERVED, streaming=False)
    assert not node.is_outlier([others], FAILURES, LATELY)
    assert node.is_outlier([others], FAILURES, LATELY + 1)


def test_a_first_event_ends_the_row_of_legs_that_did_not_get_so_far() -> None:
    node = record()
    for number in range(5):
        node.failed(LegOrigin(f"r-{number}"), FailureEvidence.SERVED, streaming=True)
        node.failed(LegOrigin(f"s-{number}"), FailureEvidence.SERVED, streaming=False)
        node.began()
    assert len(node.row) == 5
    assert node.is_outlier([GOOD], FAILURES, NOW), "each of its streams broke off"
    node.ended_well("", NOW)
    assert not node.row


def test_what_is_kept_is_bounded() -> None:
    node = record()
    for number in range(3 * MOST_IN_A_ROW):
        node.failed(LegOrigin(f"r-{number}"), FailureEvidence.SERVED, streaming=False)
    assert (len(node.row), len(node.recent)) == (MOST_IN_A_ROW, RECENT)


def test_the_share_that_fails_is_never_nothing_and_a_half_where_nothing_is_known() -> None:
    assert failing_share([]) == failing_share([record()]) == 0.5
    assert failing_share([GOOD] * 100) == 0.05
    assert failing_share([GOOD, BAD]) == 0.5
    assert failing_share([BAD]) > 0.9
