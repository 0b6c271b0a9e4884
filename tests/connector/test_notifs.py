"""Notifs: ours and vLLM's are parsed, everything else is junk and never an exception."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector.notifs import (
    LONGEST_DONE,
    MOST_NOTIF_READERS,
    NO_NONCE,
    Heartbeat,
    Junk,
    ReadDone,
    parse_notif,
    with_nonce,
)

NONCES = st.text("0123456789abcdef", min_size=8, max_size=64)
IDS = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=60)


@given(IDS, NONCES, st.integers(1, MOST_NOTIF_READERS))
def test_what_our_decode_node_sends_is_what_the_prefill_node_reads(alias: str, nonce: str, readers: int) -> None:
    sent = f"{with_nonce(alias, nonce)}:{readers}".encode()
    assert parse_notif(sent) == ReadDone(alias, nonce, readers)


def test_a_notif_of_vllms_own_connector_has_no_nonce() -> None:
    assert parse_notif(b"cmpl-1-0-abcd:2") == ReadDone("cmpl-1-0-abcd", NO_NONCE, 2)
    assert parse_notif(b"a:b:1") == ReadDone("a:b", NO_NONCE, 1)


def test_heartbeats_are_parsed() -> None:
    assert parse_notif(b"HB:a,b") == Heartbeat(("a", "b"))
    assert parse_notif(b"HB:") == Heartbeat(("",))


@pytest.mark.parametrize(
    "message",
    [b"", b":", b":1", b"a", b"a:", b"a:x", b"a:-1", b"a:0", b"a:99999", b"\xff\xfe:1", b"HB:\xff", b"a\x00b:1"],
)
def test_junk_is_junk(message: bytes) -> None:
    assert parse_notif(message) == Junk(len(message))


def test_an_endless_notif_is_junk() -> None:
    assert isinstance(parse_notif(b"a" * LONGEST_DONE + b":1"), Junk)


@given(st.binary(max_size=200))
def test_no_bytes_raise(message: bytes) -> None:
    assert isinstance(parse_notif(message), ReadDone | Heartbeat | Junk)
