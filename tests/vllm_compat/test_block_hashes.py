"""The proxy's block hashes are vLLM's, for everything that vLLM hashes."""

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash, maybe_convert_block_hash
from vllm.v1.request import Request

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

IDS = st.lists(st.one_of(st.integers(0, 300), st.integers(0, 300_000), st.integers(0, (1 << 64) - 1)), max_size=60)
EXAMPLES = int(os.environ.get("FUZZED", "40"))
WORDS = st.text(max_size=40)
NAMES = st.text(min_size=1, max_size=40)


@st.composite
def extras(draw: st.DrawFn, most_media: int) -> PromptExtras:
    """Salts, adapters, and media items one after the other."""
    media, offset = [], 0
    for identifier in draw(st.lists(WORDS, max_size=most_media)):
        offset += draw(st.integers(0, 20))
        length = draw(st.integers(1, 30))
        media.append(MediaItem(identifier, offset, length))
        offset += length
    return PromptExtras(
        salt=draw(st.none() | WORDS),
        lora=draw(st.none() | st.builds(Lora, NAMES, NAMES)),
        media=tuple(media),
    )


def assert_same(algorithm: HashAlgorithm, unit: int, ids: list[int], extras: PromptExtras) -> None:
    """As an engine publishes them."""
    hash_fn = get_hash_fn_by_name(algorithm)
    init_none_hash(hash_fn)
    features = [
        MultiModalFeatureSpec(None, "image", item.identifier, PlaceholderRange(item.offset, item.length))
        for item in extras.media
    ]
    request = Request(
        "r",
        ids,
        SamplingParams(max_tokens=1),
        None,
        cache_salt=extras.salt,
        lora_request=LoRARequest(extras.lora.name, 1, extras.lora.path) if extras.lora else None,
        mm_features=features,
        block_hasher=get_request_block_hasher(unit, hash_fn),
    )
    hasher = PromptHasher(HashScheme(algorithm, unit, unit, kv_cache_utils.NONE_HASH))
    assert hasher.hashes(ids, extras) == tuple(maybe_convert_block_hash(each) for each in request.block_hashes)


@settings(max_examples=EXAMPLES)
@given(IDS, st.integers(1, 24), extras(most_media=3))
def test_cbor_hashes_are_vllm_s(ids: list[int], unit: int, extras: PromptExtras) -> None:
    assert_same(HashAlgorithm.SHA256_CBOR, unit, ids, extras)


@settings(max_examples=EXAMPLES)
@given(IDS, st.integers(1, 24), extras(most_media=0))
def test_pickle_hashes_are_vllm_s(ids: list[int], unit: int, extras: PromptExtras) -> None:
    assert_same(HashAlgorithm.SHA256, unit, ids, extras)


@pytest.mark.parametrize(("unit", "algorithm"), [(1056, HashAlgorithm.SHA256_CBOR), (272, HashAlgorithm.SHA256)])
def test_a_long_unit(unit: int, algorithm: HashAlgorithm) -> None:
    assert_same(algorithm, unit, [*range(70_000, 69_000, -1), *range(1_000)], PromptExtras())


@pytest.mark.parametrize("algorithm", HashAlgorithm)
@pytest.mark.parametrize("seed", [None, "0", "a seed of the operator's"])
def test_the_root_is_vllm_s(algorithm: HashAlgorithm, seed: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    if seed is not None:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
    init_none_hash(get_hash_fn_by_name(algorithm))
    assert root_hash(algorithm, *([seed] if seed is not None else [])) == kv_cache_utils.NONE_HASH


def test_an_event_s_hash_is_the_same_as_number_and_as_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    digest = kv_cache_utils.BlockHash(bytes(range(200, 232)))
    number = maybe_convert_block_hash(digest)
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")
    assert event_hashes([number]) == event_hashes([maybe_convert_block_hash(digest)]) >= (1 << 63,)
