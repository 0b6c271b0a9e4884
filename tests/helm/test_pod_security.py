"""The README says which PodSecurity level a namespace needs; the rendered pods need that one.

`level` is as much of https://kubernetes.io/docs/concepts/security/pod-security-standards/ as the chart's pods touch.
"""

import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.helm.engine import CHART, Engine, Manifest, Manifests, only_container
from tests.helm.settings import pod_of

ANYBODY_MAY_ADD = {
    *("AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "MKNOD", "NET_BIND_SERVICE"),
    *("SETFCAP", "SETGID", "SETPCAP", "SETUID", "SYS_CHROOT"),
}
"""Capabilities that `baseline` lets a container add."""
PLAIN_VOLUMES = {
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "persistentVolumeClaim",
    "projected",
    "secret",
}
"""Kinds of volumes that `restricted` allows."""


def level(pod: Manifest) -> str:
    """The strictest level that takes a pod: ``restricted``, ``baseline`` or ``privileged``."""
    if any(_beyond_baseline(pod)):
        return "privileged"
    return "baseline" if any(_beyond_restricted(pod)) else "restricted"


def _containers(pod: Manifest) -> list[Manifest]:
    return [*pod["spec"]["containers"], *pod["spec"].get("initContainers", [])]


def _beyond_baseline(pod: Manifest) -> Iterator[bool]:
    spec = pod["spec"]
    yield any(spec.get(host) for host in ("hostNetwork", "hostPID", "hostIPC"))
    yield any("hostPath" in volume for volume in spec.get("volumes", []))
    for container in _containers(pod):
        context = container.get("securityContext", {})
        yield bool(context.get("privileged"))
        yield not set(context.get("capabilities", {}).get("add", [])) <= ANYBODY_MAY_ADD
        yield any("hostPort" in port for port in container.get("ports", []))


def _beyond_restricted(pod: Manifest) -> Iterator[bool]:
    spec = pod["spec"]
    whole = spec.get("securityContext", {})
    yield any(not volume.keys() - {"name"} <= PLAIN_VOLUMES for volume in spec.get("volumes", []))
    for container in _containers(pod):
        context = {**whole, **container.get("securityContext", {})}
        capabilities = context.get("capabilities", {})
        yield context.get("allowPrivilegeEscalation") is not False
        yield context.get("runAsNonRoot") is not True or context.get("runAsUser") == 0
        yield context.get("seccompProfile", {}).get("type") not in ("RuntimeDefault", "Localhost")
        yield capabilities.get("drop") != ["ALL"] or not set(capabilities.get("add", [])) <= {"NET_BIND_SERVICE"}


RDMA = {"rdma": {"enabled": True}}
WEIGHTS = {"kind": "hostPath", "hostPath": "/srv"}
DOWNLOAD = {"name": "a/b", "download": {"enabled": True}, "storage": {"kind": "claim"}}
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "proxy": ({}, "restricted"),
    "`helm test`": ({}, "restricted"),
    "nodes": ({}, "restricted"),
    "the download Job": ({"model": DOWNLOAD}, "restricted"),
    "nodes with `rdma.enabled`": ({"prefill": RDMA, "decode": RDMA}, "privileged"),
    "nodes with a `hostPath`": ({"model": {"storage": WEIGHTS}}, "privileged"),
}
"""Rows of the README's table, with values that make it so."""


def pod(manifests: Manifests, name: str) -> Manifest:
    """The pod that a row is about."""
    if name == "`helm test`":
        return manifests.one("Pod")
    if "Job" in name:
        template: Manifest = manifests.one("Job")["spec"]["template"]
        return template
    return manifests.node("decode") if name.startswith("nodes") else pod_of(manifests)


@pytest.mark.parametrize("name", CASES)
def test_pods_need_the_level_that_the_readme_says(helm: Engine, name: str) -> None:
    values, wanted = CASES[name]
    assert level(pod(helm.manifests(values), name)) == wanted
    rows = dict(re.findall(r"^\| (.+?) \| `(\w+)` \|", (CHART / "README.md").read_text(), re.MULTILINE))
    assert {row: rows.get(row) for row in CASES} == {row: wanted for row, (_, wanted) in CASES.items()}


def test_levels_are_told_apart(helm: Engine) -> None:
    """By a pod that is let through, and then has one thing more."""
    for more, wanted in (
        ({"privileged": True}, "privileged"),
        ({"runAsUser": 0}, "baseline"),
        ({"capabilities": {"drop": ["ALL"], "add": ["SYS_ADMIN"]}}, "privileged"),
        ({"capabilities": {"drop": ["NET_RAW"]}}, "baseline"),
        ({"allowPrivilegeEscalation": True}, "baseline"),
    ):
        changed = pod_of(helm.manifests({}))
        assert level(changed) == "restricted"
        only_container(changed)["securityContext"].update(more)
        assert level(changed) == wanted


@pytest.mark.parametrize(
    ("values", "user"),
    [
        ({}, 2000),
        ({"prefill": RDMA}, 2000),
        ({"decode": RDMA}, 0),
        ({"model": {"storage": WEIGHTS}}, 0),
        ({"nodes": {"compileCache": WEIGHTS}}, 0),
        ({"nodes": {"podSecurityContext": {"runAsUser": 1234}}}, 1234),
    ],
)
def test_a_node_is_root_only_where_something_else_of_it_needs_that(
    helm: Engine, values: dict[str, Any], user: int
) -> None:
    spec = helm.manifests(values).node("decode")["spec"]
    assert (spec["securityContext"]["runAsUser"], spec["securityContext"]["runAsNonRoot"]) == (user, user != 0)
    assert "runAsUser" not in only_container(helm.manifests(values).node("decode"))["securityContext"]
