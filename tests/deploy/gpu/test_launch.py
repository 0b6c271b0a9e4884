"""The run-book's nodes are compose.yaml's, read by hand: a compose implementation reads the same out of it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from deploy.gpu.compose_node import COMPOSE, fill_in, plain, read_node
from deploy.gpu.fleet import batches
from deploy.gpu.launch import KEYS_VARIABLE, Launch, alone, pair, proxy_settings
from deploy.gpu.options import Options, RunError, on_cpu, on_gpus
from deploy.local.node import NodeSpec, Role
from tests.deploy.compose import resolved

VARIABLES = {"MODEL": "org/model", "MODEL_REVISION": "abc", "PREFILL_PORT": "9001", "DECODE_PORT": "9002",
             "PREFILL_GPUS": "4", "DECODE_GPUS": "5", "GPU_MEMORY": "0.45", "LEASE_SECONDS": "7"}  # fmt: skip
ROLES = ("prefill", "decode")


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Options:
    for name in ("UCX_TLS", "UCX_NET_DEVICES", "RESUME_ARGS", "PREFILL_ARGS", "DECODE_ARGS"):
        monkeypatch.delenv(name, raising=False)
    return on_gpus(tmp_path, "org/model", "a" * 40)


def option(launch: Launch, name: str) -> str:
    return launch.command[launch.command.index(name) + 1]


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize(
    "variables", [{}, VARIABLES, {"RESUME_ARGS": "", "UCX_TLS": ""}], ids=["none", "some", "empty"]
)
def test_a_service_reads_as_compose_reads_it(role: str, variables: dict[str, str]) -> None:
    theirs, ours = resolved(role, **variables)[role], read_node(role, variables)
    words = theirs["command"]
    # podman-compose keeps an empty word where a variable is empty; docker splits what is left.
    assert list(ours.arguments) == [word for word in words if word]
    [device] = theirs["deploy"]["resources"]["reservations"]["devices"]
    assert ours.environment["CUDA_VISIBLE_DEVICES"] == device["device_ids"][0]
    told = {name: str(value) for name, value in theirs["environment"].items() if value}
    same = {name: value for name, value in ours.environment.items() if "/" not in value}
    same.pop("CUDA_VISIBLE_DEVICES")
    assert same == {name: value for name, value in told.items() if "/" not in value}


def test_folders_of_the_container_are_those_of_the_host() -> None:
    cache = read_node("prefill", {"COMPILE_CACHE": "/var/cache/nodes"}).environment["TRITON_CACHE_DIR"]
    assert cache == "/var/cache/nodes/triton"
    assert read_node("prefill", {}).environment["VLLM_CACHE_ROOT"] == str(COMPOSE.parent / ".cache/compile/vllm")


@pytest.mark.parametrize(
    ("text", "filled"),
    [("${A}", "1"), ("${B}", ""), ("${B:-x}", "x"), ("${E:-x}", "x"), ("${E-x}", ""), ("${B--y=1}z", "-y=1z")],
)
def test_variables_are_filled_in(text: str, filled: str) -> None:
    assert fill_in(text, {"A": "1", "E": ""}) == filled


def test_a_checkout_without_the_file_is_told_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("deploy.gpu.compose_node.COMPOSE", tmp_path / "compose.yaml")
    with pytest.raises(RunError, match="whole checkout"):
        read_node("prefill", {})


def test_a_plain_node_is_the_same_without_hand_overs(options: Options) -> None:
    one, [prefill, _] = alone(options), pair(options, "k" * 16)
    assert "--kv-transfer-config" not in one.command
    assert not any(word.startswith("--kv-events") for word in one.command)
    assert not any("kv_connector" in word for word in one.command)
    assert KEYS_VARIABLE not in one.environment
    changed = {"--port", option(one, "--port"), option(prefill, "--port")}
    assert set(one.command) - changed == set(plain(prefill.command)) - changed


def test_each_node_has_its_gpu_role_and_key(options: Options) -> None:
    two = replace(options, decode_gpus=("1", "1"), prefill_gpu="3")
    launches = pair(two, "k" * 16)
    assert [launch.spec.name for launch in launches] == ["prefill", "decode-0", "decode-1"]
    assert [launch.environment["CUDA_VISIBLE_DEVICES"] for launch in launches] == ["3", "1", "1"]
    assert [option(launch, "--gpu-memory-utilization") for launch in launches] == ["0.9", "0.45", "0.45"]
    roles = [json.loads(option(launch, "--kv-transfer-config"))["kv_role"] for launch in launches]
    assert roles == ["kv_producer", "kv_consumer", "kv_consumer"]
    assert len({option(launch, "--port") for launch in launches}) == 3
    assert all(launch.environment[KEYS_VARIABLE] == "k" * 16 for launch in launches)
    assert "k" * 16 not in "".join(launch.shown("k" * 16) for launch in launches)


def test_two_nodes_of_one_gpu_start_in_turn() -> None:
    def on(name: str, gpu: str) -> Launch:
        return Launch(NodeSpec(name, Role.DECODE, 0, 0), (), {"CUDA_VISIBLE_DEVICES": gpu} if gpu else {})

    shared = batches([on("a", "0"), on("b", "1"), on("c", "1")])
    assert [[launch.spec.name for launch in batch] for batch in shared] == [["a", "b"], ["c"]]
    assert len(batches([on("a", ""), on("b", "")])) == 1, "nodes on CPUs start at once"


def test_a_dry_run_is_of_the_nodes_of_the_demo(tmp_path: Path) -> None:
    prefill, decode = pair(on_cpu(tmp_path), "k" * 16)
    assert prefill.spec.model == decode.spec.model == NodeSpec("", Role.PREFILL, 0, 0).model
    assert json.loads(option(decode, "--kv-transfer-config"))["kv_connector_extra_config"] == {"kv_lease_duration": 10}


def test_the_environment_wins_over_what_the_proxy_is_told(options: Options) -> None:
    told = proxy_settings({"PDPROXY_HEALTH_INTERVAL": "9", "PDPROXY_LOG_LEVEL": "debug"}, options)
    assert (told["PDPROXY_HEALTH_INTERVAL"], told["PDPROXY_POLICY_TICKET_LIFE"]) == ("9", "30")
