"""What must be true of the children before an engine may start with them. Pure; each refusal says what to change."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import lcm

from connector.errors import ConfigError
from connector.multi.settings import ChildSettings


@dataclass(frozen=True, slots=True)
class Blocks:
    """Tokens a block of each KV-cache group that grows with the sequence, by the group's number, and what hashes name.

    `hash_block`: the granularity, in tokens, at which cached blocks are named. `max_model_len`: in tokens.
    """

    sizes: Mapping[int, int]
    hash_block: int
    max_model_len: int


def require_hybrid(children: Sequence[ChildSettings], supporting: Iterable[bool]) -> None:
    """Every child must support vLLM's hybrid memory allocator. Raises ConfigError with the child's name."""
    for child, supports in zip(children, supporting, strict=True):
        if not supports:
            raise ConfigError(
                f"connector {child.name!r} ({child.connector}) does not support the hybrid memory allocator, which "
                "models with state groups need: take it out of kv_connector_extra_config.connectors, or put one in "
                "its place whose class derives from vLLM's SupportsHMA."
            )


def require_one_side_channel(children: Sequence[ChildSettings], handing_over: Iterable[bool]) -> None:
    """vLLM serves one handshake a node, and one ticket a request. Raises ConfigError with the names."""
    several = [child.name for child, hands_over in zip(children, handing_over, strict=True) if hands_over]
    if len(several) > 1:
        raise ConfigError(
            f"connectors {' and '.join(map(repr, several))} both hand requests over between nodes: keep one of them."
        )


def require_units(children: Sequence[ChildSettings], blocks: Blocks) -> None:
    """A child that offloads in units of its own must be able to cut them. Raises ConfigError with what would work."""
    for child in children:
        if child.unit is not None:
            _require_unit(child.name, child.unit, blocks)


def _require_unit(name: str, unit: int, blocks: Blocks) -> None:
    if unit < blocks.hash_block:
        raise ConfigError(
            f"connector {name!r} offloads units of {unit} tokens, less than the {blocks.hash_block} that cached blocks "
            f"are named by: use {fitting(unit, blocks)}."
        )
    for group, size in blocks.sizes.items():
        if unit % size:
            raise ConfigError(
                f"connector {name!r} offloads units of {unit} tokens, but a block of cache group {group} has {size}: "
                f"use {fitting(unit, blocks)}, or a multiple of it."
            )
    if unit > blocks.max_model_len:
        raise ConfigError(
            f"connector {name!r} offloads units of {unit} tokens and would never store one, since max_model_len is "
            f"{blocks.max_model_len}: set max_model_len to {unit} or more."
        )


def fitting(unit: int, blocks: Blocks) -> int:
    """The smallest unit, not below `unit`, into which every group's blocks fit."""
    whole = lcm(blocks.hash_block, *blocks.sizes.values())
    return -(-unit // whole) * whole
