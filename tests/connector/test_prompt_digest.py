"""The digest of a prompt changes with all that shapes its KV, and with nothing else."""

import hashlib
import struct
from dataclasses import dataclass, field, replace
from typing import Any

from connector.ticket_fields import has_client_named_media, is_token_prompt, prompt_digest, token_digest


@dataclass(frozen=True)
class Place:
    offset: int
    length: int


@dataclass(frozen=True)
class Media:
    identifier: str
    mm_position: Place
    mm_hash: str | None = None


@dataclass(frozen=True)
class Prompted:
    prompt_token_ids: list[int] | None = field(default_factory=lambda: list(range(100)))
    prompt_embeds: Any = None
    cache_salt: str | None = None
    mm_features: tuple[Media, ...] = ()


PLAIN = Prompted()


HASH = "0123456789abcdef" * 4


def of(prompted: Prompted, num_tokens: int = 99, adapter: str | None = None) -> str:
    return prompt_digest(prompted, num_tokens, adapter)


def test_only_the_first_tokens_count() -> None:
    longer = replace(PLAIN, prompt_token_ids=[*range(99), 7, 8])
    assert of(PLAIN, 99) == of(longer, 99)
    assert of(PLAIN, 100) != of(longer, 100)


def test_the_number_of_tokens_counts() -> None:
    assert len({of(PLAIN, number) for number in range(101)}) == 101


def test_a_salt_an_adapter_and_media_count() -> None:
    shapes = [
        PLAIN,
        replace(PLAIN, cache_salt="a"),
        replace(PLAIN, cache_salt="b"),
        replace(PLAIN, mm_features=(Media("x", Place(3, 4)),)),
        replace(PLAIN, mm_features=(Media("x", Place(3, 5)),)),
        replace(PLAIN, mm_features=(Media("y", Place(3, 4)),)),
    ]
    digests = [of(shape) for shape in shapes] + [of(PLAIN, adapter="a"), of(PLAIN, adapter="b")]
    assert len(set(digests)) == len(digests)


def test_an_adapter_s_name_before_a_media_hash_does_not_count() -> None:
    """vLLM puts it there where adapters change the vision tower; the adapter's content stands for it."""
    here, there = (
        replace(PLAIN, mm_features=(Media(f"{name}:{HASH}", Place(3, 4), HASH),)) for name in ("mine", "theirs")
    )
    assert of(here, adapter="a") == of(there, adapter="a")


def test_media_must_go_by_their_content() -> None:
    for name in (HASH, HASH * 2):
        assert not has_client_named_media(replace(PLAIN, mm_features=(Media(name, Place(3, 4)),)))
    for word in ("my-cat", "renderer0-mm-7-image-0", HASH.upper(), HASH[1:], f"{HASH}\n"):
        assert has_client_named_media(replace(PLAIN, mm_features=(Media(HASH, Place(0, 1)), Media(word, Place(3, 4)))))
    assert not has_client_named_media(PLAIN)


def test_the_digest_is_the_same_on_every_machine() -> None:
    assert token_digest([1, 2, 3]) == hashlib.sha256(b"[3,[]]\n" + struct.pack("<3q", 1, 2, 3)).hexdigest()


def test_embeddings_are_not_plain() -> None:
    assert is_token_prompt(PLAIN)
    assert not is_token_prompt(replace(PLAIN, prompt_token_ids=None))
    assert not is_token_prompt(replace(PLAIN, prompt_embeds=object()))
