"""A node without a GPU is started the same way by the launcher, by compose.yaml and by the chart's example.

The launcher's command line is the one that the end-to-end tests run: what the others leave out of it, engines die of.
"""

import json
from collections.abc import Mapping

import pytest

from deploy.local.node import NodeSpec, Role, command, environment
from tests.deploy.compose import resolved
from tests.deploy.dockerfile import FOLDER, stages
from tests.helm.conftest import Rendered
from tests.helm.engine import only_container

ROLES = {"prefill": Role.PREFILL, "decode": Role.DECODE}
OWN = {
    "launcher": {"host"},
    "compose": {"shutdown-timeout"},
    "chart": {"shutdown-timeout", "tensor-parallel-size", "gpu-memory-utilization"},
}
"""Settings of some of them: addresses, how long to wait at the end, and GPU settings that mean nothing on a CPU."""
PLACES = {"VLLM_HOST_IP", "VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT", "NO_PROXY"}
"""Addresses, which differ."""


def flags(words: list[str]) -> dict[str, str]:
    """A command line's flags by name, written `--name value` or `--name=value`; a switch has "" as its value."""
    known: dict[str, str] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, _, value = word.removeprefix("--").partition("=")
            known[name] = value
        elif name:
            known[name], name = word, ""
    return known


def said(words: list[str], by: str) -> dict[str, object]:
    """The settings that all three must share."""
    found: dict[str, object] = {name: value for name, value in flags(words).items() if name not in OWN[by]}
    transfer = json.loads(str(found.pop("kv-transfer-config")))
    events = json.loads(str(found.pop("kv-events-config")))
    assert all(str(value).startswith("tcp://*:") for name, value in events.items() if "endpoint" in name)
    return {
        **found,
        "transfer": {name: value for name, value in transfer.items() if "extra" not in name},
        "events": (sorted(events), events["enable_kv_cache_events"]),  # of the endpoints, the ports differ
    }


def launched(role: str) -> list[str]:
    """The launcher's flags for the model in the image; the cache's size is left to the environment."""
    spec = NodeSpec(role, ROLES[role], 8000, 5600, gpu_blocks=None)
    words = command(spec)
    return ["/models/tiny-hybrid" if word == str(spec.model) else word for word in words[3:]]


@pytest.fixture(scope="module")
def composed() -> Mapping[str, list[str]]:
    """The command lines of compose.yaml's nodes by role."""
    services = resolved("cpu")
    return {role: services[f"cpu-{role}"]["command"] for role in ROLES}


@pytest.mark.parametrize("role", ROLES)
def test_the_command_lines_are_one(rendered: Rendered, composed: Mapping[str, list[str]], role: str) -> None:
    one = said(launched(role), "launcher")
    assert said(composed[role], "compose") == one
    assert said(only_container(rendered("no-gpu").node(role))["args"], "chart") == one


@pytest.mark.parametrize("role", ROLES)
def test_the_environments_are_one(rendered: Rendered, role: str) -> None:
    wanted = environment(NodeSpec(role, ROLES[role], 8000, 5600), {})
    image = stages(FOLDER / "cpu-node.Dockerfile")[-1].environment({})
    chart = {each["name"]: each.get("value") for each in only_container(rendered("no-gpu").node(role))["env"]}
    for over in ({}, chart):
        made = {**image, **over}
        assert {name: made.get(name) for name in wanted.keys() - PLACES} == {
            name: value for name, value in wanted.items() if name not in PLACES
        }


def test_what_is_left_out_is_seen() -> None:
    words = launched("decode")
    there = words.index("--worker-cls")
    assert said(words[:there] + words[there + 2 :], "launcher") != said(words, "launcher")
