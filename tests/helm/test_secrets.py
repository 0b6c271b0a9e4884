"""Secrets are made once: an upgrade, asked of a cluster that has them, keeps every one."""

import base64
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from connector.config import ConnectorConfig
from pdproxy.credential import read_secret
from pdproxy.intake.auth import read_keys
from tests.fakes.http_server import QuietHandler, served
from tests.helm.engine import NAMESPACE, Engine, Manifests, only_container
from tests.helm.settings import pod_of

Secrets = Mapping[str, Mapping[str, str]]
"""Base64 data by secret's name."""

_RESOURCES = {
    "kind": "APIResourceList",
    "apiVersion": "v1",
    "groupVersion": "v1",
    "resources": [
        {"name": "secrets", "singularName": "secret", "namespaced": True, "kind": "Secret", "verbs": ["get"]}
    ],
}
_MISSING = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}


def _handler(namespace: str, secrets: Secrets) -> type[QuietHandler]:
    class Handler(QuietHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            name = path.removeprefix(f"/api/v1/namespaces/{namespace}/secrets/")
            if path == "/api/v1":
                self.answer_json(200, _RESOURCES)
            elif name in secrets:
                metadata = {"name": name, "namespace": namespace}
                kept = {"kind": "Secret", "apiVersion": "v1", "metadata": metadata, "data": secrets[name]}
                self.answer_json(200, kept)
            else:
                self.answer_json(404, _MISSING)

    return Handler


@contextmanager
def cluster(namespace: str, secrets: Secrets) -> Iterator[str]:
    """The kubeconfig of a cluster with these secrets, while inside."""
    with served(_handler(namespace, secrets)) as address:
        yield _kubeconfig(address)


def _kubeconfig(server: str) -> str:
    here = "here"
    return json.dumps(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": here,
            "contexts": [{"name": here, "context": {"cluster": here, "user": here}}],
            "clusters": [{"name": here, "cluster": {"server": server}}],
            "users": [{"name": here, "user": {}}],
        }
    )


def data_of(manifests: Manifests) -> dict[str, dict[str, str]]:
    """Base64 entries by secret."""
    return {secret["metadata"]["name"]: secret["data"] for secret in manifests.of("Secret")}


def text(data: str) -> str:
    """The text of an entry."""
    return base64.b64decode(data).decode()


def test_first_installation_makes_them(helm: Engine) -> None:
    with cluster(NAMESPACE, {}) as kubeconfig:
        first, second = (data_of(helm.manifests({}, kubeconfig)) for _ in range(2))
    assert first.keys() == {"demo-pdproxy-api-keys", "demo-pdproxy-access", "demo-pdproxy-tickets"}
    values = [value for entries in first.values() for value in entries.values()]
    assert len(set(values)) == len(values) == 4
    assert all(first[name][key] != second[name][key] for name in first for key in first[name])


def test_upgrade_keeps_them(helm: Engine) -> None:
    made = data_of(helm.manifests({}))
    with cluster(NAMESPACE, made) as kubeconfig:
        upgraded = helm.manifests({"proxy": {"replicas": 5}}, kubeconfig)
    assert upgraded.one("Deployment")["spec"]["replicas"] == 5
    assert data_of(upgraded) == made


def test_an_entry_that_is_missing_is_added_and_the_others_stay(helm: Engine) -> None:
    kept = data_of(helm.manifests({}))["demo-pdproxy-access"]["node.key"]
    with cluster(NAMESPACE, {"demo-pdproxy-access": {"node.key": kept}}) as kubeconfig:
        found = data_of(helm.manifests({}, kubeconfig))["demo-pdproxy-access"]
    assert found["node.key"] == kept
    assert len(text(found["admin.token"])) == 48


def test_uninstalling_keeps_them(helm: Engine) -> None:
    for secret in helm.manifests({}).of("Secret"):
        assert secret["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"


def test_an_upgrade_does_not_restart_nodes(helm: Engine) -> None:
    made = data_of(helm.manifests({}))
    before = helm.manifests({})
    with cluster(NAMESPACE, made) as kubeconfig:
        after = helm.manifests({}, kubeconfig)
    for role in ("prefill", "decode"):
        assert before.node(role) == after.node(role)
    assert before.one("Deployment") == after.one("Deployment")


def test_given_keys_win_and_a_change_restarts_nobody(helm: Engine) -> None:
    """Readers of these files read them again."""
    old, new = "old-key-0123456789", "new-key-0123456789"
    made = data_of(helm.manifests({part: {"keys": [old]} for part in ("tickets", "apiKeys")}))
    with cluster(NAMESPACE, made) as kubeconfig:
        one, two = (
            helm.manifests({part: {"keys": keys} for part in ("tickets", "apiKeys")}, kubeconfig)
            for keys in ([old], [new, old])
        )
    assert text(data_of(two)["demo-pdproxy-tickets"]["ticket.keys"]).splitlines() == [new, old]
    assert text(data_of(two)["demo-pdproxy-api-keys"]["api.keys"]).splitlines() == [new, old]
    for role in ("prefill", "decode"):
        assert one.node(role) == two.node(role)
    assert one.one("Deployment") == two.one("Deployment")


@pytest.mark.parametrize("role", ["prefill", "decode", "proxy"])
def test_secrets_are_mounted_as_folders(helm: Engine, role: str) -> None:
    """A file that is mounted by a path of its own (subPath) never changes in a running pod."""
    manifests = helm.manifests({})
    pod = pod_of(manifests) if role == "proxy" else manifests.node(role)
    secrets = {each["name"] for each in pod["spec"]["volumes"] if "secret" in each}
    mounts = [each for each in only_container(pod)["volumeMounts"] if each["name"] in secrets]
    assert len(mounts) == len(secrets) > 0
    assert all("subPath" not in each for each in mounts)


def test_own_secrets_replace_all(helm: Engine) -> None:
    names = {"apiKeys": "mine-keys", "access": "mine-access", "tickets": "mine-tickets"}
    manifests = helm.manifests({part: {"existingSecret": name} for part, name in names.items()})
    assert manifests.of("Secret") == []
    proxy = manifests.one("Deployment")["spec"]["template"]["spec"]["volumes"]
    assert {v["secret"]["secretName"] for v in proxy if "secret" in v} == {"mine-keys", "mine-access"}
    node = manifests.node("decode")["spec"]["volumes"]
    assert [v["secret"]["secretName"] for v in node if "secret" in v] == ["mine-tickets"]


def test_who_reads_them_understands_them(helm: Engine, tmp_path: Path) -> None:
    for entries in data_of(helm.manifests({})).values():
        for name, value in entries.items():
            (tmp_path / name).write_text(text(value))
    key = (tmp_path / "api.keys").read_text().split()[0]
    assert read_keys(tmp_path / "api.keys").api_key({"authorization": f"Bearer {key}"}).name == "first"
    assert read_secret(tmp_path / "node.key", "node.key")
    assert read_secret(tmp_path / "admin.token", "admin.token")
    extra = {"pdproxy_key_file": str(tmp_path / "ticket.keys")}
    [ticket_key] = ConnectorConfig.from_extra("kv_consumer", "recompute", extra, {}).keys
    assert len(ticket_key) == 64
