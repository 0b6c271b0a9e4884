"""A prefill node, two decode nodes and a proxy of a test's own. Tests may break nodes; `Fleet.heal` repairs them."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx

from deploy.local.node import Node, NodeSpec, Role, on_free_ports, start_node
from deploy.local.readiness import await_ready
from deploy.local.stack import (
    NODES_UP_WITHIN_S,
    PROBES,
    Proxy,
    ProxySpec,
    Until,
    await_nodes,
    logs_of,
    start_nodes,
    start_proxy,
)
from deploy.local.supervise import Supervisor
from tests.e2e.process_faults import go_on

FORGET_WITHIN_S = 60.0
DEVELOPING = {"VLLM_SERVER_DEV_MODE": "1"}
"""Lets a test tell a node to drop its prefix cache."""
SLOW = ("--max-num-seqs", "4")
"""Flags of slow decode nodes, whose streams still run when a node breaks."""
NAMES = {"prefill": Role.PREFILL, "decode-0": Role.DECODE, "decode-1": Role.DECODE}


@dataclass
class Fleet:
    """The running parts; `nodes` by name."""

    supervisor: Supervisor
    nodes: dict[str, Node]
    proxy: Proxy
    healed: list[str] = field(default_factory=list)
    """Nodes that were started again, in order."""

    seeds: Iterator[int] = field(default_factory=lambda: itertools.count(1000, 100))
    """Seeds for prompts that no cache has."""

    def forget(self) -> None:
        """Drop the prefill node's prefix cache. Raises httpx.HTTPError."""
        httpx.post(
            f"{self.nodes['prefill'].url}/reset_prefix_cache", timeout=FORGET_WITHIN_S, trust_env=False
        ).raise_for_status()

    def heal(self) -> None:
        """Resume stopped nodes and start dead ones again. Returns once the proxy serves with every node.

        Raises as `start_nodes`.
        """
        for name, node in self.nodes.items():
            go_on(node.part)
            if node.part.process.poll() is not None:
                self.supervisor.stop(node.part)
                self.nodes[name] = start_node(self.supervisor, node.spec)
                self.healed.append(name)
        await_nodes(self.supervisor, list(self.nodes.values()), print)
        await_ready(
            {"every node's place": self.proxy.admin_url + Until.JOINED.value},
            within=NODES_UP_WITHIN_S,
            still_alive=self.supervisor.require_all_alive,
            say=print,
            probe=PROBES[Until.JOINED],
        )


@contextmanager
def running_fleet(
    logs: str, settings: Mapping[str, str], decode: Sequence[str] = SLOW, more: Sequence[str] = ()
) -> Iterator[Fleet]:
    """Start everything, and wait until every node serves. Raises as `start_nodes`.

    Args:
        logs: the folder's name in `.run`.
        settings: the proxy's, as environment variables.
        decode: more arguments of decode nodes.
        more: more arguments of every node.
    """
    arguments = {Role.PREFILL: tuple(more), Role.DECODE: (*decode, *more)}
    specs = on_free_ports(
        *(
            NodeSpec(name, role, 0, 0, more_arguments=arguments[role], more_environment=DEVELOPING)
            for name, role in NAMES.items()
        )
    )
    with Supervisor(logs_of(logs)) as supervisor:
        nodes = start_nodes(supervisor, specs, print)
        environment = {"PDPROXY_POLICY_ITL_BUDGET": "0", **settings}  # every prompt is handed over
        proxy = start_proxy(supervisor, ProxySpec(more_environment=environment), nodes, print)
        fleet = Fleet(supervisor, dict(zip(NAMES, nodes, strict=True)), proxy)
        yield fleet
        for node in fleet.nodes.values():
            go_on(node.part)  # a stopped process would end only when its grace period is over
