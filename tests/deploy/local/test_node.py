"""A node's command line and environment, and what is checked before it starts."""

import json
import socket
from pathlib import Path

import pytest

from deploy.local.node import (
    EXECUTOR,
    NodeSpec,
    Role,
    command,
    environment,
    kv_transfer_config,
    on_free_ports,
    start_node,
)
from deploy.local.ports import HOST, PortTakenError
from deploy.local.supervise import Supervisor


def option(line: list[str], name: str) -> str:
    return line[line.index(name) + 1]


def transfer_config(line: list[str]) -> dict[str, object]:
    config = json.loads(option(line, "--kv-transfer-config"))
    assert isinstance(config, dict)
    return config


def test_a_node_of_both_roles_reads_by_vllms_word_and_does_both_by_ours() -> None:
    made = kv_transfer_config(NodeSpec("n", Role.BOTH, 1, 2))
    assert made["kv_role"] == "kv_consumer"
    assert made["kv_connector_extra_config"] == {"pdproxy_roles": ["prefill", "decode"]}


@pytest.mark.parametrize(("role", "name"), [(Role.PREFILL, "kv_producer"), (Role.DECODE, "kv_consumer")])
def test_a_node_gets_our_connector_its_role_and_recompute(role: Role, name: str) -> None:
    config = transfer_config(command(NodeSpec("n", role, 8000, 9000, connector_config={"kv_lease_duration": 7})))
    assert config == {
        "kv_connector": "NixlConnector",
        "kv_connector_module_path": "pdproxy_connector.nixl_connector",
        "kv_role": name,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"kv_lease_duration": 7},
    }


def test_a_plain_node_has_no_connector() -> None:
    line = command(NodeSpec("n", Role.PLAIN, 8000, 9000))
    assert not {"--kv-transfer-config", "--kv-events-config", "--prefix-caching-hash-algo"} & set(line)


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_a_node_tells_what_it_caches_on_loopback_alone_by_hashes_that_others_can_compute(role: Role) -> None:
    """With port 0 vLLM binds at `VLLM_HOST_IP`; with any other, at every address."""
    line = command(NodeSpec("n", role, 8000, 9000))
    assert json.loads(option(line, "--kv-events-config")) == {
        "enable_kv_cache_events": True,
        "endpoint": "tcp://*:0",
        "replay_endpoint": "tcp://*:0",
    }
    assert environment(NodeSpec("n", role, 8000, 9000), {})["VLLM_HOST_IP"] == HOST
    assert option(line, "--prefix-caching-hash-algo") == "sha256_cbor"


def test_size_and_ranks_are_passed_on_only_when_given() -> None:
    plain = command(NodeSpec("n", Role.DECODE, 8000, 9000, gpu_blocks=None, block_size=None, prefix_match_unit=None))
    assert not {"--num-gpu-blocks-override", "--block-size", "--prefix-match-unit"} & set(plain)
    assert "--tensor-parallel-size" not in plain
    small = command(NodeSpec("n", Role.DECODE, 8000, 9000, gpu_blocks=48, tensor_parallel_size=2))
    assert option(small, "--num-gpu-blocks-override") == "48"
    assert option(small, "--tensor-parallel-size") == "2"


def test_data_parallel_ranks_are_asked_for_and_stay_one_process_each() -> None:
    line = command(NodeSpec("n", Role.DECODE, 8000, 9000, data_parallel_size=2))
    assert option(line, "--data-parallel-size") == "2"
    assert option(line, "--distributed-executor-backend") == EXECUTOR
    assert "--data-parallel-size" not in command(NodeSpec("n", Role.DECODE, 8000, 9000))


def test_the_mamba_cache_mode_is_left_to_vllm() -> None:
    """The node would die of its first request; for the others vLLM knows."""
    assert "--mamba-cache-mode" not in command(NodeSpec("n", Role.DECODE, 8000, 9000))


def test_a_node_of_the_tiny_model_can_resume() -> None:
    """Prompts of 660 to 766 tokens, too: by itself vLLM's CPU build keeps no state of them."""
    line = command(NodeSpec("n", Role.DECODE, 8000, 9000))
    assert (option(line, "--block-size"), option(line, "--prefix-match-unit")) == ("256", "16")


def test_a_node_of_one_rank_is_one_process() -> None:
    assert option(command(NodeSpec("n", Role.DECODE, 8000, 9000)), "--distributed-executor-backend") == EXECUTOR
    assert "--distributed-executor-backend" not in command(
        NodeSpec("n", Role.DECODE, 8000, 9000, tensor_parallel_size=2)
    )


def test_listens_on_loopback_and_what_is_added_comes_last() -> None:
    spec = NodeSpec("n", Role.DECODE, 8123, 9000, model=Path("/m"), served_name="s", more_arguments=("--seed", "1"))
    line = command(spec)
    assert (option(line, "--host"), option(line, "--port")) == (HOST, "8123")
    assert (option(line, "--model"), option(line, "--served-model-name")) == ("/m", "s")
    assert line[-2:] == ["--seed", "1"]


def test_the_environment_is_built_on_the_given_one() -> None:
    spec = NodeSpec("n", Role.DECODE, 8123, 9123, more_environment={"OMP_NUM_THREADS": "2"})
    made = environment(spec, {"PATH": "/bin", "HF_HUB_OFFLINE": "0"})
    assert made["PATH"] == "/bin"
    assert made["HF_HUB_OFFLINE"] == "1"
    assert made["OMP_NUM_THREADS"] == "2"
    assert (made["VLLM_NIXL_SIDE_CHANNEL_HOST"], made["VLLM_NIXL_SIDE_CHANNEL_PORT"]) == (HOST, "9123")


def test_a_node_with_the_connector_loads_our_plugins_and_a_plain_one_what_it_likes() -> None:
    for role in (Role.PREFILL, Role.DECODE):
        assert environment(NodeSpec("n", role, 1, 2), {})["VLLM_PLUGINS"] == "pdproxy_connector,pdproxy_endpoints"
    assert "VLLM_PLUGINS" not in environment(NodeSpec("n", Role.PLAIN, 1, 2), {})


def test_only_missing_ports_are_filled_in_and_all_differ() -> None:
    first, second = on_free_ports(NodeSpec("a", Role.PREFILL, 8123, 0), NodeSpec("b", Role.DECODE, 0, 0))
    ports = [first.port, first.side_channel_port, second.port, second.side_channel_port]
    assert first.port == 8123
    assert 0 not in ports
    assert len(set(ports)) == 4


def test_data_parallel_ranks_have_side_channels_in_a_row_and_no_other_port_is_among_them() -> None:
    two = NodeSpec("a", Role.PREFILL, 0, 0, data_parallel_size=3), NodeSpec("b", Role.DECODE, 0, 0)
    many, one = on_free_ports(*two)
    taken = [many.port, one.port, *range(many.side_channel_port, many.side_channel_port + 3), one.side_channel_port]
    assert len(set(taken)) == 6


@pytest.mark.parametrize("rank", [0, 1])
def test_a_side_channel_port_in_use_is_reported_before_anything_starts(tmp_path: Path, rank: int) -> None:
    with socket.create_server((HOST, 0)) as taken, Supervisor(tmp_path) as supervisor:
        first = taken.getsockname()[1] - rank
        spec = on_free_ports(NodeSpec("decode", Role.DECODE, 0, first, data_parallel_size=2))[0]
        with pytest.raises(PortTakenError, match=r"NIXL side channel of decode.*would hang while starting"):
            start_node(supervisor, spec)
    assert not list(tmp_path.iterdir())
