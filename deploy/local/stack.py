"""The whole thing on one machine: prefill nodes, decode nodes, and the proxy in front of them."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from deploy.local.node import Node, NodeSpec, Role, on_free_ports, start_node
from deploy.local.paths import ROOT, RUNS
from deploy.local.ports import HOST, free_ports, require_free
from deploy.local.readiness import Probe, Say, answers, await_ready
from deploy.local.supervise import Part, Supervisor, inherited
from deploy.local.wait_joined import all_joined

NODES_UP_WITHIN_S = 300.0
PROXY_UP_WITHIN_S = 60.0


class Until(Enum):
    """How long to wait for a proxy; the value is what is asked for at its operators' port."""

    JOINED = "/nodes"
    """Every node serves."""
    READY = "/ready"
    """Requests are served, by some of the nodes."""
    ALIVE = "/health"


PROBES: Mapping[Until, Probe] = {Until.JOINED: all_joined, Until.READY: answers, Until.ALIVE: answers}


@dataclass(frozen=True)
class ProxySpec:
    """How to start the proxy: its ports (0: any), more arguments for `pdproxy serve`, and when it counts as started."""

    port: int = 0
    admin_port: int = 0
    more_arguments: tuple[str, ...] = ()
    more_environment: Mapping[str, str] = field(default_factory=dict)
    until: Until = Until.JOINED


@dataclass(frozen=True)
class Proxy:
    """A started proxy."""

    port: int
    admin_port: int
    part: Part

    @property
    def url(self) -> str:
        """Where clients connect."""
        return f"http://{HOST}:{self.port}"

    @property
    def admin_url(self) -> str:
        """Where operators connect: metrics and node administration."""
        return f"http://{HOST}:{self.admin_port}"


@dataclass(frozen=True)
class Stack:
    """The nodes and the proxy that are up. Nodes of both roles are decode nodes here."""

    prefill: tuple[Node, ...]
    decode: tuple[Node, ...]
    proxy: Proxy


def pair_specs() -> list[NodeSpec]:
    """One prefill node and one decode node, on ports yet to be chosen."""
    return [NodeSpec("prefill", Role.PREFILL, 0, 0), NodeSpec("decode", Role.DECODE, 0, 0)]


def equal_specs(count: int) -> list[NodeSpec]:
    """So many nodes of both roles, on ports yet to be chosen."""
    return [NodeSpec(f"node-{number}", Role.BOTH, 0, 0) for number in range(count)]


def proxy_command(port: int, admin_port: int, nodes: Sequence[NodeSpec], more: Sequence[str]) -> list[str]:
    flags = {Role.PREFILL: "--prefill", Role.DECODE: "--decode", Role.PLAIN: "--decode", Role.BOTH: "--node"}
    line = [sys.executable, "-m", "pdproxy", "serve", "--host", HOST, "--port", str(port)]
    line += ["--admin-port", str(admin_port)]
    for node in nodes:
        line += [flags[node.role], node.url]
    return [*line, *more]


def start_nodes(supervisor: Supervisor, specs: Sequence[NodeSpec], say: Say) -> list[Node]:
    """Start nodes, all at once, and wait until they answer.

    Raises PortTakenError, PartEndedError with the last log lines, or NotReadyError.
    """
    nodes = [start_node(supervisor, spec) for spec in on_free_ports(*specs)]
    await_nodes(supervisor, nodes, say)
    return nodes


def await_nodes(supervisor: Supervisor, nodes: Sequence[Node], say: Say, within: float = NODES_UP_WITHIN_S) -> None:
    """Wait until all of them answer."""
    urls = {f"{node.spec.name} node": f"{node.url}/health" for node in nodes}
    await_ready(urls, within=within, still_alive=supervisor.require_all_alive, say=say)


def start_proxy(supervisor: Supervisor, spec: ProxySpec, nodes: Sequence[Node], say: Say) -> Proxy:
    """Start the proxy and wait for it. Raises as `start_nodes` does, and NodeRefusedError."""
    port, admin_port = (given or free for given, free in zip((spec.port, spec.admin_port), free_ports(2), strict=True))
    for number, purpose in ((port, "clients' HTTP of the proxy"), (admin_port, "operators' HTTP of the proxy")):
        require_free(number, purpose, "choose another one, or end whatever listens there")
    environment = {**inherited(), "PYTHONUNBUFFERED": "1", **spec.more_environment}
    command = proxy_command(port, admin_port, [node.spec for node in nodes], spec.more_arguments)
    proxy = Proxy(port, admin_port, supervisor.start("proxy", command, environment, ROOT))
    await_proxy(supervisor, proxy.admin_url, spec.until, say)
    return proxy


def await_proxy(
    supervisor: Supervisor, admin_url: str, until: Until, say: Say, within: float = PROXY_UP_WITHIN_S
) -> None:
    """Wait for a started proxy. Raises as `start_nodes` does, and NodeRefusedError."""
    await_ready(
        {"proxy": admin_url + until.value},
        within=within,
        still_alive=supervisor.require_all_alive,
        say=say,
        probe=PROBES[until],
    )


def start_stack(supervisor: Supervisor, nodes: Sequence[NodeSpec], proxy: ProxySpec, say: Say) -> Stack:
    """Start everything. Raises as `start_nodes` does."""
    started = start_nodes(supervisor, nodes, say)
    prefill = tuple(node for node in started if node.spec.role is Role.PREFILL)
    decode = tuple(node for node in started if node.spec.role is not Role.PREFILL)
    return Stack(prefill, decode, start_proxy(supervisor, proxy, started, say))


def logs_of(run: str) -> Path:
    """Where the logs of a run with that name lie."""
    return RUNS / run
