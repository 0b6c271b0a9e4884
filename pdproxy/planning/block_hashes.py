"""The hashes under which a vLLM node caches the blocks of a prompt, computed without vLLM. Pure.

vLLM hashes the prompt in steps of `unit` tokens; each hash is made from the one before it, so it stands for the whole
prefix that ends there (`hash_block_tokens` in `vllm/v1/core/kv_cache_utils.py`, 0.32):

    hash = SHA-256(serialized (hash before, (token id, ...), extra keys or None))

`sha256` serializes by pickle, `sha256_cbor` by CBOR. The extra keys are the LoRA adapter, media items inside of the
unit, and, for the first unit, the cache salt. Not supported, and so without hashes: prompts given as embeddings, media
with `sha256`, whose pickle depends on which Python objects vLLM happens to share, and vLLM's xxhash algorithms.

CBOR is encoded here: tuples of small integers twice as fast as by cbor2, on which the proxy then need not depend.
``python -m deploy.bench.index_cost`` measures it.
"""

import dataclasses
import enum
import hashlib
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

DEFAULT_SEED = "vllm-none-hash"
"""The seed of vLLM's root hash where the node's environment has no PYTHONHASHSEED; else that."""
_DIGEST = 32
_LOW = 8
_LOW_BITS = (1 << 8 * _LOW) - 1
_PICKLE = 5
"""pickle.HIGHEST_PROTOCOL of every Python since 3.8, which vLLM asks for."""
_VOCABULARY = 1 << 18
"""Token ids below it are encoded once; there are vocabularies of 262,144."""

ExtraKey: TypeAlias = tuple[str | int, ...]
_Serialize: TypeAlias = Callable[[bytes, Sequence[int], tuple[ExtraKey, ...] | None], bytes]


class HashAlgorithm(enum.StrEnum):
    """vLLM's `--prefix-caching-hash-algo`, as far as it can be computed here."""

    SHA256 = "sha256"
    """vLLM's default."""
    SHA256_CBOR = "sha256_cbor"


@dataclasses.dataclass(frozen=True, slots=True)
class HashScheme:
    """How a node hashes, and where its hits may end. Nodes with equal schemes have equal hashes for a prompt.

    Attributes:
        unit: tokens for each hash: vLLM's hash_block_size; `--prefix-match-unit` or, without, the block size.
        block_size: tokens in an attention block, over all ranks of decode context parallelism.
        root: the hash before the first: vLLM's NONE_HASH, 32 bytes; see `root_hash`.
        drops_unit: the node gives up the last unit of a hit (EAGLE and MTP).
        states: its model has state groups (mamba, GDN); None: to be learned from events.

    Raises:
        ValueError: sizes that no vLLM node has, or a root that is no SHA-256 digest.
    """

    algorithm: HashAlgorithm
    unit: int
    block_size: int
    root: bytes
    drops_unit: bool = False
    states: bool | None = None

    def __post_init__(self) -> None:
        if self.unit < 1 or self.block_size % self.unit or self.block_size < self.unit:
            raise ValueError(f"a block of {self.block_size} tokens cannot be hashed {self.unit} tokens at a time")
        if len(self.root) != _DIGEST:
            raise ValueError(f"the root hash has {len(self.root)} bytes instead of {_DIGEST}")


class Lora(NamedTuple):
    """The adapter of a request. `path`: as the node was given it (`root` of the adapter in the node's `/v1/models`)."""

    name: str
    path: str


class MediaItem(NamedTuple):
    """An image or the like. `identifier`: vLLM's hash of its content; `offset`, `length`: its placeholder tokens."""

    identifier: str
    offset: int
    length: int


@dataclasses.dataclass(frozen=True, slots=True)
class PromptExtras:
    """Things that make equal tokens mean something else. `media`: by offset, without overlaps."""

    salt: str | None = None
    lora: Lora | None = None
    media: tuple[MediaItem, ...] = ()


PLAIN = PromptExtras()


def root_hash(algorithm: HashAlgorithm, seed: str = DEFAULT_SEED) -> bytes:
    """NONE_HASH of a node. `seed`: its PYTHONHASHSEED, if it has one."""
    serialized = pickle.dumps(seed, _PICKLE) if algorithm is HashAlgorithm.SHA256 else _text(seed)
    return hashlib.sha256(serialized).digest()


def event_hashes(published: Iterable[int | bytes]) -> tuple[int, ...]:
    """Hashes as an event carries them, each as 64 bits.

    vLLM publishes those 64 bits; with VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0 all 32 bytes. A publisher that takes them
    for a signed number is understood as well.
    """
    return tuple(
        [each & _LOW_BITS if isinstance(each, int) else int.from_bytes(each[-_LOW:], "big") for each in published]
    )


class PromptHasher:
    """Hashes prompts by one scheme. Keeps the encoding of each token id that it has met: at most 20 MB."""

    def __init__(self, scheme: HashScheme) -> None:
        self.scheme = scheme
        pickled = scheme.algorithm is HashAlgorithm.SHA256
        self._serialize: _Serialize = _pickled if pickled else _CborUnits(scheme.unit)

    def hashes(self, ids: Sequence[int], extras: PromptExtras = PLAIN) -> tuple[int, ...] | None:
        """One hash of 64 bits for each whole unit of the prompt, in the prompt's order.

        None where they cannot be known: see above, token ids that do not fit into 64 bits, and text that is no Unicode.
        """
        if extras.media and self.scheme.algorithm is HashAlgorithm.SHA256:
            return None
        try:
            return tuple(int.from_bytes(digest[-_LOW:], "big") for digest in self._digests(ids, extras))
        except (OverflowError, UnicodeEncodeError):
            return None

    def _digests(self, ids: Sequence[int], extras: PromptExtras) -> Iterator[bytes]:
        unit, serialize, digest = self.scheme.unit, self._serialize, self.scheme.root
        keys = None
        for start in range(0, len(ids) - unit + 1, unit):
            if extras is not PLAIN:
                keys = _extra_keys(extras, start, start + unit)
            digest = hashlib.sha256(serialize(digest, ids[start : start + unit], keys)).digest()
            yield digest


def _extra_keys(extras: PromptExtras, start: int, end: int) -> tuple[ExtraKey, ...] | None:
    """As `generate_block_hash_extra_keys` makes them for the tokens from `start` to before `end`."""
    keys: list[ExtraKey] = []
    if extras.lora is not None:
        keys.append(("lora", extras.lora.name, extras.lora.path))
    inside = (item for item in extras.media if item.offset < end and item.offset + item.length > start)
    keys += [("mm", item.identifier, item.offset - start) for item in inside]
    if extras.salt and start == 0:
        keys.append(("cache_salt", extras.salt))
    return tuple(keys) or None


def _pickled(before: bytes, ids: Sequence[int], keys: tuple[ExtraKey, ...] | None) -> bytes:
    return pickle.dumps((before, tuple(ids), keys), _PICKLE)


class _CborUnits:
    """The CBOR of (hash before, token ids, extra keys); `unit`: token ids in each."""

    def __init__(self, unit: int) -> None:
        self._encoded = _Encoded()
        self._form = b"\x83\x58\x20%b" + _head(_ARRAY, unit) + b"%b%b"

    def __call__(self, before: bytes, ids: Sequence[int], keys: tuple[ExtraKey, ...] | None) -> bytes:
        return self._form % (before, b"".join(map(self._encoded.__getitem__, ids)), _cbor(keys))


class _Encoded(dict[int, bytes]):
    """Token ids and their CBOR."""

    def __missing__(self, token: int) -> bytes:
        encoded = _integer(token)
        if 0 <= token < _VOCABULARY:
            self[token] = encoded
        return encoded


_UNSIGNED, _NEGATIVE, _TEXT, _ARRAY = 0x00, 0x20, 0x60, 0x80
"""CBOR's major types (RFC 8949, 3.1), in the upper three bits of an item's first byte."""


def _cbor(value: ExtraKey | tuple[ExtraKey, ...] | str | int | None) -> bytes:
    if value is None:
        return b"\xf6"
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, int):
        return _integer(value)
    return _head(_ARRAY, len(value)) + b"".join(map(_cbor, value))


def _text(value: str) -> bytes:
    encoded = value.encode()
    return _head(_TEXT, len(encoded)) + encoded


def _integer(value: int) -> bytes:
    return _head(_UNSIGNED, value) if value >= 0 else _head(_NEGATIVE, -1 - value)


def _head(major: int, argument: int) -> bytes:
    """An item's type and its number, in the fewest bytes. Raises OverflowError beyond 64 bits."""
    if argument < 24:
        return bytes((major | argument,))
    doubled = min(((argument.bit_length() - 1) >> 3).bit_length(), 3)
    return bytes((major | (24 + doubled),)) + argument.to_bytes(1 << doubled, "big")
