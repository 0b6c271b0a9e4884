"""Two hosts on one machine, in network namespaces, with a control network and a data network that can be cut.

    this process ─┐
    prefill ──────┼─ control switch: HTTP, the side channel
    decode ───────┘
    prefill ─ data switch ─ decode: UCX over TCP, and nothing else

A cut drops packets silently, as a misconfigured switch does: links stay up and nothing is refused. It needs root and
`ip`.
"""

import os
import shutil
import subprocess
from contextlib import suppress
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

from deploy.local.node import Node, NodeSpec, command, environment
from deploy.local.paths import ROOT
from deploy.local.supervise import Supervisor, inherited

CONTROL, DATA = "10.213.1", "10.213.2"
HTTP_PORT, SIDE_CHANNEL_PORT = 8000, 5600
SWITCH = "switch"
HOSTS = {"prefill": 2, "decode": 3}


def can_make_networks() -> bool:
    """Whether this process may make network namespaces."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    line = ["unshare", "--net", "ip", "link", "add", "name", "x", "type", "bridge"]
    return subprocess.run(line, check=False, capture_output=True).returncode == 0


@dataclass(frozen=True)
class FarNode(Node):
    """A node on a host of its own."""

    address: str = ""

    @property
    def url(self) -> str:
        return f"http://{self.address}:{HTTP_PORT}"


class Network:
    """Both networks; a context manager."""

    def __init__(self) -> None:
        self._tag = f"pdp{os.getpid() % 100000}"
        self._link = f"c{self._tag}"

    def __enter__(self) -> Self:
        for name in (SWITCH, *HOSTS):
            _ip("netns", "add", self._space(name))
            self._in(name, "link", "set", "lo", "up")
        for bridge in ("control", "data"):
            self._in(SWITCH, "link", "add", "name", bridge, "type", "bridge")
            self._in(SWITCH, "link", "set", bridge, "up")
        _ip("link", "add", "name", self._link, "type", "veth", "peer", "name", "root", "netns", self._space(SWITCH))
        _ip("addr", "add", f"{CONTROL}.1/24", "dev", self._link)
        _ip("link", "set", self._link, "up")
        self._plug("root", "control")
        for name, number in HOSTS.items():
            for bridge, subnet in (("control", CONTROL), ("data", DATA)):
                port = f"{name}-{bridge}"[:15]
                peer = ("peer", "name", port, "netns", self._space(SWITCH))
                _ip("link", "add", "name", bridge, "netns", self._space(name), "type", "veth", *peer)
                self._in(name, "addr", "add", f"{subnet}.{number}/24", "dev", bridge)
                self._in(name, "link", "set", bridge, "up")
                self._plug(port, bridge)
        self._know_each_other()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name in (SWITCH, *HOSTS):
            with suppress(subprocess.CalledProcessError):
                _ip("netns", "del", self._space(name))
        with suppress(subprocess.CalledProcessError):
            _ip("link", "del", self._link)

    def cut(self) -> None:
        """Drop all packets on the data network from now on."""
        self._in(SWITCH, "link", "set", "dev", "decode-data", "nomaster")

    def close_side_channel(self) -> None:
        """Drop the decode node's packets to the prefill node on the control network, as a firewall does."""
        nobody = ("lladdr", "02:00:00:00:00:01", "nud", "permanent", "dev", "control")
        self._in("decode", "neigh", "replace", f"{CONTROL}.{HOSTS['prefill']}", *nobody)

    def heal(self) -> None:
        """Let packets pass again."""
        self._in(SWITCH, "link", "set", "dev", "decode-data", "master", "data")

    def start(self, supervisor: Supervisor, spec: NodeSpec) -> FarNode:
        """Start a node on the host that has its name."""
        address = f"{CONTROL}.{HOSTS[spec.name]}"
        local = {
            "VLLM_HOST_IP": address, "VLLM_NIXL_SIDE_CHANNEL_HOST": address, "NO_PROXY": "*",
            "UCX_TLS": "tcp", "UCX_NET_DEVICES": "data",
        }  # fmt: skip
        there = replace(
            spec, port=HTTP_PORT, side_channel_port=SIDE_CHANNEL_PORT,
            more_arguments=(*spec.more_arguments, "--host", address),
            more_environment={**local, **spec.more_environment},
        )  # fmt: skip
        line = ["ip", "netns", "exec", self._space(spec.name), *command(there)]
        return FarNode(there, supervisor.start(spec.name, line, environment(there, inherited()), ROOT), address)

    def _space(self, name: str) -> str:
        return f"{self._tag}-{name}"

    def _in(self, name: str, *words: str) -> None:
        _ip("-n", self._space(name), *words)

    def _plug(self, port: str, bridge: str) -> None:
        self._in(SWITCH, "link", "set", "dev", port, "master", bridge)
        self._in(SWITCH, "link", "set", port, "up")

    def _know_each_other(self) -> None:
        """Enter each host's link address at the other one: a lookup that a cut swallows would be reported."""
        macs = {name: self._mac(name) for name in HOSTS}
        for name in HOSTS:
            for other, number in HOSTS.items():
                if other != name:
                    fixed = ("lladdr", macs[other], "nud", "permanent", "dev", "data")
                    self._in(name, "neigh", "replace", f"{DATA}.{number}", *fixed)

    def _mac(self, name: str) -> str:
        shown = _ip("-n", self._space(name), "-o", "link", "show", "dev", "data")
        return shown.partition("link/ether ")[2].split()[0]


def _ip(*words: str) -> str:
    """Run `ip`. Raises CalledProcessError."""
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout
