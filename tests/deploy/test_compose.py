"""compose.yaml, read by a compose implementation, profile by profile."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from connector.config import ConnectorConfig, Role
from deploy.local.paths import ROOT
from pdproxy.admin.guard import KnownHosts
from pdproxy.credential import read_secret
from pdproxy.settings.load import load
from tests.deploy.compose import COMPOSE, EXAMPLE, resolved
from tests.deploy.containers import container
from tests.deploy.dockerfile import FOLDER, stages

PROFILES = {
    "prefill": {"env-check", "prefill"},
    "decode": {"env-check", "admin-token", "decode", "proxy"},
    "node": {"env-check", "admin-token", "node", "node-proxy"},
    "cpu": {"cpu-env-check", "admin-token", "cpu-prefill", "cpu-decode", "cpu-proxy"},
    "watch": {"prometheus", "grafana"},
}
NODES = [
    ("prefill", "prefill", Role.PREFILL),
    ("decode", "decode", Role.DECODE),
    ("node", "node", Role.BOTH),
    ("cpu", "cpu-prefill", Role.PREFILL),
    ("cpu", "cpu-decode", Role.DECODE),
]
GPU_NODES = ("prefill", "decode", "node")
PROXIES = pytest.mark.parametrize(
    ("profile", "service"), [("decode", "proxy"), ("node", "node-proxy"), ("cpu", "cpu-proxy")]
)
ENVIRONMENT = {
    "MODEL": "/models/some model",
    "MODEL_REVISION": "0123abc",
    "LEASE_SECONDS": "45",
    "COMPILE_CACHE": "/srv/compiled",
    "NODE_ADDRESS": "10.0.0.7",
    "RDMA_DEVICES": "/dev/infiniband",
    "UCX_TLS": "rc",
    "UCX_NET_DEVICES": "mlx5_0:1",
    "PREFILL_GPUS": "2,3",
    "PREFILL_SIDE_CHANNEL_PORT": "5900",
    "PREFILL_URLS": "http://p:1,http://q:2",
    "DECODE_GPUS": "4,5",
    "DECODE_SIDE_CHANNEL_PORT": "5901",
    "DECODE_PORT": "9999",
    "NODE_GPUS": "6,7",
    "NODE_SIDE_CHANNEL_PORT": "5902",
    "NODE_PORT": "9997",
    "ADMIN_PORT": "9998",
}
"""Variables that an operator may set; in one, for to resolve the variables takes most of a second."""
OFF = {"RESUME_ARGS": "", "KV_EVENTS": "false"}
BUILT = [(profile, name) for profile, names in PROFILES.items() if profile != "watch" for name in sorted(names)]


@pytest.mark.parametrize("profile", PROFILES)
def test_every_profile_resolves_to_its_services(profile: str) -> None:
    assert set(resolved(profile)) == PROFILES[profile]


@PROXIES
def test_the_proxy_accepts_its_environment(profile: str, service: str, tmp_path: Path) -> None:
    values = resolved(profile, ADMIN_NAMES="admin.example")[service]["environment"]
    make_token(tmp_path)
    settings = load(environment=with_token(values, tmp_path))
    assert {role for node in settings.nodes for role in node.roles} == {"prefill", "decode"}
    assert all(name in KnownHosts(settings.listen) for name in ("admin.example", "127.0.0.1:8081"))
    assert ("cpu-proxy:8081" in KnownHosts(settings.listen)) is (profile == "cpu")


def make_token(folder: Path) -> str:
    """Run the container that comes before the proxy, in this folder; return the token that it makes."""
    made = container("admin-token", resolved("decode")["admin-token"], {})
    python, *words = (word.replace("/access", str(folder)) for word in made.command)
    subprocess.run([sys.executable, *words], check=True)
    assert python == "python"
    return read_secret(folder / "admin.token", "listen.admin_token_file")


def with_token(values: dict[str, object], folder: Path) -> dict[str, str]:
    """The environment of the proxy's container, with the volume of the token here."""
    return {name: value.replace("/access/", f"{folder}/") for name, value in given(values).items()}


def test_the_token_of_operators_is_made_once_and_differs_everywhere(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    for folder in (one, other):
        folder.mkdir()
    token = make_token(one)
    assert len(token) > 40
    assert make_token(one) == token != make_token(other)
    assert (one / "admin.token").stat().st_mode & 0o004, "the proxy's user is another one"
    assert [path.name for path in one.iterdir()] == ["admin.token"]


@PROXIES
def test_the_proxy_starts_once_its_token_is_there(profile: str, service: str) -> None:
    services = resolved(profile)
    assert container(service, services[service], {}).ended == {"admin-token"}
    assert "access:/access:ro" in services[service]["volumes"]
    assert services["admin-token"]["volumes"] == ["access:/access"]
    assert (services["admin-token"]["restart"], services["admin-token"]["network_mode"]) == ("no", "none")


def test_the_proxys_keys_are_where_the_example_says(tmp_path: Path) -> None:
    proxy = resolved("decode", KEY_FILES=str(tmp_path))["proxy"]
    assert f"{tmp_path}:/keys:ro" in proxy["volumes"]
    values = dict(re.findall(r"^# (PDPROXY_\w+)=(\S+)", EXAMPLE.read_text(), re.MULTILINE))
    assert values.keys() == {name for name, value in proxy["environment"].items() if value is None}
    for name in ("api.keys", "node.key", "ca.crt"):
        (tmp_path / name).write_text("key-0123456789\n")
    [example] = re.findall(r"docs/settings.md: (\{.*\})$", EXAMPLE.read_text(), re.MULTILINE)
    (tmp_path / "pdproxy.yaml").write_text(example)
    here = {name: value.replace("/keys/", f"{tmp_path}/") for name, value in values.items()}
    settings = load(environment={"PDPROXY_DECODE": "http://d:1", **here})
    assert settings.otel.export == "otlp"
    assert (settings.keys.file, settings.upstream.credential_file) == (tmp_path / "api.keys", tmp_path / "node.key")
    assert settings.upstream.credential == "replace"
    assert (settings.upstream.ca_file, settings.upstream.server_name) == (tmp_path / "ca.crt", "nodes")


@pytest.mark.parametrize(("profile", "service", "role"), NODES)
def test_the_connector_accepts_a_nodes_configuration(profile: str, service: str, role: Role) -> None:
    words = " ".join(resolved(profile)[service]["command"])
    found = re.search(r"--kv-transfer-config[= ](\{.*?\})( --|$)", words)
    assert found is not None
    config = json.loads(found[1])
    assert config["kv_connector_module_path"] == "pdproxy_connector.nixl_connector"
    extra = config.get("kv_connector_extra_config", {})
    made = ConnectorConfig.from_extra(config["kv_role"], config["kv_load_failure_policy"], extra, {})
    assert (made.role, made.lease_duration) == (role, 30)


def test_gpu_nodes_can_resume_unless_the_model_has_no_states() -> None:
    for name in GPU_NODES:
        assert re.findall(r"--prefix-match-unit=(\d+)", " ".join(resolved(name)[name]["command"])) == ["16"]
        assert "--prefix-match-unit" not in " ".join(resolved(name, **OFF)[name]["command"])


@pytest.mark.parametrize("name", GPU_NODES)
def test_gpu_nodes_publish_what_they_cache_at_their_own_address_unless_told_not_to(name: str) -> None:
    node, quiet = resolved(name, **ENVIRONMENT)[name], resolved(name, **OFF)[name]
    assert "--kv-events-config.enable_kv_cache_events=true" in node["command"]
    assert "--kv-events-config.endpoint=tcp://*:0" in node["command"]  # port 0: at VLLM_HOST_IP alone
    assert node["environment"]["VLLM_HOST_IP"] == "10.0.0.7"
    assert "--kv-events-config.enable_kv_cache_events=false" in quiet["command"]


@pytest.mark.parametrize(
    ("name", "gpus", "port"), [("prefill", "2,3", "5900"), ("decode", "4,5", "5901"), ("node", "6,7", "5902")]
)
def test_a_gpu_node_has_what_nixl_and_ucx_need(name: str, gpus: str, port: str) -> None:
    node = resolved(name, **ENVIRONMENT)[name]
    assert (node["network_mode"], node["ipc"], node["cap_add"]) == ("host", "host", ["IPC_LOCK"])
    assert node["ulimits"]["memlock"] == -1
    assert node["devices"] == ["/dev/infiniband:/dev/infiniband"]
    [reserved] = node["deploy"]["resources"]["reservations"]["devices"]
    assert reserved == {"driver": "nvidia", "device_ids": [gpus], "capabilities": ["gpu"]}
    environment = node["environment"]
    assert environment["VLLM_PLUGINS"] == "pdproxy_connector,pdproxy_endpoints"
    assert environment["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "10.0.0.7"
    assert environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] == port
    assert (environment["UCX_TLS"], environment["UCX_NET_DEVICES"]) == ("rc", "mlx5_0:1")


def test_variables_of_the_env_file_reach_the_services() -> None:
    services = resolved("decode", **ENVIRONMENT)
    assert services["decode"]["command"][:3] == ["/models/some model", "--port", "9999"]
    assert "/srv/compiled:/compile-cache" in services["decode"]["volumes"]
    assert services["decode"]["environment"]["NODE_PORT"] == "9999"
    assert services["proxy"]["environment"]["PDPROXY_PREFILL"] == "http://p:1,http://q:2"
    assert services["proxy"]["environment"]["PDPROXY_LISTEN_ADMIN_PORT"] == "9998"


def test_the_proxy_of_equal_nodes_is_told_the_one_here_and_others_where_they_are_said(tmp_path: Path) -> None:
    services = resolved("node", **ENVIRONMENT)
    assert services["node"]["command"][:3] == ["/models/some model", "--port", "9997"]
    assert services["node"]["environment"]["NODE_PORT"] == "9997"
    make_token(tmp_path)
    for said, urls in (
        ({}, ["http://127.0.0.1:8300"]),
        ({"NODE_URLS": "http://n:1,http://m:2"}, ["http://n:1", "http://m:2"]),
    ):
        node, proxy = (resolved("node", **said)[name] for name in ("node", "node-proxy"))
        settings = load(environment=with_token(proxy["environment"], tmp_path))
        assert [(each.url, each.roles) for each in settings.nodes] == [(url, ("prefill", "decode")) for url in urls]
        assert node["environment"]["NODE_PORT"] == node["command"][node["command"].index("--port") + 1] == "8300"


def test_both_proxies_on_gpu_hosts_differ_in_their_nodes_alone() -> None:
    one, other = resolved("decode")["proxy"], resolved("node")["node-proxy"]
    differ = {name for name in one.keys() | other.keys() if one.get(name) != other.get(name)}
    assert differ == {"profiles", "environment", "depends_on"}
    nodes = {"PDPROXY_PREFILL", "PDPROXY_DECODE", "PDPROXY_NODE"}
    assert {name: one["environment"][name] for name in one["environment"].keys() - nodes} == {
        name: other["environment"][name] for name in other["environment"].keys() - nodes
    }


def test_one_lease_and_one_revision_for_all(tmp_path: Path) -> None:
    """A ticket that is tried for longer than its blocks are kept costs a failed read."""
    make_token(tmp_path)
    for profile, proxy in (("decode", "proxy"), ("node", "node-proxy")):
        values = resolved(profile, **ENVIRONMENT)[proxy]["environment"]
        assert float(load(environment=with_token(values, tmp_path)).policy.ticket_life) == 45.0
    for name in GPU_NODES:
        words = resolved(name, **ENVIRONMENT)[name]["command"]
        config = json.loads(words[words.index("--kv-transfer-config") + 1])
        assert config["kv_connector_extra_config"]["kv_lease_duration"] == 45
        assert words[words.index("--revision") + 1] == words[words.index("--tokenizer-revision") + 1] == "0123abc"


def given(values: dict[str, object]) -> dict[str, str]:
    """Variables that have a value."""
    return {name: str(value) for name, value in values.items() if value is not None}


def test_on_hosts_of_one_gpu_each_every_node_has_it() -> None:
    for name in GPU_NODES:
        [reserved] = resolved(name)[name]["deploy"]["resources"]["reservations"]["devices"]
        assert reserved["device_ids"] == ["0"]


def test_what_is_compiled_outlives_the_container() -> None:
    for name in GPU_NODES:
        node = resolved(name)[name]
        [place] = [volume.split(":")[1] for volume in node["volumes"] if volume.startswith("./.cache/compile:")]
        caches = ("VLLM_CACHE_ROOT", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE")
        assert all(node["environment"][cache].startswith(f"{place}/") for cache in caches)


def test_on_one_host_the_proxy_finds_both_nodes() -> None:
    prefill, decode = resolved("prefill")["prefill"], resolved("decode")["decode"]
    values = resolved("decode")["proxy"]["environment"]
    for node, name in ((prefill, "PDPROXY_PREFILL"), (decode, "PDPROXY_DECODE")):
        assert values[name] == f"http://127.0.0.1:{node['environment']['NODE_PORT']}"
        assert node["environment"]["NODE_PORT"] == node["command"][node["command"].index("--port") + 1]
    one, other = (node["environment"]["VLLM_NIXL_SIDE_CHANNEL_PORT"] for node in (prefill, decode))
    assert one != other


@pytest.mark.parametrize(
    ("profile", "name", "nodes"),
    [
        ("decode", "proxy", {"decode"}),
        ("node", "node-proxy", {"node"}),
        ("cpu", "cpu-proxy", {"cpu-prefill", "cpu-decode"}),
    ],
)
def test_the_proxy_waits_for_no_model(profile: str, name: str, nodes: set[str]) -> None:
    """Loading takes unknown time: the proxy starts at once and adds nodes as they come, and stops before they do."""
    made = container(name, resolved(profile)[name], {})
    assert made.after == nodes
    assert not made.waits


def test_a_node_that_loads_a_large_model_stays_healthy() -> None:
    """400 GB at 100 MB/s are 67 minutes, and compiling comes on top."""
    assert stages(FOLDER / "gpu-node.Dockerfile")[-1].health().start_period >= 90 * 60


@pytest.mark.parametrize(("profile", "name"), BUILT)
def test_no_container_may_do_more_than_it_must(profile: str, name: str) -> None:
    service = resolved(profile)[name]
    assert "privileged" not in service
    built_from = service.get("build", {}).get("dockerfile", "")
    if "gpu-node" not in built_from:
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
    if "proxy" in built_from:
        assert service["read_only"] is True


def test_by_default_only_the_clients_port_is_open_to_other_hosts() -> None:
    """On GPU hosts, which have no port mappings, the proxy's own addresses decide."""
    values = resolved("decode")["proxy"]["environment"]
    assert (values["PDPROXY_LISTEN_HOST"], values["PDPROXY_LISTEN_ADMIN_HOST"]) == ("0.0.0.0", "127.0.0.1")
    assert all(port.startswith("127.0.0.1:") for port in resolved("cpu")["cpu-proxy"]["ports"])
    watching = resolved("watch")
    assert "--web.listen-address=127.0.0.1:9090" in watching["prometheus"]["command"]
    assert watching["grafana"]["environment"]["GF_SERVER_HTTP_ADDR"] == "127.0.0.1"


def test_what_is_mounted_from_the_repository_is_there() -> None:
    volumes = [volume for each in resolved("watch").values() for volume in each["volumes"]]
    sources = [volume.split(":")[0] for volume in volumes if volume.startswith("./")]
    assert len(sources) == 3
    assert all((ROOT / source).is_dir() for source in sources)


def test_the_env_example_has_every_variable_with_its_default_and_no_other() -> None:
    defaults = dict(re.findall(r"\$\{(\w+):?-([^}]*)\}", COMPOSE.read_text()))
    passed_on = set(re.findall(r"^\s+(PDPROXY_\w+|VLLM_API_KEY):$", COMPOSE.read_text(), re.MULTILINE))
    explained = dict(re.findall(r"^# (\w+)=(\S*)", EXAMPLE.read_text(), re.MULTILINE))
    assert explained.keys() == defaults.keys() | passed_on
    assert {name: explained[name] for name in defaults} == defaults


def test_the_documentation_names_the_ports_that_are_opened() -> None:
    values = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    every = {name: service for profile in PROFILES for name, service in resolved(profile).items()}
    proxy, cpu, prefill = every["proxy"]["environment"], every["cpu-proxy"]["ports"], every["prefill"]["environment"]
    opened = {
        "answers on port (\\d+)": {str(proxy["PDPROXY_LISTEN_PORT"]), cpu[0].rpartition(":")[2]},
        "FIRST-HOST:(\\d+)": {str(prefill["NODE_PORT"])},
        "Prometheus \\((\\d+)\\)": {" ".join(every["prometheus"]["command"]).rpartition(":")[2]},
        "Grafana \\((\\d+)\\)": {str(every["grafana"]["environment"]["GF_SERVER_HTTP_PORT"])},
    }
    assert {pattern: set(re.findall(pattern, values)) for pattern in opened} == opened
