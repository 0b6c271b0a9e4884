"""Reading one field of something that a hostile sender may have written. Pure.

Each reader returns a checked value or raises `Refused`, which `ticket.parse` catches: it goes no further than that.


The digest of a prompt: what the KV of its first tokens depends on, whichever node computes it. Pure.

Token ids, the LoRA adapter's content (see `adapters`), cache salt, and each media item's content hash with its place.
What a node names or numbers by itself, such as adapters and their integer ids, stays out: two nodes disagree on it.

vLLM names a media item by the hash of its content, unless the client named it (`uuid`): then it is the client's word,
which says nothing of the bytes. A name that is not the form of a hash is taken for such a word (`names_media_itself`).
A client that gives a word in the form of a hash is not found out; vLLM's own caches believe it, too. The same holds of
a word beside `mm_processor_kwargs`, of which vLLM makes a hash.
"""

import hashlib
import json
import re
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

MOST_BLOCKS = 1 << 20
MOST_GROUPS = 64
LONGEST_NAME = 512

_PLAIN_NAME = re.compile(r"[!-+\--~]+")
"""Printable ASCII without blanks and without the comma, which separates request ids in vLLM's heartbeats."""
_HOST = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_.:%-]{0,251}[A-Za-z0-9])?")
_HEX = re.compile(r"[0-9a-f]{64}")


class RefusalReason(StrEnum):
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

    reason: RefusalReason
    detail: str


class RefusedError(Exception):
    """Carries a refusal from the reader of one field up to `ticket.parse`."""

    def __init__(self, reason: RefusalReason, detail: str) -> None:
        super().__init__(detail)
        self.refusal = Refusal(reason, detail)


def present(fields: dict[Any, Any], name: str) -> Any:
    """Whatever stands under `name`, if it is not null."""
    value = fields.get(name)
    if value is None:
        raise RefusedError(RefusalReason.MISSING_FIELD, f"{name} is missing")
    return value


def plain_name(fields: dict[Any, Any], name: str) -> str:
    """A name that `usable_name` lets through."""
    value = present(fields, name)
    if not usable_name(value):
        raise RefusedError(RefusalReason.BAD_FIELD, f"{name} is not a plain name")
    return str(value)


def usable_name(value: Any) -> bool:
    """Whether `value` can stand in a ticket and in a notice: short printable ASCII, no blank, no comma."""
    return isinstance(value, str) and len(value) <= LONGEST_NAME and _PLAIN_NAME.fullmatch(value) is not None


def host(fields: dict[Any, Any]) -> str:
    """The prefill node's address: a host name, IPv4 or IPv6."""
    value = present(fields, "remote_host")
    if not isinstance(value, str) or _HOST.fullmatch(value) is None:
        raise RefusedError(RefusalReason.BAD_FIELD, "remote_host is not a host name or address")
    return value


def digest_hex(fields: dict[Any, Any], name: str) -> str:
    """A SHA-256 in lower-case hexadecimal digits."""
    value = present(fields, name)
    if not isinstance(value, str) or _HEX.fullmatch(value) is None:
        raise RefusedError(RefusalReason.BAD_FIELD, f"{name} is not 64 hexadecimal digits")
    return value


def whole(fields: dict[Any, Any], name: str, least: int, most: int, absent: int | None = None) -> int:
    """A whole number in a range, both ends included; booleans are none."""
    value = absent if fields.get(name) is None and absent is not None else present(fields, name)
    if type(value) is not int or not least <= value <= most:
        raise RefusedError(RefusalReason.BAD_FIELD, f"{name} is not a whole number from {least} to {most}")
    return value


def registration(fields: dict[Any, Any]) -> int | None:
    """vLLM 0.33's counter of memory registrations; 0.32 has none."""
    name = "remote_registration_generation"
    return None if fields.get(name) is None else whole(fields, name, 0, 1 << 62)


def moment(value: Any) -> float:
    """Unix seconds."""
    if type(value) not in (int, float) or not 0 <= value < 1 << 40:
        raise RefusedError(RefusalReason.BAD_FIELD, "issued_at is not a time in seconds")
    return float(value)


def block_sizes(value: Any) -> tuple[int, ...]:
    """Tokens a block, for each group."""
    if not isinstance(value, list | tuple) or not 0 < len(value) <= MOST_GROUPS:
        raise RefusedError(RefusalReason.BAD_FIELD, "block_sizes is not a list")
    if any(type(size) is not int or not 0 < size <= 1 << 24 for size in value):
        raise RefusedError(RefusalReason.BAD_FIELD, "block_sizes holds something that is no size")
    return tuple(value)


def block_ids(value: Any) -> tuple[tuple[int, ...], ...]:
    """Block ids, for each group."""
    if value is None:
        raise RefusedError(RefusalReason.MISSING_FIELD, "remote_block_ids is missing")
    if not isinstance(value, list | tuple) or not 0 < len(value) <= MOST_GROUPS:
        raise RefusedError(RefusalReason.GROUPS, "remote_block_ids is not a list of groups")
    if not all(isinstance(group, list | tuple) for group in value):
        raise RefusedError(RefusalReason.GROUPS, "a group of remote_block_ids is not a list")
    if sum(map(len, value)) > MOST_BLOCKS:
        raise RefusedError(RefusalReason.BLOCKS, "remote_block_ids is too long")
    if any(type(block) is not int or not 0 <= block < 1 << 31 for group in value for block in group):
        raise RefusedError(RefusalReason.BLOCKS, "remote_block_ids holds something that is no block id")
    return tuple(tuple(group) for group in value)


_MEDIA_HASH = re.compile(r"[0-9a-f]{64}|[0-9a-f]{128}")
"""BLAKE3 and SHA-256, or SHA-512, as `--mm-hasher-algorithm` says."""


class HasPrompt(Protocol):
    """The part of vLLM's `Request` that shapes its KV."""

    @property
    def prompt_token_ids(self) -> Sequence[int] | None: ...
    @property
    def prompt_embeds(self) -> Any: ...
    @property
    def cache_salt(self) -> str | None: ...
    @property
    def mm_features(self) -> Sequence[Any]: ...


def token_digest(token_ids: Sequence[int], shaping: Sequence[Any] = ()) -> str:
    """SHA-256, in hex, of the token ids and of `shaping`, which must be plain JSON values."""
    ids = array("q", token_ids)
    if sys.byteorder == "big":
        ids.byteswap()
    head = json.dumps([len(ids), list(shaping)], separators=(",", ":"), ensure_ascii=True).encode()
    return hashlib.sha256(head + b"\n" + ids.tobytes()).hexdigest()


def prompt_digest(request: HasPrompt, num_tokens: int, adapter: str | None) -> str:
    """The digest of the first `num_tokens` tokens of a request's prompt, and of what else shapes them.

    `adapter`: the content of the request's LoRA adapter, None without one.
    """
    return token_digest((request.prompt_token_ids or ())[:num_tokens], [adapter, request.cache_salt, _media(request)])


def is_plain(request: HasPrompt) -> bool:
    """Whether the prompt is token ids and nothing else: embeddings have no digest."""
    return request.prompt_token_ids is not None and request.prompt_embeds is None


def names_media_itself(request: HasPrompt) -> bool:
    """Whether a media item goes by a client's word (or a number of this node's) and not by its content."""
    return any(_MEDIA_HASH.fullmatch(_media_hash(item)) is None for item in request.mm_features)


def _media(request: HasPrompt) -> list[Any]:
    return [
        [_media_hash(item), int(item.mm_position.offset), int(item.mm_position.length)] for item in request.mm_features
    ]


def _media_hash(item: Any) -> str:
    """Without the adapter's name, which vLLM puts before it where adapters change the vision tower."""
    return str(item.mm_hash or item.identifier)
