"""Block hashes: what vLLM 0.32 computed, what makes them differ, and what has none.

`tests/vllm_compat/test_block_hashes.py` compares them with vLLM's in the same process.
"""

import pytest

from pdproxy.planning.block_hashes import (
    HashAlgorithm,
    HashScheme,
    Lora,
    MediaItem,
    PromptExtras,
    PromptHasher,
    event_hashes,
    root_hash,
)

CBOR, PICKLE = HashAlgorithm.SHA256_CBOR, HashAlgorithm.SHA256
IDS = [0, 23, 24, 255, 256, 65_535, 65_536, 151_643, 7]
PLAIN = PromptExtras()


def hashes(
    algorithm: HashAlgorithm = CBOR, ids: list[int] = IDS, extras: PromptExtras = PLAIN, unit: int = 4
) -> tuple[int, ...] | None:
    return PromptHasher(HashScheme(algorithm, unit, unit, root_hash(algorithm))).hashes(ids, extras)


@pytest.mark.parametrize(
    ("algorithm", "known"),
    [
        (CBOR, (0xAE74C52DB0F7A8E2, 0x4F3DA592017522AC)),
        (PICKLE, (0xE4CDA8E8D3358047, 0x6DEED149093128AE)),
    ],
)
def test_they_are_those_that_vllm_published(algorithm: HashAlgorithm, known: tuple[int, ...]) -> None:
    assert hashes(algorithm) == known


def test_each_stands_for_all_tokens_before_it() -> None:
    plain, changed = hashes(), hashes(ids=[1, *IDS[1:]])
    assert plain
    assert changed
    assert not set(plain) & set(changed)
    assert hashes(ids=IDS[:4]) == plain[:1]


@pytest.mark.parametrize(
    ("extras", "first_to_differ"),
    [
        (PromptExtras(salt="s"), 0),
        (PromptExtras(lora=Lora("l", "/l")), 0),
        (PromptExtras(lora=Lora("l", "/m")), 0),
        (PromptExtras(media=(MediaItem("m", 5, 2),)), 1),
        (PromptExtras(media=(MediaItem("m", 4, 2),)), 1),
        (PromptExtras(media=(MediaItem("n", 4, 2),)), 1),
        (PromptExtras(media=(MediaItem("m", 8, 2),)), 2),
        (PromptExtras(salt=""), 2),
    ],
)
def test_salts_adapters_and_media_make_them_differ(extras: PromptExtras, first_to_differ: int) -> None:
    plain, other = hashes(), hashes(extras=extras)
    assert plain
    assert other
    assert other[:first_to_differ] == plain[:first_to_differ]
    assert not set(other[first_to_differ:]) & set(plain)


def test_all_that_makes_them_differ_makes_them_differ_from_each_other() -> None:
    media = [MediaItem("m", 0, 2), MediaItem("n", 0, 2), MediaItem("m", 1, 2), MediaItem("m", 1, 5)]
    all_extras = [PromptExtras(media=(item,)) for item in media]
    all_extras += [PromptExtras(salt=salt, lora=lora) for salt in ("l", "m") for lora in (None, Lora("l", "/l"))]
    assert len({hashes(extras=extras) for extras in all_extras}) == len(all_extras)


@pytest.mark.parametrize(
    ("algorithm", "ids", "extras"),
    [
        (PICKLE, IDS, PromptExtras(media=(MediaItem("m", 0, 2),))),
        (CBOR, [1, 2, 3, 1 << 64], PLAIN),
        (CBOR, IDS, PromptExtras(salt="\ud800")),
    ],
)
def test_what_cannot_be_known_has_none(algorithm: HashAlgorithm, ids: list[int], extras: PromptExtras) -> None:
    assert hashes(algorithm, ids, extras) is None


def test_a_prompt_shorter_than_a_unit_has_no_hash() -> None:
    assert hashes(ids=IDS[:3]) == ()


@pytest.mark.parametrize(("unit", "block_size"), [(0, 16), (16, 8), (16, 24), (-16, 16)])
def test_sizes_that_no_node_has_are_refused(unit: int, block_size: int) -> None:
    with pytest.raises(ValueError, match="cannot be hashed"):
        HashScheme(CBOR, unit, block_size, bytes(32))


def test_a_root_that_is_no_digest_is_refused() -> None:
    with pytest.raises(ValueError, match="16 bytes instead of 32"):
        HashScheme(CBOR, 16, 16, bytes(16))


def test_an_event_s_hash_is_64_bits_however_it_is_published() -> None:
    assert event_hashes([bytes(range(200, 232))]) == event_hashes([int.from_bytes(bytes(range(224, 232)), "big")])
