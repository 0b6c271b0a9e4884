"""The whole tables once more, where no decode node can wait for its ticket."""

import pytest

from tests.orchestration.in_turn import in_turn
from tests.orchestration.test_client_gone import test_cancelled_at_every_await, test_closed_after_every_piece
from tests.orchestration.test_matrix import (
    test_a_migrated_stream_is_exact,
    test_a_stop_string_is_found_across_a_migration,
    test_decode_leg_before_its_first_event,
    test_decode_leg_in_the_middle,
    test_prefill_leg,
    test_what_cannot_be_continued_ends_in_an_error_event,
)

pytestmark = pytest.mark.long

__all__ = [
    "in_turn",
    "test_a_migrated_stream_is_exact",
    "test_a_stop_string_is_found_across_a_migration",
    "test_cancelled_at_every_await",
    "test_closed_after_every_piece",
    "test_decode_leg_before_its_first_event",
    "test_decode_leg_in_the_middle",
    "test_prefill_leg",
    "test_what_cannot_be_continued_ends_in_an_error_event",
]
