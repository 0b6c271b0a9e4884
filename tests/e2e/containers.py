"""A pod's container as a process of this machine: the rendered arguments and variables, with other paths and ports.

Images other than `FIRST_RELEASE` are the same code; their connector reports the image's tag as its version
(`next_release`).
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from deploy.local.node import SERVER, NodeSpec, Role, environment
from deploy.local.ports import HOST
from deploy.local.supervise import inherited
from pdproxy import __version__
from tests.helm.engine import Manifest, only_container

FIRST_RELEASE = __version__
MODEL_PATH = "/models/tiny-hybrid"
"""The model's path in the image."""
MOUNTS = "/etc/pdproxy"
"""The folder in which pods mount secrets and settings."""
OWN = frozenset({"HF_HOME", "NODE_PORT", "UCX_NET_DEVICES"})
"""Variables that this machine sets by itself."""


@dataclass(frozen=True)
class Started:
    """How to start a container."""

    command: list[str]
    variables: dict[str, str]


class Containers:
    """Makes command lines. ``mounts``: a folder for what pods mount."""

    def __init__(self, mounts: Path) -> None:
        self._mounts = mounts

    def proxy(self, template: Manifest, settings: str, api: str, ports: Mapping[str, int]) -> Started:
        """A proxy with these settings. ``api``: the API server that it watches."""
        container = only_container(template)
        file = self._mounts / f"pdproxy-{ports['http']}.yaml"
        file.write_text(settings.replace(MOUNTS, str(self._mounts)))
        command = [sys.executable, "-m", "pdproxy", container["args"][0], f"--config={file}", f"--host={HOST}"]
        command += [f"--port={ports['http']}", f"--admin-port={ports['admin']}"]
        variables = {each["name"]: each["value"] for each in container["env"]}
        return Started(command, {**inherited(), **variables, "PDPROXY_DISCOVERY_API": api, "PYTHONUNBUFFERED": "1"})

    def node(self, template: Manifest, role: Role, model: Path, ports: Mapping[str, int]) -> Started:
        """An engine. ``model``: the model's folder."""
        container = only_container(template)
        release = container["image"].rpartition(":")[2]
        arguments = [self._argument(word, ports, release, model) for word in container["args"]]
        base = environment(NodeSpec(role.name, role, ports["http"], ports["side-channel"]), inherited())
        chart = {each["name"]: each["value"] for each in container["env"] if "value" in each}
        here = {
            "VLLM_NIXL_SIDE_CHANNEL_HOST": HOST,
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(ports["side-channel"]),
            "VLLM_API_KEY": (self._mounts / "access" / "node.key").read_text().strip(),
            "PDPROXY_TEST_RELEASE": release,
        }
        said = {name: value for name, value in chart.items() if name not in OWN}
        return Started([sys.executable, "-m", SERVER, f"--host={HOST}", *arguments], {**base, **said, **here})

    def _argument(self, word: str, ports: Mapping[str, int], release: str, model: Path) -> str:
        name, _, value = word.partition("=")
        if name == "--port":
            return f"--port={ports['http']}"
        if name == "--kv-events-config":
            own = {"endpoint": "tcp://*:0", "replay_endpoint": "tcp://*:0"}
            return f"{name}={json.dumps({**json.loads(value), **own})}"
        if name == "--kv-transfer-config" and release != FIRST_RELEASE:
            value = json.dumps({**json.loads(value), "kv_connector_module_path": "tests.e2e.next_release"})
            word = f"{name}={value}"
        return word.replace(MOUNTS, str(self._mounts)).replace(MODEL_PATH, str(model))
