"""The parts of a ticket: reading its fields from something that a hostile sender may have written, and the digest of
the prompt that it is for. Pure.

A reader of a field returns a checked value or raises `RefusedError`, which `ticket.parse` catches.

The digest of a prompt covers everything that the KV of its first tokens depends on, whichever node computes it: token
ids, the LoRA adapter's content (see `weights`), cache salt, and each media item's content hash with its position. What
a node names or numbers by itself, such as adapters and their integer ids, is left out: two nodes disagree on it.

vLLM names a media item by the hash of its content, unless the client named it (`uuid`), which says nothing of the
bytes. A name that does not have the form of a hash is taken for a client's (`has_client_named_media`). A client's name
in the form of a hash is not detected; vLLM's own caches trust it, too. The same holds of a name given together with
`mm_processor_kwargs`, of which vLLM makes a hash.
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
_HOST = re.compile(r"(?:::)?[A-Za-z0-9](?:[A-Za-z0-9_.:%-]{0,249}[A-Za-z0-9])?(?:::)?")
_HEX = re.compile(r"[0-9a-f]{64}")


class RefusalReason(StrEnum):
    """Why `kv_transfer_params` were refused; the values are labels of a metric and appear in the log."""

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
    OWN_ENGINE = "own_engine"


@dataclass(frozen=True, slots=True)
class Refusal:
    """`detail` quotes nothing that a sender wrote but the parts of a fingerprint, which `fingerprint.read_fingerprint`
    has limited to short plain ASCII."""

    reason: RefusalReason
    detail: str


class RefusedError(Exception):
    """Carries a refusal from the reader of one field up to `ticket.parse`."""

    def __init__(self, reason: RefusalReason, detail: str) -> None:
        super().__init__(detail)
        self.refusal = Refusal(reason, detail)


def required(fields: dict[Any, Any], name: str) -> Any:
    """The value of `name`, which must be there and not be null."""
    value = fields.get(name)
    if value is None:
        raise RefusedError(RefusalReason.MISSING_FIELD, f"{name} is missing")
    return value


def plain_name(fields: dict[Any, Any], name: str) -> str:
    """A name that `is_usable_name` accepts."""
    value = required(fields, name)
    if not is_usable_name(value):
        raise RefusedError(RefusalReason.BAD_FIELD, f"{name} is not a plain name")
    return str(value)


def is_usable_name(value: Any) -> bool:
    """Whether `value` can be a name in tickets and notifications: short printable ASCII, no blank, no comma."""
    return isinstance(value, str) and len(value) <= LONGEST_NAME and _PLAIN_NAME.fullmatch(value) is not None


def host(fields: dict[Any, Any]) -> str:
    """The prefill node's address: a host name, IPv4 or IPv6."""
    value = required(fields, "remote_host")
    if not isinstance(value, str) or _HOST.fullmatch(value) is None:
        raise RefusedError(RefusalReason.BAD_FIELD, "remote_host is not a host name or address")
    return value


def digest_hex(fields: dict[Any, Any], name: str) -> str:
    """A SHA-256 in lower-case hexadecimal digits."""
    value = required(fields, name)
    if not isinstance(value, str) or _HEX.fullmatch(value) is None:
        raise RefusedError(RefusalReason.BAD_FIELD, f"{name} is not 64 hexadecimal digits")
    return value


def integer(fields: dict[Any, Any], name: str, least: int, most: int, absent: int | None = None) -> int:
    """An integer in a range, both ends included; not a boolean."""
    value = absent if fields.get(name) is None and absent is not None else required(fields, name)
    if type(value) is not int or not least <= value <= most:
        raise RefusedError(RefusalReason.BAD_FIELD, f"{name} is not a whole number from {least} to {most}")
    return value


def registration(fields: dict[Any, Any]) -> int | None:
    """vLLM 0.33's counter of memory registrations; 0.32 has none."""
    name = "remote_registration_generation"
    return None if fields.get(name) is None else integer(fields, name, 0, 1 << 62)


def timestamp(value: Any) -> float:
    """A time in unix seconds."""
    if type(value) not in (int, float) or not 0 <= value < 1 << 40:
        raise RefusedError(RefusalReason.BAD_FIELD, "issued_at is not a time in seconds")
    return float(value)


def block_sizes(value: Any) -> tuple[int, ...]:
    """Tokens a block, for each group."""
    if not isinstance(value, list | tuple) or not 0 < len(value) <= MOST_GROUPS:
        raise RefusedError(RefusalReason.BAD_FIELD, "block_sizes is not a list")
    if any(type(size) is not int or not 0 < size <= 1 << 24 for size in value):
        raise RefusedError(RefusalReason.BAD_FIELD, "block_sizes holds something that is not a size")
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
        raise RefusedError(RefusalReason.BLOCKS, "remote_block_ids holds something that is not a block id")
    return tuple(tuple(group) for group in value)


_MEDIA_HASH = re.compile(r"[0-9a-f]{64}|[0-9a-f]{128}")
"""BLAKE3 and SHA-256, or SHA-512, as `--mm-hasher-algorithm` says."""


class HasPrompt(Protocol):
    """The part of vLLM's `Request` that its KV depends on."""

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
    """The digest of the first `num_tokens` tokens of a request's prompt, and of what else their KV depends on.

    `adapter`: the content of the request's LoRA adapter, None without one.
    """
    return token_digest((request.prompt_token_ids or ())[:num_tokens], [adapter, request.cache_salt, _media(request)])


def is_token_prompt(request: HasPrompt) -> bool:
    """Whether the prompt is token ids and not embeddings, which have no digest."""
    return request.prompt_token_ids is not None and request.prompt_embeds is None


def has_client_named_media(request: HasPrompt) -> bool:
    """Whether a media item is identified by a client's name (or a number of this node's) and not by its content."""
    return any(_MEDIA_HASH.fullmatch(_media_hash(item)) is None for item in request.mm_features)


class Suitable(HasPrompt, Protocol):
    """The part of vLLM's `Request` that says whether it can be handed over."""

    @property
    def request_id(self) -> str: ...
    @property
    def resumable(self) -> bool: ...
    @property
    def skip_reading_prefix_cache(self) -> bool: ...


def unsuitable(request: Suitable, ticket_tokens: int) -> str | None:
    """Why a request's KV cannot be handed over, or None. `ticket_tokens`: how many a ticket for it would cover."""
    if not is_token_prompt(request):
        return "prompt embeddings have no digest"
    if has_client_named_media(request):
        return "a media item is named by its sender, not by its content"
    if request.resumable:
        return "a session's prompt still grows"
    if request.skip_reading_prefix_cache:
        return "prompt log-probabilities need every token computed here"
    if ticket_tokens <= 0:
        return "the prompt is too short to hand over"
    return None if is_usable_name(request.request_id) else "the request id cannot stand in a ticket"


def _media(request: HasPrompt) -> list[Any]:
    return [
        [_media_hash(item), int(item.mm_position.offset), int(item.mm_position.length)] for item in request.mm_features
    ]


def _media_hash(item: Any) -> str:
    """Without the adapter's name, which vLLM puts before it where adapters change the vision tower."""
    return str(item.mm_hash or item.identifier)
