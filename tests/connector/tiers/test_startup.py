"""Configurations with which a node refuses to start, through vLLM's own factory."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.v1.kv_cache_interface import KVCacheSpec

from connector.config import ConfigError
from connector.tiers import MultiConnector, WeightedMultiConnector
from tests.connector.harness import HYBRID, attention, state
from tests.connector.tiers.harness import cache_of, multi_config, pull, tier


def create(children: Sequence[Any], groups: Sequence[KVCacheSpec] = HYBRID, **more: Any) -> KVConnectorBase_V1:
    config = multi_config(children, groups, **more)
    created = KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, cache_of(groups))
    assert isinstance(created, KVConnectorBase_V1)
    return created


def test_the_name_that_vllm_knows_loads_ours(tmp_path: Path) -> None:
    assert MultiConnector is WeightedMultiConnector
    assert isinstance(create([pull(), tier(tmp_path)]), WeightedMultiConnector)


def test_vllm_still_looks_into_the_children(tmp_path: Path) -> None:
    """Its platform code lays the state out so that NIXL can move it, since a child is called NixlConnector."""
    assert multi_config([pull(), tier(tmp_path)]).kv_transfer_config.has_connector("NixlConnector")


def test_a_child_without_hybrid_support_is_named_while_the_model_is_built(tmp_path: Path) -> None:
    """vLLM turns its hybrid allocator off for it, and would then end with a word about cache groups."""
    config = multi_config([pull(), tier(tmp_path, "lake", "DenseTier")])
    with pytest.raises(ConfigError, match=r"'lake' \(DenseTier\) does not support the hybrid memory allocator"):
        WeightedMultiConnector.get_required_kvcache_layout(config)


def test_and_when_the_connector_is_made(tmp_path: Path) -> None:
    config = multi_config([pull(), tier(tmp_path, "lake", "DenseTier")])
    with pytest.raises(ConfigError, match="'lake'"):
        WeightedMultiConnector(config, KVConnectorRole.SCHEDULER, cache_of(HYBRID))


def test_two_children_cannot_both_hand_over() -> None:
    with pytest.raises(ConfigError, match="'near' and 'far'"):
        create([pull("near"), pull("far")])


def test_a_unit_that_does_not_fit_names_one_that_does(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'disk' offloads units of 40 tokens, .* use 48"):
        create([pull(), tier(tmp_path, block_size=40)])


def test_a_unit_that_can_never_be_stored_names_the_length_that_would_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="set max_model_len to 8192 or more"):
        create([pull(), tier(tmp_path, block_size=8192)])


def test_a_state_that_is_not_cut_into_blocks_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "vllm.pdproxy.multi"):
        create([pull(), tier(tmp_path)], (attention(), state("none")))
    assert "Cache groups [1] hold one running state" in caplog.text


def test_a_failed_load_must_not_fail_its_request(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'recompute'"):
        create([pull(), tier(tmp_path)], policy="fail")


def test_the_handshake_is_for_the_child_that_hands_over(tmp_path: Path) -> None:
    """Others refuse the ranks of later pipeline stages, which do not concern them."""
    connector = create([tier(tmp_path)])
    connector.set_xfer_handshake_metadata_pp_aware({(1, 0): None})


def test_a_prefill_node_never_looks_up_by_attention_alone(tmp_path: Path) -> None:
    """Nobody brings it a state."""
    child = {**pull(), "kv_role": "kv_producer"}
    assert not create([child, tier(tmp_path)], role="kv_producer").supports_divergent_local_hybrid_hits
    assert create([pull(), tier(tmp_path)]).supports_divergent_local_hybrid_hits
