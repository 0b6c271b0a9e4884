"""The proxy's pods: the proxy itself accepts what the chart says to it, and has the time to end."""

import json
import math
from pathlib import Path

import pytest

from pdproxy.admin.guard import KnownHosts, open_port_warning
from pdproxy.settings.catalog import every_setting, sections
from pdproxy.settings.types import Credential
from pdproxy.settings.yaml_file import YamlSource
from tests.helm.conftest import Rendered
from tests.helm.engine import CHART, NAMESPACE, Engine, Refused, only_container, value_files
from tests.helm.settings import loaded, pod_of

ALL = pytest.mark.parametrize("values", value_files())


@ALL
def test_the_proxy_accepts_its_settings(rendered: Rendered, values: str, tmp_path: Path) -> None:
    manifests = rendered(values)
    settings = loaded(manifests, tmp_path)
    container = only_container(pod_of(manifests))
    assert container["args"] == ["serve", "--config=/etc/pdproxy/settings/pdproxy.yaml"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"http": settings.listen.port, "admin": settings.listen.admin_port}
    assert settings.listen.host == settings.listen.admin_host == "0.0.0.0"
    written = YamlSource(tmp_path / "pdproxy.yaml")()
    for path in (str(value) for section in sections() for value in written.get(section, {}).values()):
        if path.startswith(str(tmp_path)):
            inside = "/etc/pdproxy" + path.removeprefix(str(tmp_path))
            assert any(inside.startswith(mount["mountPath"] + "/") for mount in container["volumeMounts"])


@ALL
def test_whoever_asks_at_the_operators_port_names_it_as_it_is_known(
    rendered: Rendered, values: str, tmp_path: Path
) -> None:
    """Nodes that are to go, the test pod, the kubelet and Prometheus (by the pod's address), a port-forward."""
    manifests = rendered(values)
    known = KnownHosts(loaded(manifests, tmp_path).listen)
    [service] = [
        each["metadata"]["name"] for each in manifests.of("Service") if each["metadata"]["name"].endswith("-admin")
    ]
    [smoke] = [e["value"] for e in only_container(manifests.one("Pod"))["env"] if e["name"] == "OPERATORS"]
    names = [
        service,
        f"{service}.{NAMESPACE}",
        f"{service}.{NAMESPACE}.svc",
        f"{service}.{NAMESPACE}.svc.cluster.local",
    ]
    for host in (*(f"{name}:8081" for name in names), smoke.removeprefix("http://"), "10.0.0.1:8081", "localhost:8081"):
        assert host in known, host
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        asked = only_container(pod_of(manifests))[probe]["httpGet"]
        assert not {"host", "httpHeaders"} & asked.keys(), "it is asked by the pod's address"
    assert ("admin.example.com" in known) is (values == "full-values")
    assert f"{service}.evil.example" not in known


@pytest.mark.parametrize("strategy", ["surge", "blueGreen"])
def test_nodes_that_are_to_go_name_the_operators_port_as_it_is_known(
    helm: Engine, tmp_path: Path, strategy: str
) -> None:
    upgrade = {"strategy": strategy}
    known = KnownHosts(loaded(helm.manifests({}), tmp_path).listen)
    upgrade |= {"proxy": "demo-pdproxy"} if strategy == "blueGreen" else {}
    nodes = {"nodes": {"upgrade": upgrade}, "model": {"storage": {"kind": "claim"}}}
    release = "demo" if strategy == "surge" else "blue"
    for role in ("prefill", "decode"):
        pre_stop = only_container(helm.manifests(nodes, release=release).node(role))["lifecycle"]["preStop"]["exec"]
        [url] = [word for word in pre_stop["command"] if word.startswith("http://")]
        assert url.removeprefix("http://") in known


@pytest.mark.parametrize("name", ["admin.example.com:8081", "http://admin", "*.example.com"])
def test_a_name_of_the_operators_port_is_a_name(helm: Engine, name: str) -> None:
    with pytest.raises(Refused, match="adminNames"):
        helm.manifests({"proxy": {"adminNames": [name]}})


@pytest.mark.parametrize("access", [True, False])
def test_without_a_token_nodes_cannot_be_changed_and_the_notes_say_so(
    helm: Engine, tmp_path: Path, access: bool
) -> None:
    values = {"access": {"enabled": access}}
    assert (open_port_warning(loaded(helm.manifests(values), tmp_path).listen) == "") is access
    notes = helm.render(values)["pdproxy/templates/NOTES.txt"]
    assert ("nobody can change nodes" in notes) is not access


@ALL
def test_ends_after_its_streams(rendered: Rendered, values: str, tmp_path: Path) -> None:
    pod = pod_of(rendered(values))
    pause = only_container(pod)["lifecycle"]["preStop"]["sleep"]["seconds"]
    deadlines = loaded(rendered(values), tmp_path).deadlines
    assert deadlines.shutdown == deadlines.request, "replacing proxies cuts no stream"
    assert pod["spec"]["terminationGracePeriodSeconds"] >= pause + deadlines.shutdown + 10


@pytest.mark.parametrize(("shutdown", "request_seconds", "seconds"), [(0, 90.5, 90.5), (45, 90.5, 45), (0.5, 60, 0.5)])
def test_what_streams_get_at_the_end_follows_the_longest_request(
    helm: Engine, tmp_path: Path, shutdown: float, request_seconds: float, seconds: float
) -> None:
    said = {"leaveSeconds": 7, "shutdownSeconds": shutdown, "requestSeconds": request_seconds}
    manifests = helm.manifests({"proxy": said})
    assert loaded(manifests, tmp_path).deadlines.shutdown == seconds
    assert pod_of(manifests)["spec"]["terminationGracePeriodSeconds"] == 7 + math.ceil(seconds) + 15


def test_a_rollout_is_not_stuck_while_the_models_load(helm: Engine) -> None:
    """A proxy is ready when a decode node serves."""
    for seconds in (60, 7200):
        manifests = helm.manifests({"nodes": {"startupSeconds": seconds}})
        probe = only_container(manifests.node("decode"))["startupProbe"]
        assert probe["periodSeconds"] * probe["failureThreshold"] >= seconds
        assert manifests.one("Deployment")["spec"]["progressDeadlineSeconds"] == seconds + 600


@ALL
def test_can_do_no_harm(rendered: Rendered, values: str) -> None:
    for pod in (pod_of(rendered(values)), rendered(values).one("Pod")):
        spec, container = pod["spec"], only_container(pod)
        assert spec["enableServiceLinks"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_what_operators_say_arrives(rendered: Rendered, tmp_path: Path) -> None:
    settings = loaded(rendered("full-values"), tmp_path)
    assert (settings.limits.body_bytes, settings.policy.retries, settings.deadlines.stall) == (16777216, 3, 60.0)
    assert settings.log.level == "warning"


@pytest.mark.parametrize(("policy", "life"), [({}, 7), ({"retries": 1}, 7), ({"ticket_life": 5}, 5)])
def test_a_ticket_is_tried_for_as_long_as_nodes_keep_it(
    helm: Engine, tmp_path: Path, policy: dict[str, int], life: float
) -> None:
    said = {"transfer": {"leaseSeconds": 7}, "proxy": {"settings": {"policy": policy}}}
    assert loaded(helm.manifests(said), tmp_path).policy.ticket_life == life


@pytest.mark.parametrize(
    ("keys", "access", "credential"),
    [(True, True, "replace"), (False, True, "replace"), (True, False, "none"), (False, False, "pass")],
)
def test_clients_keys_do_not_reach_nodes(
    helm: Engine, tmp_path: Path, keys: bool, access: bool, credential: Credential
) -> None:
    manifests = helm.manifests({"apiKeys": {"enabled": keys}, "access": {"enabled": access}})
    settings = loaded(manifests, tmp_path)
    assert settings.upstream.credential == credential
    assert (settings.keys.file is not None) is keys
    names = {each["name"] for each in only_container(manifests.node("decode"))["env"]}
    assert ("VLLM_API_KEY" in names) is access


def test_the_credential_can_be_chosen_where_nodes_have_no_key(helm: Engine, tmp_path: Path) -> None:
    said = {"access": {"enabled": False}, "proxy": {"settings": {"upstream": {"credential": "pass"}}}}
    assert loaded(helm.manifests(said), tmp_path).upstream.credential == "pass"
    with pytest.raises(Refused, match=r"upstream cannot be set while access\.enabled"):
        helm.manifests({"proxy": said["proxy"]})


def test_every_setting_can_be_said(helm: Engine) -> None:
    """The schema lists the settings of each section that it knows; a new one must be listed too."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    listed = schema["properties"]["proxy"]["properties"]["settings"]["properties"]
    for section in sections():
        if isinstance(listed.get(section), dict):
            names = [each.name for each in every_setting() if each.section == section]
            assert sorted(listed[section]["properties"]) == sorted(names), section


def test_replicas_are_left_to_the_autoscaler(helm: Engine, rendered: Rendered) -> None:
    assert "replicas" not in rendered("full-values").one("Deployment")["spec"]
    assert rendered("default").one("Deployment")["spec"]["replicas"] == 2
    assert rendered("default").of("HorizontalPodAutoscaler") == []


def test_the_way_in_does_not_cut_streams(rendered: Rendered, tmp_path: Path) -> None:
    full = rendered("full-values")
    longest = loaded(full, tmp_path).deadlines.request
    annotations = full.one("Ingress")["metadata"]["annotations"]
    nginx = "nginx.ingress.kubernetes.io/"
    assert annotations[nginx + "proxy-buffering"] == "off"
    assert int(annotations[nginx + "proxy-read-timeout"]) > longest
    timeouts = full.one("HTTPRoute")["spec"]["rules"][0]["timeouts"]
    assert all(int(value.removesuffix("s")) > longest for value in timeouts.values())
    assert annotations["example.com/x"] == "1"


def test_no_pause_is_no_hook(helm: Engine) -> None:
    """Clusters before 1.34 refuse a sleep of no seconds."""
    manifests = helm.manifests({"proxy": {"leaveSeconds": 0}, "nodes": {"leaveSeconds": 0}})
    for pod in (pod_of(manifests), manifests.node("prefill"), manifests.node("decode")):
        assert "lifecycle" not in only_container(pod)
