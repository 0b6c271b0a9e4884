"""Wrong `kv_transfer_params` by the hundred, each with the reason for which a node must refuse it."""

import copy
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from connector.ticket_fields import RefusalReason
from tests.e2e.legs import TO_HAND_OVER, Params

OURS = "pdproxy"
FIELDS = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port", "tp_size", "remote_num_tokens")
NUMBERS = ("remote_port", "tp_size", "dcp_size", "pp_size", "remote_num_tokens")
NAMES = ("remote_engine_id", "remote_request_id", "remote_host")
NEVER_HANDED_OVER = "nobody-knows-this-one"
HUGE = (1 << 63) - 1


NESTED: Any = json.loads("[" * 100 + "]" * 100)
"""A list in a list in a list."""
NO_NUMBERS: tuple[Any, ...] = (0, -1, -HUGE, HUGE, 1.5, 1e300, "1", "", True, [], {}, [1], NESTED)
NO_PLAIN_TEXT = ("", " ", "a b", "a,b", "tab\t", "null\0", "x\n", "\u00e9", "\U0001f600", "x" * 513)
NO_NAMES: tuple[Any, ...] = (*NO_PLAIN_TEXT, 7, True, [], {}, NESTED)
NO_LISTS: tuple[Any, ...] = ("", "junk", 7, True, {}, [], {"0": [1]}, [1, 2, 3, 4], ["ab"] * 4, [None] * 4, [[]] * 65)
NO_BLOCKS: tuple[Any, ...] = (-1, 1 << 31, HUGE, 1.0, "1", True, None, [1], {}, NESTED)
NO_VERSIONS: tuple[Any, ...] = (0, 1, 3, -1, HUGE, "1", True, 1.0, None, [], {})
NO_FINGERPRINTS: tuple[Any, ...] = (
    *("", "0" * 16, 7, True, [], {}, NESTED, [["dtype", "x"]]),
    *({"Dtype": "x"}, {"": "x"}, {"dtype": ""}, {"dtype": 7}, {"dtype": "two words"}, {"dtype": "x" * 129}),
    *({"dtype": "line\n"}, {"dtype": NESTED}, {f"part_{at}": "x" for at in range(65)}),
)
NO_DIGESTS: tuple[Any, ...] = ("", "zz", "0" * 63, "0" * 65, "A" * 64, "g" * 64, 7, [], {}, True)


@dataclass(frozen=True)
class WrongParams:
    """The params to send. `reason` None: nothing is refused. `smuggled`: sent in `vllm_xargs`."""

    name: str
    params: Any
    reason: RefusalReason | None
    status: HTTPStatus = HTTPStatus.OK
    smuggled: bool = False


def altered(ticket: Params, changes: Params) -> Params:
    """Copy a ticket with some fields changed."""
    return {**copy.deepcopy(ticket), **changes}


def ours_altered(ticket: Params, changes: Params) -> Params:
    """The same for the fields that our connector adds."""
    return altered(ticket, {OURS: {**ticket[OURS], **changes}})


def without(ticket: Params, name: str) -> Params:
    """Copy a ticket without a field."""
    return {key: value for key, value in copy.deepcopy(ticket).items() if key != name}


def for_decode_node(ticket: Params, alike: Params, longer: Params) -> Iterator[WrongParams]:
    """Every mistake that we know of. `alike`, `longer`: tickets of other prompts, of the same length and longer."""
    yield from _flags(ticket)
    yield from _fields(ticket)
    yield from _blocks(ticket)
    yield from _ours(ticket)
    yield WrongParams("another prompt's", alike, RefusalReason.DIGEST)
    yield WrongParams("a longer prompt's", longer, RefusalReason.NUMBER)
    one_more = altered(ticket, {"remote_num_tokens": ticket["remote_num_tokens"] + 1})
    yield WrongParams("one token more", one_more, RefusalReason.NUMBER)
    yield WrongParams("a prefill leg", TO_HAND_OVER, RefusalReason.WRONG_ROLE)
    yield WrongParams("a prefill leg with a ticket", {**ticket, **TO_HAND_OVER}, RefusalReason.WRONG_ROLE)
    yield WrongParams("a release", {"pdproxy_release": NEVER_HANDED_OVER}, RefusalReason.WRONG_ROLE)


def for_prefill_node(ticket: Params) -> Iterator[WrongParams]:
    """The same for a prefill node."""
    yield from _flags(ticket)
    yield WrongParams("a ticket", ticket, RefusalReason.WRONG_ROLE)
    for name in (name for name in ticket if name.startswith("remote_") and ticket[name] is not None):
        yield WrongParams(f"{name} in a prefill leg", {**TO_HAND_OVER, name: ticket[name]}, RefusalReason.REMOTE_FIELDS)
    yield WrongParams("a prefill leg with a ticket", {**ticket, **TO_HAND_OVER}, RefusalReason.REMOTE_FIELDS)
    for junk in (*NO_NUMBERS, 1025):
        yield WrongParams(f"readers {junk!s:.20}", {**TO_HAND_OVER, "pdproxy_readers": junk}, RefusalReason.BAD_FIELD)
    for junk in (*NO_NAMES, "short", "x" * 129, "a-name-with-a.dot"):
        yield WrongParams(
            f"hand-over {junk!s:.20}", {**TO_HAND_OVER, "pdproxy_hand_over": junk}, RefusalReason.BAD_FIELD
        )
        yield WrongParams(f"release {junk!s:.20}", {"pdproxy_release": junk}, RefusalReason.BAD_FIELD)
    yield WrongParams("release of nothing", {"pdproxy_release": NEVER_HANDED_OVER}, None)


def at_random(ticket: Params, source: random.Random) -> WrongParams:
    """One random alteration."""
    kind = source.choice(("number", "name", "lack", "block", "group", "digest", "version"))
    match kind:
        case "number":
            name, junk = source.choice(NUMBERS), source.choice((0, -source.getrandbits(60) - 1, source.random(), "9"))
            return WrongParams(f"{name} {junk}", altered(ticket, {name: junk}), RefusalReason.BAD_FIELD)
        case "name":
            name = source.choice(NAMES)
            junk = "".join(chr(source.randrange(0x80, 0x2000)) for _ in range(source.randrange(1, 40)))
            return WrongParams(f"{name} {junk}", altered(ticket, {name: junk}), RefusalReason.BAD_FIELD)
        case "lack":
            name = source.choice((*FIELDS, "remote_block_ids", OURS))
            return WrongParams(f"no {name}", without(ticket, name), RefusalReason.MISSING_FIELD)
        case "block":
            groups = copy.deepcopy(ticket["remote_block_ids"])
            group = source.choice(groups)
            group[source.randrange(len(group))] = source.choice((-source.getrandbits(40) - 1, 0, 1 << 40, 0.5, "3"))
            return WrongParams(f"blocks {groups}", altered(ticket, {"remote_block_ids": groups}), RefusalReason.BLOCKS)
        case "group":
            count = source.choice([n for n in range(1, 40) if n != len(ticket["remote_block_ids"])])
            ids = [[source.randrange(1, 2000)] for _ in range(count)]
            return WrongParams(f"{count} groups", altered(ticket, {"remote_block_ids": ids}), RefusalReason.GROUPS)
        case "digest":
            digest = source.randbytes(32).hex()
            return WrongParams(f"digest {digest}", ours_altered(ticket, {"digest": digest}), RefusalReason.DIGEST)
    version = source.randrange(3, 1 << 60)
    return WrongParams(f"version {version}", ours_altered(ticket, {"v": version}), RefusalReason.UNKNOWN_VERSION)


def _flags(ticket: Params) -> Iterator[WrongParams]:
    for junk in ("", "ticket", 7, 0.5, True, [1], [], NESTED):
        yield WrongParams(f"not an object: {junk!s:.20}", junk, None, HTTPStatus.BAD_REQUEST)
    for junk in ("", 0, 0.0, []):
        yield WrongParams(f"smuggled {junk!r}", junk, RefusalReason.NOT_AN_OBJECT, smuggled=True)
    yield WrongParams("empty", {}, None)
    yield WrongParams("nothing we know", {"a": {"b": NESTED}, "": 1}, None)
    yield WrongParams("no flag", without(ticket, "do_remote_prefill"), RefusalReason.NO_FLAG)
    yield WrongParams("both flags", altered(ticket, {"do_remote_decode": True}), RefusalReason.CONTRADICTORY)
    for junk in ("true", 1, 0, [], {}, NESTED):
        yield WrongParams(f"flag {junk!s:.20}", altered(ticket, {"do_remote_prefill": junk}), RefusalReason.BAD_FIELD)
        yield WrongParams(f"flag {junk!s:.20}", {"do_remote_decode": junk}, RefusalReason.BAD_FIELD)


def _fields(ticket: Params) -> Iterator[WrongParams]:
    yield WrongParams("a flag alone", {"do_remote_prefill": True}, RefusalReason.MISSING_FIELD)
    for name in (*FIELDS, "remote_block_ids", OURS):
        yield WrongParams(f"no {name}", without(ticket, name), RefusalReason.MISSING_FIELD)
        yield WrongParams(f"null {name}", altered(ticket, {name: None}), RefusalReason.MISSING_FIELD)
    for name in NUMBERS:
        for junk in NO_NUMBERS:
            yield WrongParams(f"{name} {junk!s:.20}", altered(ticket, {name: junk}), RefusalReason.BAD_FIELD)
    for name in NAMES:
        for junk in NO_NAMES:
            yield WrongParams(f"{name} {junk!s:.20}", altered(ticket, {name: junk}), RefusalReason.BAD_FIELD)
    for junk in ("http://a", "a/b", "-a", "user@host", "127.0.0.1\r\n"):
        yield WrongParams(f"host {junk!r}", altered(ticket, {"remote_host": junk}), RefusalReason.BAD_FIELD)
    yield WrongParams("a push", altered(ticket, {"transfer_mode": "push"}), RefusalReason.BAD_FIELD)
    yield WrongParams("a loan", altered(ticket, {"remote_blocks_expiry_time": 12.5}), RefusalReason.BAD_FIELD)
    yield WrongParams("registration", altered(ticket, {"remote_registration_generation": -1}), RefusalReason.BAD_FIELD)


def _blocks(ticket: Params) -> Iterator[WrongParams]:
    right = ticket["remote_block_ids"]
    state = min(range(len(right)), key=lambda group: len(right[group]))
    changed: list[tuple[Any, RefusalReason]] = [(junk, RefusalReason.GROUPS) for junk in NO_LISTS]
    changed += [(right[:-1], RefusalReason.GROUPS), ([*right, [1]], RefusalReason.GROUPS)]
    wrong_ids = [[junk] for junk in NO_BLOCKS] + [[], [0], [1, 2, 3], [*range(1, 50_000)]]
    changed += [([*right[:state], ids, *right[state + 1 :]], RefusalReason.BLOCKS) for ids in wrong_ids]
    for ids, reason in changed:
        yield WrongParams(f"blocks {ids!s:.30}", altered(ticket, {"remote_block_ids": ids}), reason)


def _ours(ticket: Params) -> Iterator[WrongParams]:
    no_object: tuple[Any, ...] = ("", "x", 7, True, [], NESTED)
    for junk in no_object:
        yield WrongParams(f"ours {junk!s:.20}", altered(ticket, {OURS: junk}), RefusalReason.BAD_FIELD)
    for junk in NO_VERSIONS:
        yield WrongParams(f"version {junk}", ours_altered(ticket, {"v": junk}), RefusalReason.UNKNOWN_VERSION)
    for junk in NO_DIGESTS:
        yield WrongParams(f"digest {junk}", ours_altered(ticket, {"digest": junk}), RefusalReason.BAD_FIELD)
    yield from _fingerprints(ticket[OURS]["fingerprint"], ticket)
    sizes = ticket[OURS]["block_sizes"]
    odd: list[tuple[Any, RefusalReason]] = [(junk, RefusalReason.BAD_FIELD) for junk in (None, [0] * 4, "x")]
    odd += [([7] * 4, RefusalReason.GROUPS), (sizes[:-1], RefusalReason.GROUPS), ([*sizes, 1], RefusalReason.GROUPS)]
    for junk, reason in odd:
        yield WrongParams(f"block sizes {junk}", ours_altered(ticket, {"block_sizes": junk}), reason)
    for junk in (*NO_NUMBERS, 1025):
        yield WrongParams(f"readers {junk!s:.20}", ours_altered(ticket, {"readers": junk}), RefusalReason.BAD_FIELD)
    no_times: tuple[Any, ...] = ("now", -1, 1 << 41, True, None, [])
    for junk in no_times:
        yield WrongParams(f"issued {junk}", ours_altered(ticket, {"issued_at": junk}), RefusalReason.BAD_FIELD)
    no_signatures: tuple[Any, ...] = ("x", "g" * 64, 7, [])
    for junk in no_signatures:
        yield WrongParams(f"signature {junk}", ours_altered(ticket, {"signature": junk}), RefusalReason.BAD_FIELD)


def _fingerprints(told: dict[str, str], ticket: Params) -> Iterator[WrongParams]:
    for junk in NO_FINGERPRINTS:
        yield WrongParams(
            f"fingerprint {junk!s:.30}", ours_altered(ticket, {"fingerprint": junk}), RefusalReason.BAD_FIELD
        )
    missing = ours_altered(ticket, {"fingerprint": None})
    yield WrongParams("fingerprint null", missing, RefusalReason.MISSING_FIELD)
    for name in told:
        for changed in ({**told, name: "x"}, {key: value for key, value in told.items() if key != name}):
            yield WrongParams(
                f"another {name}", ours_altered(ticket, {"fingerprint": changed}), RefusalReason.FINGERPRINT
            )
    more = ours_altered(ticket, {"fingerprint": {**told, "unheard_of": "x"}})
    yield WrongParams("a part more", more, RefusalReason.FINGERPRINT)
