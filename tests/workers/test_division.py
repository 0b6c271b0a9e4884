"""Limits divided among workers."""

import pytest

from pdproxy.errors import SettingsError
from pdproxy.settings.model import Limits, Listen, Settings
from pdproxy.workers.division import share_of

MIB = 1 << 20


def shares(workers: int, **limits: float) -> list[Limits]:
    settings = Settings(listen=Listen(workers=workers), limits=Limits.model_validate(limits))
    return [share_of(settings, worker).limits for worker in range(workers)]


def test_shares_add_up_to_what_the_operator_set() -> None:
    every = shares(3, concurrency=1024, queue=100, held_bytes=256 * MIB + 1, key_concurrency=8)
    assert [limits.concurrency for limits in every] == [342, 341, 341]
    assert [limits.queue for limits in every] == [34, 33, 33]
    assert sum(limits.held_bytes for limits in every) == 256 * MIB + 1
    assert [limits.key_concurrency for limits in every] == [3, 3, 2]


def test_room_on_decode_nodes_is_divided_exactly() -> None:
    assert [limits.decode_fill for limits in shares(4, decode_fill=1.0)] == [0.25] * 4
    assert [limits.decode_fill for limits in shares(4, decode_fill=0)] == [0] * 4


def test_each_worker_can_run_a_request() -> None:
    assert [limits.concurrency for limits in shares(2, concurrency=1)] == [1, 1]
    assert [limits.key_concurrency for limits in shares(2, key_concurrency=1)] == [1, 1]


def test_what_is_no_limit_stays_none_and_an_empty_queue_empty() -> None:
    assert [limits.key_concurrency for limits in shares(2, key_concurrency=0)] == [0, 0]
    assert [limits.queue for limits in shares(2, queue=0)] == [0, 0]


def test_limits_of_one_request_are_not_divided() -> None:
    given = Limits()
    for limits in shares(2):
        assert (limits.body_bytes, limits.header_bytes) == (given.body_bytes, given.header_bytes)
        assert limits.queue_seconds == given.queue_seconds


def test_a_body_that_fits_no_share_is_an_error_that_says_what_to_do() -> None:
    shares(4, held_bytes=256 * MIB, body_bytes=64 * MIB)
    with pytest.raises(SettingsError) as caught:
        shares(5, held_bytes=256 * MIB, body_bytes=64 * MIB)
    assert f"Raise the one to {5 * 64 * MIB}" in str(caught.value)


def test_a_share_is_valid_settings_when_a_worker_reads_it() -> None:
    share = share_of(Settings(listen=Listen(workers=2)), 1)
    assert Settings(**share.model_dump(mode="json")) == share
