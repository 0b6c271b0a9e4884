"""Additions and exchanges of an operator: volumes, contexts, claims, certificates, weights that a Job fetches."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.helm.conftest import Rendered
from tests.helm.engine import CHART, Engine, Manifest, Manifests, only_container
from tests.helm.settings import loaded, pod_of
from tests.helm.test_nodes import arguments, variables
from tests.helm.test_render import valid

ROLES = ("prefill", "decode")
TRICKY = "1234"
"""A text that YAML takes for a number."""
SPACED = "/mnt/a b, {c}: #d"
"""A path that YAML takes for other things."""


def volume(pod: Manifest, name: str) -> Manifest:
    """A pod's volume."""
    [found] = [each for each in pod["spec"]["volumes"] if each["name"] == name]
    return {key: value for key, value in found.items() if key != "name"}


def mounts(container: Manifest) -> dict[str, str]:
    """Paths by volume."""
    return {each["name"]: each["mountPath"] for each in container["volumeMounts"]}


def pods(manifests: Manifests) -> list[Manifest]:
    """Nodes of both roles, and the proxy."""
    return [*(manifests.node(role) for role in ROLES), pod_of(manifests)]


class TestTexts:
    """A text that looks like a number, or has characters of YAML's own, arrives as it was said."""

    def test_paths(self, helm: Engine) -> None:
        storage = {"kind": "hostPath", "hostPath": SPACED, "mountPath": SPACED}
        cache = {"kind": "hostPath", "hostPath": SPACED + "2", "mountPath": SPACED + "3"}
        manifests = helm.manifests({"model": {"storage": storage}, "nodes": {"compileCache": cache}})
        for role in ROLES:
            pod = manifests.node(role)
            assert volume(pod, "models")["hostPath"]["path"] == SPACED
            assert volume(pod, "compile-cache")["hostPath"]["path"] == SPACED + "2"
            assert mounts(only_container(pod)).items() >= {("models", SPACED), ("compile-cache", SPACED + "3")}
            assert (variables(pod)["HF_HOME"], variables(pod)["VLLM_CACHE_ROOT"]) == (SPACED, f"{SPACED}3/vllm")

    def test_names(self, helm: Engine) -> None:
        secrets = {name: {"existingSecret": TRICKY} for name in ("apiKeys", "access", "tickets")}
        role = dict.fromkeys(("runtimeClassName", "schedulerName", "priorityClassName"), TRICKY)
        values = {
            **secrets,
            "nameOverride": TRICKY,
            "model": {
                "name": "true: #x",
                "servedName": "no",
                "revision": TRICKY,
                "tokenSecret": {"name": TRICKY, "key": TRICKY},
                "storage": {"kind": "existingClaim", "existingClaim": TRICKY},
            },
            "nodes": {
                "tls": {"enabled": True, "secret": TRICKY},
                "compileCache": {"kind": "existingClaim", "existingClaim": TRICKY},
            },
            "prefill": role,
            "decode": role,
            "proxy": {"priorityClassName": TRICKY},
            "ingress": {"enabled": True, "host": "a.b", "className": TRICKY, "tlsSecret": TRICKY},
        }  # fmt: skip
        manifests = helm.manifests(values)
        for manifest in manifests.all:
            valid(manifest)
        assert arguments(manifests.node("decode"))[""] == "true: #x"
        assert arguments(manifests.node("decode"))["--served-model-name"] == "no"

    def test_a_release_and_a_namespace_of_digits(
        self, helm: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("tests.helm.engine.NAMESPACE", "456")
        manifests = helm.manifests({"metrics": MONITORS, "networkPolicy": SCRAPERS}, release="123")
        for manifest in manifests.all:
            if manifest["kind"] != "PodMonitor":
                valid(manifest)
        assert loaded(manifests, tmp_path).discovery.namespace == "456"
        assert manifests.one("PodMonitor")["spec"]["selector"]["matchLabels"]["app.kubernetes.io/instance"] == "123"


MONITORS = {"podMonitor": {"enabled": True}}
SCRAPERS: dict[str, Any] = {"scrapers": [{"podSelector": {}}]}


def test_each_role_may_have_ucx_settings_of_its_own(helm: Engine) -> None:
    ucx = {"transports": "rc,cuda_copy", "devices": "mlx5_0:1"}
    said = {"transfer": {"ucxTransports": "tcp,cuda_copy"}, "decode": {"ucx": ucx}}
    found = [variables(helm.manifests(said).node(role)) for role in ROLES]
    assert [each["UCX_TLS"] for each in found] == ["tcp,cuda_copy", "rc,cuda_copy"]
    assert [each["UCX_NET_DEVICES"] for each in found] == ["all", "mlx5_0:1"]


def test_pods_take_more_volumes_init_containers_and_other_contexts(helm: Engine) -> None:
    init = {"name": "sysctl", "image": "busybox:1", "command": ["true"]}
    more = {
        "extraVolumes": [{"name": "scratch", "emptyDir": {}}],
        "extraVolumeMounts": [{"name": "scratch", "mountPath": "/scratch"}],
        "initContainers": [init],
    }
    context = {"fsGroup": 7, "supplementalGroups": [8]}
    bare = {"runAsUser": None, "runAsGroup": None, "fsGroup": None}
    values = {
        "prefill": more,
        "decode": more,
        "proxy": {**more, "podSecurityContext": bare, "securityContext": {"privileged": False}},
        "nodes": {"podSecurityContext": context, "securityContext": {"runAsUser": 9}},
    }
    manifests = helm.manifests(values)
    for pod in pods(manifests):
        assert pod["spec"]["initContainers"] == [init]
        assert mounts(only_container(pod))["scratch"] == "/scratch"
        assert volume(pod, "scratch") == {"emptyDir": {}}
    assert manifests.node("decode")["spec"]["securityContext"].items() >= context.items()
    assert only_container(manifests.node("decode"))["securityContext"]["runAsUser"] == 9
    assert pod_of(manifests)["spec"]["securityContext"].keys() == {"runAsNonRoot", "seccompProfile"}
    assert manifests.one("Pod")["spec"]["securityContext"] == pod_of(manifests)["spec"]["securityContext"]
    assert only_container(pod_of(manifests))["securityContext"]["privileged"] is False


def test_gpus_may_come_by_resource_claims(rendered: Rendered) -> None:
    """Dynamic resource allocation, with a template among the chart's own objects."""
    manifests = rendered("claims-values")
    template = manifests.one("ResourceClaimTemplate")
    for role in ROLES:
        pod = manifests.node(role)
        [claim] = pod["spec"]["resourceClaims"]
        assert claim["resourceClaimTemplateName"] == template["metadata"]["name"] == "demo-pdproxy-eight"
        resources = only_container(pod)["resources"]
        assert resources["claims"] == [{"name": claim["name"]}]
        assert resources["limits"] == {}
        assert arguments(pod)["--tensor-parallel-size"] == "8"


def test_further_objects_are_filled_in_and_labelled(rendered: Rendered) -> None:
    labels = rendered("claims-values").one("ResourceClaimTemplate")["metadata"]["labels"]
    assert (labels["app.kubernetes.io/instance"], labels["mine"]) == ("demo", "yes")


def test_a_leader_worker_set_takes_annotations(rendered: Rendered) -> None:
    """For example for a group's exclusive topology, which its controller reads there."""
    group = rendered("full-values").one("LeaderWorkerSet")
    key = "leaderworkerset.sigs.k8s.io/exclusive-topology"
    assert group["metadata"]["annotations"] == {key: "topology.kubernetes.io/block"}


def test_what_a_node_fetched_and_compiled_outlives_its_pod(helm: Engine) -> None:
    """By default: in a volume of its own, which any storage class can make."""
    for role in ROLES:
        stateful = helm.manifests({}).one("StatefulSet", f"-{role}")["spec"]
        [claim] = stateful["volumeClaimTemplates"]
        assert (claim["metadata"]["name"], claim["spec"]["accessModes"]) == ("models", ["ReadWriteOnce"])
        mounted = only_container(helm.manifests({}).node(role))["volumeMounts"]
        kept = {each["mountPath"]: each.get("subPath") for each in mounted if each["name"] == "models"}
        assert kept == {"/models": None, "/compile-cache": f"pdproxy-compile-cache/{role}"}


def test_a_volume_that_all_nodes_mount_can_be_mounted_by_all(helm: Engine) -> None:
    claim = helm.manifests({"model": {"storage": {"kind": "claim"}}}).one("PersistentVolumeClaim")
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]


@pytest.mark.parametrize(
    ("cache", "found"),
    [
        ({"kind": "emptyDir"}, {"emptyDir": {}}),
        ({"kind": "hostPath", "hostPath": "/srv"}, {"hostPath": {"path": "/srv", "type": "DirectoryOrCreate"}}),
        ({"kind": "existingClaim", "existingClaim": "c"}, {"persistentVolumeClaim": {"claimName": "c"}}),
    ],
)
def test_what_is_compiled_is_kept(helm: Engine, cache: dict[str, str], found: dict[str, Any]) -> None:
    manifests = helm.manifests({"nodes": {"compileCache": cache}})
    for role in ROLES:
        pod = manifests.node(role)
        assert volume(pod, "compile-cache") == found
        [mount] = [each for each in only_container(pod)["volumeMounts"] if each["name"] == "compile-cache"]
        assert mount == {"name": "compile-cache", "mountPath": "/compile-cache", "subPath": role}
        folders = [variables(pod)[name] for name in ("VLLM_CACHE_ROOT", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")]
        assert all(folder.startswith("/compile-cache/") for folder in folders)


def test_what_is_compiled_may_have_a_volume_for_each_pod(helm: Engine) -> None:
    storage = {"kind": "claimPerPod", "size": "100Gi"}
    both = {"model": {"storage": storage}, "nodes": {"compileCache": {"kind": "claimPerPod", "size": "9Gi"}}}
    for workload in helm.manifests(both).of("StatefulSet"):
        claims = {each["metadata"]["name"]: each["spec"] for each in workload["spec"]["volumeClaimTemplates"]}
        sizes = {name: spec["resources"]["requests"]["storage"] for name, spec in claims.items()}
        assert sizes == {"models": "100Gi", "compile-cache": "9Gi"}
        assert claims["compile-cache"]["accessModes"] == ["ReadWriteOnce"]


def test_both_roles_have_one_revision(helm: Engine) -> None:
    manifests = helm.manifests({"model": {"revision": "0123abc"}})
    for role in ROLES:
        said = arguments(manifests.node(role))
        assert (said["--revision"], said["--tokenizer-revision"]) == ("0123abc", "0123abc")
    assert "--revision" not in arguments(helm.manifests({}).node("decode"))


class TestTls:
    """HTTPS between nodes and the proxy."""

    VALUES: dict[str, Any] = {  # noqa: RUF012 - nobody changes it
        "nodes": {"tls": {"enabled": True, "secret": "nodes-tls"}},
        "metrics": MONITORS,
        "networkPolicy": SCRAPERS,
    }

    def test_nodes_have_the_certificate_and_its_key(self, helm: Engine) -> None:
        for role in ROLES:
            pod = helm.manifests(self.VALUES).node(role)
            said, container = arguments(pod), only_container(pod)
            place = mounts(container)["tls"]
            assert (said["--ssl-certfile"], said["--ssl-keyfile"]) == (f"{place}/tls.crt", f"{place}/tls.key")
            assert "--enable-ssl-refresh" in said
            assert volume(pod, "tls")["secret"]["secretName"] == "nodes-tls"
            probes = [container[f"{kind}Probe"]["httpGet"]["scheme"] for kind in ("startup", "liveness", "readiness")]
            assert probes == ["HTTPS"] * 3

    @pytest.mark.parametrize("access", [True, False])
    def test_the_proxy_has_the_authority_alone_and_a_name_to_ask_for(
        self, helm: Engine, tmp_path: Path, access: bool
    ) -> None:
        manifests = helm.manifests({**self.VALUES, "access": {"enabled": access}})
        settings = loaded(manifests, tmp_path)
        assert (settings.upstream.ca_file, settings.upstream.server_name) == (
            tmp_path / "nodes/ca.crt",
            "demo-pdproxy-nodes",
        )
        assert settings.upstream.credential == ("replace" if access else "none")
        assert settings.discovery.scheme == "https"
        mounted = volume(pod_of(manifests), "nodes")["secret"]
        assert (mounted["secretName"], mounted["items"]) == ("nodes-tls", [{"key": "ca.crt", "path": "ca.crt"}])

    def test_named_nodes_and_scrapers_use_it_too(self, helm: Engine, tmp_path: Path) -> None:
        manifests = helm.manifests({**self.VALUES, "discovery": {"kind": "static"}})
        assert {node.url[:8] for node in loaded(manifests, tmp_path).nodes} == {"https://"}
        [endpoint] = manifests.one("PodMonitor")["spec"]["podMetricsEndpoints"]
        assert (endpoint["scheme"], endpoint["tlsConfig"]["serverName"]) == ("https", "demo-pdproxy-nodes")

    def test_without_it_nothing_changes(self, rendered: Rendered) -> None:
        probe = only_container(rendered("default").node("decode"))["readinessProbe"]
        assert probe["httpGet"]["scheme"] == "HTTP"
        assert "--ssl-certfile" not in arguments(rendered("default").node("decode"))


def test_where_pods_have_ipv6_addresses_alone(helm: Engine, tmp_path: Path) -> None:
    manifests = helm.manifests({"ipv6": True})
    settings = loaded(manifests, tmp_path)
    assert settings.listen.host == settings.listen.admin_host == "::"
    for role in ROLES:
        pod = manifests.node(role)
        assert arguments(pod)["--host"] == "::"
        assert variables(pod)["VLLM_HOST_IP"] == "$(POD_IP)"
        events = json.loads(arguments(pod)["--kv-events-config"])  # vLLM binds other ports at IPv4 addresses
        assert (events["endpoint"], events["replay_endpoint"]) == ("tcp://*:0", "tcp://*:0")
    assert "--host" not in arguments(helm.manifests({}).node("decode"))


class TestDownload:
    """A Job fetches weights; nodes wait, and ask the hub for nothing."""

    VALUES: dict[str, Any] = {  # noqa: RUF012 - nobody changes it
        "model": {
            "name": "org/model",
            "revision": "abc",
            "download": {"enabled": True},
            "storage": {"kind": "claim"},
            "tokenSecret": {"name": "hub"},
        }
    }

    def test_nodes_wait_for_the_mark_that_the_job_leaves(self, helm: Engine) -> None:
        manifests = helm.manifests(self.VALUES)
        job = manifests.one("Job")["spec"]["template"]
        env = {each["name"]: each.get("value") for each in only_container(job)["env"]}
        assert (env["MODEL"], env["REVISION"], env["HF_HOME"]) == ("org/model", "abc", "/models")
        assert "HF_TOKEN" in env
        assert volume(job, "models") == volume(manifests.node("decode"), "models")
        for role in ROLES:
            pod = manifests.node(role)
            [waits] = pod["spec"]["initContainers"]
            assert {each["name"]: each["value"] for each in waits["env"]}.items() <= env.items()
            assert (variables(pod)["HF_HUB_OFFLINE"], variables(pod)["HF_HOME"]) == ("1", "/models")
            assert arguments(pod)["--served-model-name"] == "org/model"

    def test_another_model_is_another_job(self, helm: Engine) -> None:
        one, same = (helm.manifests(self.VALUES).one("Job")["metadata"]["name"] for _ in range(2))
        other = {"model": {**self.VALUES["model"], "revision": "def"}}
        assert one == same != helm.manifests(other).one("Job")["metadata"]["name"]

    def test_the_scripts_agree(self, tmp_path: Path) -> None:
        """With a hub's client that says what it was asked for."""
        (tmp_path / "huggingface_hub.py").write_text(
            textwrap.dedent("""
            def snapshot_download(name, revision, ignore_patterns):
                return f"/models/{name}/{revision}"
            """)
        )
        given = {"MODEL": "org/model", "REVISION": "abc", "MARK": str(tmp_path / "a/b")}
        env = {**os.environ, "PYTHONPATH": str(tmp_path), **given}
        for script, said in (
            ("fetch", "org/model is at /models/org/model/abc"),
            ("wait", "fetched: /models/org/model/abc"),
        ):
            words = [sys.executable, "-c", (CHART / f"files/{script}.py").read_text()]
            done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=60, check=True)
            assert done.stdout.strip() == said

    def test_the_wait_is_told(self, tmp_path: Path) -> None:
        words = [sys.executable, "-c", (CHART / "files/wait.py").read_text()]
        env = {**os.environ, "MODEL": "org/model", "MARK": str(tmp_path / "none")}
        with subprocess.Popen(words, env=env, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            assert "waiting for the download Job to fetch org/model" in child.stdout.readline()
            child.kill()
