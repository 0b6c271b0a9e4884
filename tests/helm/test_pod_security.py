"""The README says which PodSecurity level a namespace needs; the rendered pods need that one."""

import re
from typing import Any

import pytest

from tests.helm.engine import CHART, Engine, Manifest, Manifests, only_container
from tests.helm.pod_security import level
from tests.helm.settings import pod_of

RDMA = {"rdma": {"enabled": True}}
WEIGHTS = {"kind": "hostPath", "hostPath": "/srv"}
ANYBODY = {
    "allowPrivilegeEscalation": False,
    "runAsNonRoot": True,
    "runAsUser": 1000,
    "capabilities": {"drop": ["ALL"]},
}
DOWNLOAD = {"name": "a/b", "download": {"enabled": True}, "storage": {"kind": "claim"}}
"""A node that is not root; its image must be able to run so."""
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "proxy": ({}, "restricted"),
    "`helm test`": ({}, "restricted"),
    "nodes": ({}, "baseline"),
    "the download Job": ({"model": DOWNLOAD}, "baseline"),
    "nodes with `rdma.enabled`": ({"prefill": RDMA, "decode": RDMA}, "privileged"),
    "nodes with a `hostPath`": ({"model": {"storage": WEIGHTS}}, "privileged"),
    "nodes that are not root": (
        {"nodes": {"securityContext": {**ANYBODY, "seccompProfile": {"type": "RuntimeDefault"}}}},
        "restricted",
    ),
}
"""What the README's table lists, with values that make it so."""


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
