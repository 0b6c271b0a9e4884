import pytest

from connector.config import ConfigError
from connector.tiers.children import ChildSettings
from connector.tiers.selection import (
    GroupBlocks,
    fitting,
    require_hybrid_support,
    require_one_side_channel,
    require_units,
)

PULL, DISK = ChildSettings("pull", "NixlConnector"), ChildSettings("disk", "DiskTier")
BLOCKS = GroupBlocks({0: 256, 1: 256}, hash_block=256, max_model_len=4096)


def disk(unit: int) -> list[ChildSettings]:
    return [PULL, ChildSettings("disk", "DiskTier", unit=unit)]


def test_the_child_without_hybrid_support_is_named() -> None:
    with pytest.raises(ConfigError, match=r"'disk' \(DiskTier\).*hybrid memory allocator.*take it out"):
        require_hybrid_support([PULL, DISK], [True, False])
    require_hybrid_support([PULL, DISK], [True, True])


def test_two_side_channels_are_one_too_many() -> None:
    with pytest.raises(ConfigError, match="'pull' and 'disk'"):
        require_one_side_channel([PULL, DISK], [True, True])
    require_one_side_channel([PULL, DISK], [True, False])


@pytest.mark.parametrize("unit", [256, 512, 4096])
def test_units_of_whole_blocks_fit(unit: int) -> None:
    require_units(disk(unit), BLOCKS)


@pytest.mark.parametrize(
    ("unit", "blocks", "message"),
    [
        (300, BLOCKS, "group 0 has 256: use 512"),
        (100, BLOCKS, "less than the 256 .*: use 256"),
        (4352, BLOCKS, "max_model_len is 4096: set max_model_len to 4352 or more"),
        (64, GroupBlocks({0: 16, 1: 48}, 16, 4096), "group 1 has 48: use 96"),
    ],
)
def test_a_misfit_names_the_number_that_would_work(unit: int, blocks: GroupBlocks, message: str) -> None:
    with pytest.raises(ConfigError, match=f"'disk' .*{message}"):
        require_units(disk(unit), blocks)


@pytest.mark.parametrize("unit", range(1, 300, 7))
def test_the_number_that_would_work_works(unit: int) -> None:
    blocks = GroupBlocks({0: 16, 1: 48, 2: 32}, 16, 4096)
    require_units(disk(fitting(unit, blocks)), blocks)
