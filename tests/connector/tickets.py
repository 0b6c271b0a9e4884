"""Good tickets, and many ways to spoil one, for tests that need no engine."""

import os
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from connector.fingerprint import Fingerprint
from connector.ticket import Expected, GroupKind, GroupShape, Ticket, wire
from connector.ticket_fields import RefusalReason, token_digest

KEY = b"0123456789abcdef0123456789abcdef"
OLD_KEY = b"fedcba9876543210fedcba9876543210"
SHAPES = (GroupShape(GroupKind.ATTENTION, 16), GroupShape(GroupKind.STATE, 16))
FINGERPRINT = Fingerprint.of({"dtype": "bfloat16", "checkpoint": "content:0123", "block_sizes": "16*2"})
EXPECTED = Expected(SHAPES, (KEY,), fingerprint=FINGERPRINT)
PROMPT = list(range(10, 110))
EXAMPLES = int(os.environ.get("FUZZED", "60"))
"""Examples of a fuzz test in `make unit`; `make test-long` and `make fuzz` ask for 500 and more."""


def good(**other: Any) -> Ticket:
    """A ticket for the first 99 tokens of PROMPT."""
    fields: dict[str, Any] = {
        "engine_id": "engine-p",
        "request_id": "cmpl-1-0",
        "host": "10.0.0.1",
        "port": 5600,
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "num_tokens": 99,
        "block_ids": ((1, 2, 3, 4, 5, 6, 8), (9,)),
        "block_sizes": (16, 16),
        "registration": None,
        "readers": 1,
        "issued_at": 1795293331.411,
        "digest": token_digest(PROMPT[:99], [None, None, []]),
        "fingerprint": FINGERPRINT,
    }
    return Ticket(**{**fields, **other})


def good_wire(**other: Any) -> dict[str, Any]:
    """The same as it comes over HTTP, signed."""
    return wire(good(**other), (KEY,))


Spoil = Callable[[dict[str, Any]], Any]


def put(name: str, value: Any) -> Spoil:
    """Set a field."""
    return lambda ticket: {**ticket, name: value}


def put_ours(name: str, value: Any) -> Spoil:
    """Set a field of our own part."""
    return lambda ticket: {**ticket, "pdproxy": {**ticket["pdproxy"], name: value}}


def without(name: str) -> Spoil:
    """Leave a field out."""
    return lambda ticket: {key: value for key, value in ticket.items() if key != name}


def without_ours(name: str) -> Spoil:
    """Leave a field of our own part out."""
    return lambda ticket: {**ticket, "pdproxy": without(name)(ticket["pdproxy"])}


MALFORMED: tuple[tuple[str, Spoil, RefusalReason], ...] = (
    ("a string", lambda _: "do_remote_prefill", RefusalReason.NOT_AN_OBJECT),
    ("a list", lambda ticket: [ticket], RefusalReason.NOT_AN_OBJECT),
    ("a number", lambda _: 1, RefusalReason.NOT_AN_OBJECT),
    ("no blocks", without("remote_block_ids"), RefusalReason.MISSING_FIELD),
    ("blocks null", put("remote_block_ids", None), RefusalReason.MISSING_FIELD),
    ("blocks empty", put("remote_block_ids", []), RefusalReason.GROUPS),
    ("blocks flat", put("remote_block_ids", [1, 2, 3]), RefusalReason.GROUPS),
    ("blocks an object", put("remote_block_ids", {"0": [1]}), RefusalReason.GROUPS),
    ("one group", put("remote_block_ids", [[1, 2, 3, 4, 5, 6, 8]]), RefusalReason.GROUPS),
    ("three groups", put("remote_block_ids", [[1], [2], [3]]), RefusalReason.GROUPS),
    ("a thousand groups", put("remote_block_ids", [[1]] * 1000), RefusalReason.GROUPS),
    ("blocks too few", put("remote_block_ids", [[1, 2], [9]]), RefusalReason.BLOCKS),
    ("blocks too many", put("remote_block_ids", [list(range(1, 50)), [9]]), RefusalReason.BLOCKS),
    ("two states", put("remote_block_ids", [[1, 2, 3, 4, 5, 6, 8], [9, 10]]), RefusalReason.BLOCKS),
    ("no state", put("remote_block_ids", [[1, 2, 3, 4, 5, 6, 8], []]), RefusalReason.BLOCKS),
    ("the null block", put("remote_block_ids", [[1, 2, 3, 4, 5, 6, 8], [0]]), RefusalReason.BLOCKS),
    ("a block twice", put("remote_block_ids", [[1, 2, 3, 4, 5, 6, 6], [9]]), RefusalReason.BLOCKS),
    ("a negative block", put("remote_block_ids", [[1, 2, 3, 4, 5, 6, -8], [9]]), RefusalReason.BLOCKS),
    ("a huge block", put("remote_block_ids", [[1, 2, 3, 4, 5, 6, 1 << 70], [9]]), RefusalReason.BLOCKS),
    ("a fractional block", put("remote_block_ids", [[1, 2, 3, 4, 5, 6, 8.0], [9]]), RefusalReason.BLOCKS),
    ("a boolean block", put("remote_block_ids", [[True, 2, 3, 4, 5, 6, 8], [9]]), RefusalReason.BLOCKS),
    ("a textual block", put("remote_block_ids", [["1", 2, 3, 4, 5, 6, 8], [9]]), RefusalReason.BLOCKS),
    ("no engine", without("remote_engine_id"), RefusalReason.MISSING_FIELD),
    ("engine a number", put("remote_engine_id", 7), RefusalReason.BAD_FIELD),
    ("engine empty", put("remote_engine_id", ""), RefusalReason.BAD_FIELD),
    ("request with a comma", put("remote_request_id", "a,b"), RefusalReason.BAD_FIELD),
    ("request with a line end", put("remote_request_id", "a\n"), RefusalReason.BAD_FIELD),
    ("request too long", put("remote_request_id", "a" * 1000), RefusalReason.BAD_FIELD),
    ("host with a path", put("remote_host", "10.0.0.1/../x"), RefusalReason.BAD_FIELD),
    ("host with blanks", put("remote_host", "a b"), RefusalReason.BAD_FIELD),
    ("host a list", put("remote_host", ["10.0.0.1"]), RefusalReason.BAD_FIELD),
    ("no port", without("remote_port"), RefusalReason.MISSING_FIELD),
    ("port zero", put("remote_port", 0), RefusalReason.BAD_FIELD),
    ("port too high", put("remote_port", 65536), RefusalReason.BAD_FIELD),
    ("port a string", put("remote_port", "5600"), RefusalReason.BAD_FIELD),
    ("port true", put("remote_port", True), RefusalReason.BAD_FIELD),
    ("no tp_size", without("tp_size"), RefusalReason.MISSING_FIELD),
    ("tp_size zero", put("tp_size", 0), RefusalReason.BAD_FIELD),
    ("tp_size huge", put("tp_size", 1 << 40), RefusalReason.BAD_FIELD),
    ("no number", without("remote_num_tokens"), RefusalReason.MISSING_FIELD),
    ("number negative", put("remote_num_tokens", -99), RefusalReason.BAD_FIELD),
    ("number not a number", put("remote_num_tokens", float("nan")), RefusalReason.BAD_FIELD),
    ("push", put("transfer_mode", "push"), RefusalReason.BAD_FIELD),
    ("an expiry", put("remote_blocks_expiry_time", 1.0), RefusalReason.BAD_FIELD),
    ("not ours", without("pdproxy"), RefusalReason.MISSING_FIELD),
    ("ours a string", put("pdproxy", "v1"), RefusalReason.BAD_FIELD),
    ("version 1", put_ours("v", 1), RefusalReason.UNKNOWN_VERSION),
    ("version true", put_ours("v", True), RefusalReason.UNKNOWN_VERSION),
    ("no version", without_ours("v"), RefusalReason.UNKNOWN_VERSION),
    ("no digest", without_ours("digest"), RefusalReason.MISSING_FIELD),
    ("digest short", put_ours("digest", "abc"), RefusalReason.BAD_FIELD),
    ("sizes of one group", put_ours("block_sizes", [16]), RefusalReason.GROUPS),
    ("sizes that do not divide", put_ours("block_sizes", [24, 16]), RefusalReason.GROUPS),
    ("size zero", put_ours("block_sizes", [0, 16]), RefusalReason.BAD_FIELD),
    ("no readers", without_ours("readers"), RefusalReason.MISSING_FIELD),
    ("readers a million", put_ours("readers", 10**6), RefusalReason.BAD_FIELD),
    ("issued never", put_ours("issued_at", "now"), RefusalReason.BAD_FIELD),
    ("issued at infinity", put_ours("issued_at", float("inf")), RefusalReason.BAD_FIELD),
    ("no fingerprint", without_ours("fingerprint"), RefusalReason.MISSING_FIELD),
    ("an empty fingerprint", put_ours("fingerprint", {}), RefusalReason.BAD_FIELD),
    ("a fingerprint's digest", put_ours("fingerprint", "0123456789abcdef"), RefusalReason.BAD_FIELD),
    ("65 parts", put_ours("fingerprint", {f"part_{at}": "x" for at in range(65)}), RefusalReason.BAD_FIELD),
    ("a part with blanks", put_ours("fingerprint", {"a part": "x"}), RefusalReason.BAD_FIELD),
    ("a part that is a number", put_ours("fingerprint", {"dtype": 16}), RefusalReason.BAD_FIELD),
    ("a part with a sentence", put_ours("fingerprint", {"dtype": "trust me"}), RefusalReason.BAD_FIELD),
    ("a part with a line end", put_ours("fingerprint", {"dtype": "x\n"}), RefusalReason.BAD_FIELD),
    ("a part without a value", put_ours("fingerprint", {"dtype": ""}), RefusalReason.BAD_FIELD),
    ("a part too long", put_ours("fingerprint", {"dtype": "x" * 129}), RefusalReason.BAD_FIELD),
    ("a part's name too long", put_ours("fingerprint", {"x" * 49: "x"}), RefusalReason.BAD_FIELD),
    ("signature a number", put_ours("signature", 5), RefusalReason.BAD_FIELD),
)
"""Tickets that no prefill node makes: what they are, how they come about, and why they are refused."""

UNSIGNED: tuple[tuple[str, Spoil, RefusalReason], ...] = (
    ("not signed", without_ours("signature"), RefusalReason.UNSIGNED),
    ("signed with no key", put_ours("signature", "0" * 64), RefusalReason.BAD_SIGNATURE),
    ("another host", put("remote_host", "10.6.6.6"), RefusalReason.BAD_SIGNATURE),
    ("another port", put("remote_port", 5601), RefusalReason.BAD_SIGNATURE),
    ("another engine", put("remote_engine_id", "engine-q"), RefusalReason.BAD_SIGNATURE),
    ("another request", put("remote_request_id", "cmpl-2-0"), RefusalReason.BAD_SIGNATURE),
    ("other blocks", put("remote_block_ids", [[1, 2, 3, 4, 5, 6, 7], [9]]), RefusalReason.BAD_SIGNATURE),
    ("another state", put("remote_block_ids", [[1, 2, 3, 4, 5, 6, 8], [10]]), RefusalReason.BAD_SIGNATURE),
    ("fewer tokens", put("remote_num_tokens", 98), RefusalReason.BAD_SIGNATURE),
    ("another tp_size", put("tp_size", 2), RefusalReason.BAD_SIGNATURE),
    ("another dcp_size", put("dcp_size", 2), RefusalReason.BAD_SIGNATURE),
    ("another pp_size", put("pp_size", 2), RefusalReason.BAD_SIGNATURE),
    ("another registration", put("remote_registration_generation", 3), RefusalReason.BAD_SIGNATURE),
    ("another digest", put_ours("digest", "a" * 64), RefusalReason.BAD_SIGNATURE),
    ("more readers", put_ours("readers", 2), RefusalReason.BAD_SIGNATURE),
    ("a later time", put_ours("issued_at", 1795293332.0), RefusalReason.BAD_SIGNATURE),
    ("other sizes", put_ours("block_sizes", [32, 16]), RefusalReason.BAD_SIGNATURE),
    ("another fingerprint", put_ours("fingerprint", {"dtype": "float16"}), RefusalReason.BAD_SIGNATURE),
)
"""Tickets that were altered after they were signed."""

_leaf = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=40)
    | st.sampled_from(["10.0.0.1", "engine-p", 5600, 16, 99, 1, 1 << 64, -1])
)
ANYTHING = st.recursive(
    _leaf,
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=12), inner, max_size=6),
    max_leaves=12,
)
"""Any JSON value."""
_FIELDS = (*good_wire(), "do_remote_prefill", "do_remote_decode", "pdproxy_hand_over", "pdproxy_release", "extra")
_OURS = tuple(good_wire()["pdproxy"])


@st.composite
def spoiled(draw: st.DrawFn) -> Any:
    """A good ticket with some fields replaced by anything, or something that never was a ticket."""
    if draw(st.integers(0, 9)) == 0:
        return draw(ANYTHING)
    ticket = good_wire()
    for name in draw(st.lists(st.sampled_from(_FIELDS), max_size=4)):
        ticket[name] = draw(ANYTHING)
    if isinstance(ticket["pdproxy"], dict):
        for name in draw(st.lists(st.sampled_from(_OURS), max_size=3)):
            ticket["pdproxy"][name] = draw(ANYTHING)
    return ticket
