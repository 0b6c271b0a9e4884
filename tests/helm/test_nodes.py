"""The nodes' pods: what vLLM and the connector are told, what each machine must give."""

import functools
import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from connector.config import ConnectorConfig
from tests.helm.conftest import Rendered
from tests.helm.engine import Engine, Manifest, nodes_of_files, only_container

ALL_NODES = pytest.mark.parametrize(("values", "role"), nodes_of_files())
ROLES = pytest.mark.parametrize("role", ["prefill", "decode"])


def arguments(pod: Manifest) -> dict[str, str]:
    """Flags of `vllm serve` by name; the model under ""."""
    model, *flags = only_container(pod)["args"]
    return {"": model, **{name: value for name, _, value in (flag.partition("=") for flag in flags)}}


def variables(pod: Manifest) -> dict[str, Any]:
    """A container's environment: value or source."""
    return {each["name"]: each.get("value", each.get("valueFrom")) for each in only_container(pod)["env"]}


@functools.cache
def vllm_flags() -> frozenset[str]:
    """The flags of `vllm serve`, read out of its sources: importing it takes longer than all of these tests."""
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("there is no vLLM here")
    root = Path(spec.origin).parent
    text = "".join((root / part).read_text() for part in ("engine/arg_utils.py", "entrypoints/launchers/cli_args.py"))
    fields = {"--" + name.replace("_", "-") for name in re.findall(r"^    (\w+):", text, re.MULTILINE)}
    return frozenset(fields | set(re.findall(r'"(--[\w-]+)"', text)))


def test_both_roles_can_resume_at_the_same_places(helm: Engine) -> None:
    """A model of attention layers alone has to be without: vLLM would end its nodes at start."""
    for unit, told in ((None, "16"), (32, "32"), (0, None)):
        made = helm.manifests({} if unit is None else {"model": {"prefixMatchUnit": unit}})
        assert {arguments(made.node(role)).get("--prefix-match-unit") for role in ("prefill", "decode")} == {told}


@ALL_NODES
def test_nodes_publish_what_they_cache(rendered: Rendered, values: str, role: str) -> None:
    told = arguments(rendered(values).node(role))
    assert told["--prefix-caching-hash-algo"] == "sha256_cbor"
    assert json.loads(told["--kv-events-config"]) == {
        "enable_kv_cache_events": True,
        "endpoint": "tcp://*:5557",
        "replay_endpoint": "tcp://*:5657",
    }


def test_nodes_can_be_told_to_publish_nothing(helm: Engine) -> None:
    quiet = arguments(helm.manifests({"kvEvents": {"enabled": False}}).node("prefill"))
    assert not {"--kv-events-config", "--prefix-caching-hash-algo"} & quiet.keys()


@ALL_NODES
def test_the_connector_accepts_its_configuration(rendered: Rendered, values: str, role: str, tmp_path: Path) -> None:
    said = json.loads(arguments(rendered(values).node(role))["--kv-transfer-config"])
    assert (said["kv_connector"], said["kv_connector_module_path"]) == (
        "NixlConnector",
        "pdproxy_connector.nixl_connector",
    )
    extra = said["kv_connector_extra_config"]
    if "pdproxy_key_file" in extra:
        mounts = [mount["mountPath"] for mount in only_container(rendered(values).node(role))["volumeMounts"]]
        assert str(Path(extra["pdproxy_key_file"]).parent) in mounts
        (tmp_path / "ticket.keys").write_text("0123456789abcdef\n")
        extra["pdproxy_key_file"] = str(tmp_path / "ticket.keys")
    config = ConnectorConfig.from_extra(said["kv_role"], said["kv_load_failure_policy"], extra, {})
    assert (config.role.prefills, config.role.decodes) == (role != "decode", role != "prefill")
    assert config.lease_duration == 30


@ALL_NODES
def test_vllm_knows_every_flag(rendered: Rendered, values: str, role: str) -> None:
    known = vllm_flags()
    unknown = {flag for flag in arguments(rendered(values).node(role)).keys() - {""} if flag not in known}
    assert not unknown


@ALL_NODES
def test_the_side_channel_is_at_the_pods_own_address(rendered: Rendered, values: str, role: str) -> None:
    pod = rendered(values).node(role)
    said = variables(pod)
    assert said["VLLM_PLUGINS"] == "pdproxy_connector,pdproxy_endpoints"
    assert said["POD_IP"] == {"fieldRef": {"fieldPath": "status.podIP"}}
    assert said["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "$(POD_IP)"
    ports = {port["name"]: port["containerPort"] for port in only_container(pod)["ports"]}
    assert said["VLLM_NIXL_SIDE_CHANNEL_PORT"] == str(ports["side-channel"]) == "5600"
    assert arguments(pod)["--port"] == str(ports["http"])
    assert pod["spec"]["enableServiceLinks"] is False
    [shm] = [volume for volume in pod["spec"]["volumes"] if volume["name"] == "shm"]
    assert shm["emptyDir"]["medium"] == "Memory"


@ALL_NODES
def test_has_the_time_to_end(rendered: Rendered, values: str, role: str) -> None:
    pod = rendered(values).node(role)
    pause = only_container(pod)["lifecycle"]["preStop"]["sleep"]["seconds"]
    grace = pod["spec"]["terminationGracePeriodSeconds"]
    assert grace > pause + int(arguments(pod)["--shutdown-timeout"])


@ROLES
def test_the_block_size_is_said_only_where_it_is_chosen(rendered: Rendered, role: str) -> None:
    assert "--block-size" not in arguments(rendered("default").node(role))
    assert arguments(rendered("full-values").node(role))["--block-size"] == "1056"


def test_two_prefill_and_four_decode_nodes_of_eight_gpus(rendered: Rendered) -> None:
    manifests = rendered("qwen3.5-397b-a17b-2p4d-tp8")
    counts = {each["metadata"]["name"]: each["spec"]["replicas"] for each in manifests.of("StatefulSet")}
    assert counts == {"demo-pdproxy-prefill": 2, "demo-pdproxy-decode": 4}
    for role in ("prefill", "decode"):
        pod = manifests.node(role)
        container = only_container(pod)
        assert arguments(pod)["--tensor-parallel-size"] == "8"
        limits = {"nvidia.com/gpu": 8, "rdma/hca_shared_devices_a": 1, "memory": "1Ti"}
        assert container["resources"]["limits"] == limits
        assert container["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]


def test_one_and_one(rendered: Rendered) -> None:
    manifests = rendered("qwen3.6-35b-a3b-1p1d")
    assert [each["spec"]["replicas"] for each in manifests.of("StatefulSet")] == [1, 1]
    assert arguments(manifests.node("prefill"))[""] == "Qwen/Qwen3.6-35B-A3B-FP8"
    assert only_container(manifests.node("prefill"))["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    for workload in manifests.of("StatefulSet"):
        [claim] = workload["spec"]["volumeClaimTemplates"]
        assert claim["spec"]["resources"]["requests"]["storage"] == "60Gi"


def test_equal_nodes(rendered: Rendered) -> None:
    manifests = rendered("qwen3.6-35b-a3b-nodes")
    [workload] = manifests.of("StatefulSet")
    assert (workload["metadata"]["name"], workload["spec"]["replicas"]) == ("demo-pdproxy-node", 2)
    fixed = rendered("qwen3.6-35b-a3b-1p1d").node("decode")
    assert pod_without_its_kind(manifests.node("node")) == pod_without_its_kind(fixed)


def pod_without_its_kind(pod: Manifest) -> str:
    """The text of a pod, without what nodes that do both have of their own."""
    text = json.dumps(pod, sort_keys=True).replace(r",\"pdproxy_roles\":[\"prefill\",\"decode\"]", "")
    for told in ('component": "{}"', 'subPath": "{}"', 'pdproxy-compile-cache/{}"'):
        text = text.replace(told.format("node"), told.format("decode"))
    return text


def test_a_node_of_several_machines(rendered: Rendered) -> None:
    group = rendered("full-values").one("LeaderWorkerSet")["spec"]["leaderWorkerTemplate"]
    leader, worker = arguments(group["leaderTemplate"]), arguments(group["workerTemplate"])
    for said in (leader, worker):
        assert said["--nnodes"] == str(group["size"])
        assert said["--node-rank"] == "$(NODE_RANK)"
        assert said["--master-addr"] == "$(LWS_LEADER_ADDRESS)"
    assert "--headless" in worker
    assert "--headless" not in leader
    assert "startupProbe" in only_container(group["leaderTemplate"])
    assert "startupProbe" not in only_container(group["workerTemplate"])
    rank = variables(group["workerTemplate"])["NODE_RANK"]["fieldRef"]["fieldPath"]
    assert rank == "metadata.labels['leaderworkerset.sigs.k8s.io/worker-index']"


def test_data_parallel_ranks_over_machines_are_served_by_each(rendered: Rendered) -> None:
    """Each machine is a node of its own to the proxy, which reaches its ranks, their events and their side channels."""
    group = rendered("qwen3.5-397b-a17b-dp16-ep").one("LeaderWorkerSet", "-decode")["spec"]["leaderWorkerTemplate"]
    leader, worker = (only_container(group[part]) for part in ("leaderTemplate", "workerTemplate"))
    said = arguments(group["workerTemplate"])
    assert leader == worker
    assert "--data-parallel-hybrid-lb" in said
    assert "--headless" not in said
    assert [said[f"--data-parallel-size{local}"] for local in ("", "-local")] == ["16", "8"]
    assert worker["startupProbe"]["httpGet"]["port"] == worker["readinessProbe"]["httpGet"]["port"] == "http"


def test_data_parallel_attention_and_expert_parallelism_on_one_machine(rendered: Rendered) -> None:
    manifests = rendered("qwen3.6-35b-a3b-dp4-ep")
    for role in ("prefill", "decode"):
        said = arguments(manifests.node(role))
        assert (said["--tensor-parallel-size"], said["--data-parallel-size"]) == ("1", "4")
        assert "--enable-expert-parallel" in said
        assert not any(flag.startswith("--nnodes") or "hybrid" in flag for flag in said)
        assert only_container(manifests.node(role))["resources"]["limits"]["nvidia.com/gpu"] == 4


def test_nodes_that_must_be_on_one_machine_do_not_wait_for_proxies_there(rendered: Rendered) -> None:
    """A proxy may be on a machine without GPUs, where no node fits."""
    manifests = rendered("qwen3.6-35b-a3b-dp4-ep")
    key = "app.kubernetes.io/component"
    for role in ("prefill", "decode"):
        rules = manifests.node(role)["spec"]["affinity"]["podAffinity"][
            "requiredDuringSchedulingIgnoredDuringExecution"
        ]
        [expression] = [each for rule in rules for each in rule["labelSelector"]["matchExpressions"]]
        assert (expression["key"], expression["operator"]) == (key, "In")
        assert set(expression["values"]) == {
            manifests.node(each)["metadata"]["labels"][key] for each in ("prefill", "decode")
        }


@ALL_NODES
def test_engines_have_as_long_to_load_as_the_probes_give_them(rendered: Rendered, values: str, role: str) -> None:
    """vLLM's API servers would give up after ten minutes."""
    pod = rendered(values).node(role)
    probe = only_container(pod)["startupProbe"]
    allowed = probe["periodSeconds"] * probe["failureThreshold"]
    assert 600 <= int(variables(pod)["VLLM_ENGINE_READY_TIMEOUT_S"]) <= allowed


@pytest.mark.parametrize(
    ("storage", "volume"),
    [
        ({"kind": "emptyDir"}, {"emptyDir": {"sizeLimit": "200Gi"}}),
        ({"kind": "hostPath", "hostPath": "/srv"}, {"hostPath": {"path": "/srv", "type": "DirectoryOrCreate"}}),
        ({"kind": "existingClaim", "existingClaim": "w"}, {"persistentVolumeClaim": {"claimName": "w"}}),
        ({"kind": "claim"}, {"persistentVolumeClaim": {"claimName": "demo-pdproxy-models"}}),
    ],
)
def test_weights_come_from_where_they_are(helm: Engine, storage: dict[str, str], volume: dict[str, Any]) -> None:
    manifests = helm.manifests({"model": {"storage": storage}})
    volumes = manifests.node("decode")["spec"]["volumes"]
    assert {"name": "models", **volume} in volumes
    assert len(manifests.of("PersistentVolumeClaim")) == (1 if storage["kind"] == "claim" else 0)


def test_without_gpus_the_images_own_model_is_served(rendered: Rendered) -> None:
    pod = rendered("no-gpu").node("decode")
    container = only_container(pod)
    assert container["resources"]["limits"].keys() == {"memory"}
    assert arguments(pod)["--model"] == arguments(pod)[""]
    assert not any(arguments(pod)[""].startswith(mount["mountPath"] + "/") for mount in container["volumeMounts"])
