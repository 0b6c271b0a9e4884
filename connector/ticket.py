"""The ticket: what a prefill leg returns, and a decode node may act on. Pure: no engine, no clock, no I/O.

`wire` makes the `kv_transfer_params` of a prefill leg's answer. `parse` turns what came in `kv_transfer_params` into a
`Ticket` or a `Refusal`; it assumes a hostile sender and never raises. A ticket fits exactly one shape of engine
(`Expected`): every group is there, with as many blocks as its number of tokens needs, and the prefill node's
fingerprint is this node's. The signature covers every field that a decode node acts on (`Ticket.signed_fields`);
`remote_prefill_cached_tokens`, which vLLM adds after us, is outside it and is not used.
"""

import hashlib
import hmac
import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from . import ticket_fields
from .fingerprint import Fingerprint, differences, read_fingerprint, summary
from .ticket_fields import Refusal, RefusalReason

VERSION = 2
EXTENSION = "pdproxy"
"""Our own fields stand in an object under this key, beside vLLM's."""
MOST_TOKENS = 1 << 24
MOST_RANKS = 4096

_DOMAIN = b"pdproxy ticket\n"


class GroupKind(StrEnum):
    """How many blocks a group has: one per block of tokens, only those in a window, or one in all."""

    ATTENTION = "attention"
    WINDOW = "window"
    STATE = "state"


@dataclass(frozen=True, slots=True)
class GroupShape:
    """One transferred KV-cache group. `block_size` in tokens."""

    kind: GroupKind
    block_size: int


@dataclass(frozen=True, slots=True)
class Expected:
    """Which tickets this engine accepts.

    Without `keys` signatures are not checked; without `hosts` any address is accepted; without `fingerprint` any
    prefill node's is, which is for tests only. `keys` may change while the node runs.
    """

    groups: tuple[GroupShape, ...]
    keys: Sequence[bytes] = ()
    hosts: frozenset[str] = frozenset()
    fingerprint: Fingerprint | None = None


@dataclass(frozen=True, slots=True)
class Ticket:
    """A ticket whose every field is checked. `issued_at`: unix seconds by the prefill node's clock."""

    engine_id: str
    request_id: str
    host: str
    port: int
    tp_size: int
    dcp_size: int
    pp_size: int
    num_tokens: int
    block_ids: tuple[tuple[int, ...], ...]
    block_sizes: tuple[int, ...]
    registration: int | None
    readers: int
    issued_at: float
    digest: str
    fingerprint: Fingerprint
    version: int = VERSION

    def signed_fields(self) -> list[tuple[str, Any]]:
        """Everything that the signature covers, by name, in the order in which it is encoded."""
        return [
            ("version", self.version),
            ("engine_id", self.engine_id),
            ("request_id", self.request_id),
            ("host", self.host),
            ("port", self.port),
            ("tp_size", self.tp_size),
            ("dcp_size", self.dcp_size),
            ("pp_size", self.pp_size),
            ("num_tokens", self.num_tokens),
            ("block_ids", self.block_ids),
            ("block_sizes", self.block_sizes),
            ("registration", self.registration),
            ("readers", self.readers),
            ("issued_at", self.issued_at),
            ("digest", self.digest),
            ("fingerprint", self.fingerprint.parts),
        ]

    def params(self) -> dict[str, Any]:
        """The clean `kv_transfer_params` for vLLM's own decode side."""
        registered = {} if self.registration is None else {"remote_registration_generation": self.registration}
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self.engine_id,
            "remote_request_id": self.request_id,
            "remote_host": self.host,
            "remote_port": self.port,
            "remote_block_ids": [list(ids) for ids in self.block_ids],
            "remote_num_tokens": self.num_tokens,
            "remote_blocks_expiry_time": None,
            **registered,
            "tp_size": self.tp_size,
            "dcp_size": self.dcp_size,
            "pp_size": self.pp_size,
            "transfer_mode": "pull",
        }


def encode(ticket: Ticket) -> bytes:
    """The canonical bytes that are signed: JSON of [name, value] pairs, ASCII, no blanks."""
    return _DOMAIN + json.dumps(ticket.signed_fields(), separators=(",", ":"), ensure_ascii=True).encode()


def sign(ticket: Ticket, keys: Sequence[bytes]) -> str | None:
    """HMAC-SHA256 with the first key, in hex; None without a key."""
    return _mac(keys[0], encode(ticket)) if keys else None


def is_signed(ticket: Ticket, signature: str, keys: Sequence[bytes]) -> bool:
    """Whether `signature` was made with any of `keys`. Every key is tried, each in constant time."""
    encoded = encode(ticket)
    matches = [hmac.compare_digest(_mac(key, encoded), signature) for key in keys]
    return any(matches)


def wire(ticket: Ticket, keys: Sequence[bytes]) -> dict[str, Any]:
    """The ticket in the form in which the prefill node answers it, signed if there is a key."""
    extension = {
        "v": ticket.version,
        "digest": ticket.digest,
        "fingerprint": dict(ticket.fingerprint.parts),
        "block_sizes": list(ticket.block_sizes),
        "readers": ticket.readers,
        "issued_at": ticket.issued_at,
        "signature": sign(ticket, keys),
    }
    return {**ticket.params(), EXTENSION: extension}


def parse(raw: Any, expected: Expected) -> Ticket | Refusal:
    """A ticket that this engine may act on, or why it may not. Never raises."""
    try:
        ticket, signature = _read(raw, expected.fingerprint)
        _check_signature(ticket, signature, expected.keys)
        _check_host(ticket, expected.hosts)
        _check_fingerprint(ticket.fingerprint, expected.fingerprint)
        _check_groups(ticket, expected.groups)
    except ticket_fields.RefusedError as refused:
        return refused.refusal
    return ticket


def _read(raw: Any, mine: Fingerprint | None) -> tuple[Ticket, str | None]:
    if not isinstance(raw, dict):
        raise ticket_fields.RefusedError(RefusalReason.NOT_AN_OBJECT, "kv_transfer_params is not an object")
    extension = _extension(raw)
    ticket = Ticket(
        engine_id=ticket_fields.plain_name(raw, "remote_engine_id"),
        request_id=ticket_fields.plain_name(raw, "remote_request_id"),
        host=ticket_fields.host(raw),
        port=ticket_fields.integer(raw, "remote_port", 1, 65535),
        tp_size=ticket_fields.integer(raw, "tp_size", 1, MOST_RANKS),
        dcp_size=ticket_fields.integer(raw, "dcp_size", 1, MOST_RANKS, absent=1),
        pp_size=ticket_fields.integer(raw, "pp_size", 1, MOST_RANKS, absent=1),
        num_tokens=ticket_fields.integer(raw, "remote_num_tokens", 1, MOST_TOKENS),
        block_ids=ticket_fields.block_ids(raw.get("remote_block_ids")),
        block_sizes=ticket_fields.block_sizes(extension.get("block_sizes")),
        registration=ticket_fields.registration(raw),
        readers=ticket_fields.integer(extension, "readers", 1, 1024),
        issued_at=ticket_fields.timestamp(extension.get("issued_at")),
        digest=ticket_fields.digest_hex(extension, "digest"),
        fingerprint=read_fingerprint(extension.get("fingerprint"), mine),
    )
    if raw.get("transfer_mode", "pull") != "pull" or raw.get("remote_blocks_expiry_time") is not None:
        raise ticket_fields.RefusedError(RefusalReason.BAD_FIELD, "not a ticket for a pull from a prefill node")
    return ticket, None if extension.get("signature") is None else ticket_fields.digest_hex(extension, "signature")


def _extension(raw: dict[Any, Any]) -> dict[Any, Any]:
    extension = raw.get(EXTENSION)
    if extension is None:
        raise ticket_fields.RefusedError(
            RefusalReason.MISSING_FIELD, f"{EXTENSION} is missing: not issued by this connector"
        )
    if not isinstance(extension, dict):
        raise ticket_fields.RefusedError(RefusalReason.BAD_FIELD, f"{EXTENSION} is not an object")
    version = extension.get("v")
    if type(version) is not int or version != VERSION:
        raise ticket_fields.RefusedError(RefusalReason.UNKNOWN_VERSION, f"only version {VERSION} is known here")
    return extension


def _check_signature(ticket: Ticket, signature: str | None, keys: Sequence[bytes]) -> None:
    if not keys:
        return
    if signature is None:
        raise ticket_fields.RefusedError(RefusalReason.UNSIGNED, "the ticket is not signed, and this node has a key")
    if not is_signed(ticket, signature, keys):
        raise ticket_fields.RefusedError(RefusalReason.BAD_SIGNATURE, "no key of this node made the signature")


def _check_host(ticket: Ticket, hosts: frozenset[str]) -> None:
    if hosts and ticket.host not in hosts:
        raise ticket_fields.RefusedError(RefusalReason.HOST, "remote_host is not in pdproxy_allowed_hosts")


def _check_fingerprint(theirs: Fingerprint, mine: Fingerprint | None) -> None:
    if mine is not None and theirs != mine:
        raise ticket_fields.RefusedError(RefusalReason.FINGERPRINT, summary(differences(mine, theirs)))


def _check_groups(ticket: Ticket, groups: tuple[GroupShape, ...]) -> None:
    if not len(ticket.block_ids) == len(ticket.block_sizes) == len(groups):
        raise ticket_fields.RefusedError(RefusalReason.GROUPS, f"this model has {len(groups)} cache groups")
    for blocks, size, shape in zip(ticket.block_ids, ticket.block_sizes, groups, strict=True):
        _check_group(blocks, size, shape, ticket)


def _check_group(blocks: tuple[int, ...], size: int, shape: GroupShape, ticket: Ticket) -> None:
    if size % shape.block_size and shape.block_size % size:
        raise ticket_fields.RefusedError(RefusalReason.GROUPS, "block sizes of the two nodes do not divide each other")
    most = -(-ticket.num_tokens // size)
    match shape.kind:
        case GroupKind.STATE:
            fits = len(blocks) == 1
        case GroupKind.WINDOW:
            fits = 1 <= len(blocks) <= most
        case GroupKind.ATTENTION:
            fits = 1 <= len(blocks) <= most if ticket.dcp_size > 1 else len(blocks) == most
    if not fits:
        raise ticket_fields.RefusedError(
            RefusalReason.BLOCKS, f"{len(blocks)} blocks in a {shape.kind} group do not fit the tokens"
        )
    if shape.kind is not GroupKind.WINDOW and (0 in blocks or len(set(blocks)) != len(blocks)):
        raise ticket_fields.RefusedError(
            RefusalReason.BLOCKS, f"a block of a {shape.kind} group is null or named twice"
        )


def _mac(key: bytes, message: bytes) -> str:
    return hmac.new(key, message, hashlib.sha256).hexdigest()
