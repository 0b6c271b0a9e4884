"""Reading one field of something that a hostile sender may have written. Pure.

Each reader returns a checked value or raises `Refused`, which `ticket.parse` catches: it goes no further than that.
"""

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

MOST_BLOCKS = 1 << 20
MOST_GROUPS = 64
LONGEST_NAME = 512

_NAME = re.compile(r"[!-+\--~]+")
"""Printable ASCII without blanks and without the comma, which separates request ids in vLLM's heartbeats."""
_HOST = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_.:%-]{0,251}[A-Za-z0-9])?")
_HEX = re.compile(r"[0-9a-f]{64}")


class Reason(StrEnum):
    """Why something was refused; the values are the metric's labels and the log's words."""

    NOT_AN_OBJECT = "not_an_object"
    CONTRADICTORY = "contradictory"
    NO_FLAG = "no_flag"
    WRONG_ROLE = "wrong_role"
    REMOTE_FIELDS = "remote_fields_on_prefill"
    UNSUITABLE_REQUEST = "unsuitable_request"
    MISSING_FIELD = "missing_field"
    BAD_FIELD = "bad_field"
    UNKNOWN_VERSION = "unknown_version"
    GROUPS = "groups"
    BLOCKS = "blocks"
    UNSIGNED = "unsigned"
    BAD_SIGNATURE = "bad_signature"
    HOST = "host"
    FINGERPRINT = "fingerprint"
    NUMBER = "number"
    DIGEST = "digest"


@dataclass(frozen=True, slots=True)
class Refusal:
    """Not taken. `detail` is our own words: it quotes nothing that a sender wrote but the parts of a fingerprint, which
    are short plain words (`fingerprint.read_fingerprint`)."""

    reason: Reason
    detail: str


class Refused(Exception):
    """Carries a refusal from the reader of one field up to `ticket.parse`."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.refusal = Refusal(reason, detail)


def present(fields: dict[Any, Any], name: str) -> Any:
    """Whatever stands under `name`, if it is not null."""
    value = fields.get(name)
    if value is None:
        raise Refused(Reason.MISSING_FIELD, f"{name} is missing")
    return value


def plain_name(fields: dict[Any, Any], name: str) -> str:
    """A name that `usable_name` lets through."""
    value = present(fields, name)
    if not usable_name(value):
        raise Refused(Reason.BAD_FIELD, f"{name} is not a plain name")
    return str(value)


def usable_name(value: Any) -> bool:
    """Whether `value` can stand in a ticket and in a notice: short printable ASCII, no blank, no comma."""
    return isinstance(value, str) and len(value) <= LONGEST_NAME and _NAME.fullmatch(value) is not None


def host(fields: dict[Any, Any]) -> str:
    """The prefill node's address: a host name, IPv4 or IPv6."""
    value = present(fields, "remote_host")
    if not isinstance(value, str) or _HOST.fullmatch(value) is None:
        raise Refused(Reason.BAD_FIELD, "remote_host is not a host name or address")
    return value


def digest_hex(fields: dict[Any, Any], name: str) -> str:
    """A SHA-256 in lower-case hexadecimal digits."""
    value = present(fields, name)
    if not isinstance(value, str) or _HEX.fullmatch(value) is None:
        raise Refused(Reason.BAD_FIELD, f"{name} is not 64 hexadecimal digits")
    return value


def whole(fields: dict[Any, Any], name: str, least: int, most: int, absent: int | None = None) -> int:
    """A whole number in a range, both ends included; booleans are none."""
    value = absent if fields.get(name) is None and absent is not None else present(fields, name)
    if type(value) is not int or not least <= value <= most:
        raise Refused(Reason.BAD_FIELD, f"{name} is not a whole number from {least} to {most}")
    return value


def registration(fields: dict[Any, Any]) -> int | None:
    """vLLM 0.33's counter of memory registrations; 0.32 has none."""
    name = "remote_registration_generation"
    return None if fields.get(name) is None else whole(fields, name, 0, 1 << 62)


def moment(value: Any) -> float:
    """Unix seconds."""
    if type(value) not in (int, float) or not 0 <= value < 1 << 40:
        raise Refused(Reason.BAD_FIELD, "issued_at is not a time in seconds")
    return float(value)


def block_sizes(value: Any) -> tuple[int, ...]:
    """Tokens a block, for each group."""
    if not isinstance(value, list | tuple) or not 0 < len(value) <= MOST_GROUPS:
        raise Refused(Reason.BAD_FIELD, "block_sizes is not a list")
    if any(type(size) is not int or not 0 < size <= 1 << 24 for size in value):
        raise Refused(Reason.BAD_FIELD, "block_sizes holds something that is no size")
    return tuple(value)


def block_ids(value: Any) -> tuple[tuple[int, ...], ...]:
    """Block ids, for each group."""
    if value is None:
        raise Refused(Reason.MISSING_FIELD, "remote_block_ids is missing")
    if not isinstance(value, list | tuple) or not 0 < len(value) <= MOST_GROUPS:
        raise Refused(Reason.GROUPS, "remote_block_ids is not a list of groups")
    if not all(isinstance(group, list | tuple) for group in value):
        raise Refused(Reason.GROUPS, "a group of remote_block_ids is not a list")
    if sum(map(len, value)) > MOST_BLOCKS:
        raise Refused(Reason.BLOCKS, "remote_block_ids is too long")
    if any(type(block) is not int or not 0 <= block < 1 << 31 for group in value for block in group):
        raise Refused(Reason.BLOCKS, "remote_block_ids holds something that is no block id")
    return tuple(tuple(group) for group in value)
