"""The digest of a prompt changes with all that shapes its KV, and with nothing else."""

import hashlib
import struct
from dataclasses import dataclass, field, replace
from typing import Any

from connector.prompt import digest, is_plain, prompt_digest


@dataclass(frozen=True)
class Lora:
    lora_name: str
    lora_int_id: int = 1


@dataclass(frozen=True)
class Place:
    offset: int
    length: int


@dataclass(frozen=True)
class Media:
    identifier: str
    mm_position: Place


@dataclass(frozen=True)
class Prompted:
    prompt_token_ids: list[int] | None = field(default_factory=lambda: list(range(100)))
    prompt_embeds: Any = None
    lora_request: Any = None
    cache_salt: str | None = None
    mm_features: tuple[Media, ...] = ()


PLAIN = Prompted()


def test_only_the_first_tokens_count() -> None:
    longer = replace(PLAIN, prompt_token_ids=[*range(99), 7, 8])
    assert prompt_digest(PLAIN, 99) == prompt_digest(longer, 99)
    assert prompt_digest(PLAIN, 100) != prompt_digest(longer, 100)


def test_the_number_of_tokens_counts() -> None:
    assert len({prompt_digest(PLAIN, number) for number in range(101)}) == 101


def test_a_salt_a_lora_and_media_count() -> None:
    shapes = [
        PLAIN,
        replace(PLAIN, cache_salt="a"),
        replace(PLAIN, cache_salt="b"),
        replace(PLAIN, lora_request=Lora("a")),
        replace(PLAIN, lora_request=Lora("b")),
        replace(PLAIN, mm_features=(Media("x", Place(3, 4)),)),
        replace(PLAIN, mm_features=(Media("x", Place(3, 5)),)),
        replace(PLAIN, mm_features=(Media("y", Place(3, 4)),)),
    ]
    assert len({prompt_digest(shape, 99) for shape in shapes}) == len(shapes)


def test_the_number_that_a_node_gives_a_lora_does_not_count() -> None:
    here, there = replace(PLAIN, lora_request=Lora("a", 1)), replace(PLAIN, lora_request=Lora("a", 2))
    assert prompt_digest(here, 99) == prompt_digest(there, 99)


def test_the_digest_is_the_same_on_every_machine() -> None:
    assert digest([1, 2, 3]) == hashlib.sha256(b"[3,[]]\n" + struct.pack("<3q", 1, 2, 3)).hexdigest()


def test_embeddings_are_not_plain() -> None:
    assert is_plain(PLAIN)
    assert not is_plain(replace(PLAIN, prompt_token_ids=None))
    assert not is_plain(replace(PLAIN, prompt_embeds=object()))
