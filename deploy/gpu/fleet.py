"""The nodes and the proxy of a run: started, broken on purpose, made whole again."""

import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from deploy.gpu.launch import KEYS_VARIABLE, Launch, alone, pair, proxy_settings
from deploy.gpu.metrics import Snapshot, holds, read
from deploy.gpu.options import Options
from deploy.local.node import Node
from deploy.local.paths import ROOT
from deploy.local.readiness import Say, await_ready
from deploy.local.stack import PROBES, Proxy, ProxySpec, Until, start_proxy
from deploy.local.supervise import Supervisor, inherited
from deploy.local.watchdog import descendants, send

JOINED_WITHIN_S = 300.0
"""For the proxy's known-answer test of each pair, in whose first requests kernels may be compiled."""
STRUCK_WITHIN_S = 60.0
LET_GO_WITHIN_S = 60.0
"""For blocks to be given back, besides a lease."""
FORGOTTEN = ("VLLM_API_KEY", "VLLM_PLUGINS", KEYS_VARIABLE)
"""Of this process's environment: a run's nodes have a key of their own, and ask nobody for one."""
HELD_BY_NODES = (
    "vllm:kv_cache_usage_perc",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
)
HELD_BY_THE_PROXY = ("pdproxy_requests_active", "pdproxy_requests_queued")


class Fate(Enum):
    """How a node fails: the signal that all its processes get, the server, the engine and its workers."""

    KILLED = signal.SIGKILL
    FROZEN = signal.SIGSTOP


@dataclass
class Fleet:
    """What is up. `launches` and `nodes` are by name; `starts` counts, so that each start has a log of its own."""

    supervisor: Supervisor
    options: Options
    say: Say
    launches: Mapping[str, Launch]
    nodes: dict[str, Node] = field(default_factory=dict)
    starts: dict[str, int] = field(default_factory=dict)
    proxy: Proxy | None = None

    @property
    def prefill(self) -> Node:
        """The prefill node."""
        return self.nodes["prefill"]

    @property
    def decode(self) -> Node:
        """The first decode node."""
        return self.nodes[self.options.decode_names[0]]

    @property
    def front(self) -> Proxy:
        """The proxy, which must have been started."""
        assert self.proxy is not None
        return self.proxy

    def start_nodes(self) -> None:
        """Start all nodes, those that share a GPU in turn: each measures what memory is free.

        Raises as `await_ready` does, and PartEndedError with the last log lines.
        """
        for batch in batches(list(self.launches.values())):
            for launch in batch:
                self._start(launch)
            self._await_answers([launch.spec.name for launch in batch])

    def start_proxy(self, settings: Mapping[str, str]) -> None:
        """Start the proxy and wait until every node serves. Raises as `start_nodes` does, and NodeRefusedError."""
        spec = ProxySpec(more_environment=settings, until=Until.ALIVE)
        self.proxy = start_proxy(self.supervisor, spec, list(self.nodes.values()), self.say)
        self.await_joined(self.say)

    def strike(self, name: str, fate: Fate) -> None:
        """Let it happen now; when this returns, a killed node is gone."""
        process = self.nodes[name].part.process
        send(descendants(process.pid), fate.value)
        if fate is Fate.KILLED:
            process.wait(STRUCK_WITHIN_S)

    def heal(self) -> None:
        """Wake what is frozen, start anew what ended, and wait until all serve. Raises as `start_nodes` does."""
        ended = [name for name, node in self.nodes.items() if node.part.process.poll() is not None]
        for name, node in list(self.nodes.items()):
            if name in ended:
                self.supervisor.stop(node.part)
                self.say(f"starting {name} again …")
                self._start(self.launches[name])
            else:
                send(descendants(node.part.process.pid), signal.SIGCONT)
        self._await_answers(ended)
        self.await_joined(self.say if ended else _say_nothing)

    def await_joined(self, say: Say) -> None:
        """Until the proxy serves with every node. Raises as `start_nodes` does, and NodeRefusedError."""
        await_ready(
            {"every node's place in the proxy": self.front.admin_url + Until.JOINED.value},
            within=JOINED_WITHIN_S,
            still_alive=self.supervisor.require_all_alive,
            say=say,
            probe=PROBES[Until.JOINED],
        )

    def held(self) -> list[str]:
        """What nodes and proxy still hold, once it stays so: nothing, where all was given back in time."""
        found: list[str] = []

        def nothing() -> bool:
            found[:] = [f"{name} has {metric} at {value:g}" for name, metric, value in self._held() if value > 0]
            return not found

        holds(nothing, self.options.lease_seconds + LET_GO_WITHIN_S)
        return found

    def total(self, names: Sequence[str], metric: str, **labels: str) -> float:
        """What some nodes count, together. Raises httpx.HTTPError."""
        return sum(read(self.nodes[name].url).total(metric, **labels) for name in names)

    def snapshots(self) -> dict[str, Snapshot]:
        """What all of them count now, by name. Raises httpx.HTTPError."""
        read_off = {name: read(node.url) for name, node in self.nodes.items()}
        return read_off if self.proxy is None else {**read_off, "proxy": read(self.proxy.admin_url)}

    def _held(self) -> Iterator[tuple[str, str, float]]:
        for name, snapshot in self.snapshots().items():
            for metric in HELD_BY_THE_PROXY if name == "proxy" else HELD_BY_NODES:
                yield name, metric, snapshot.total(metric)

    def _start(self, launch: Launch) -> None:
        name = launch.spec.name
        self.starts[name] = self.starts.get(name, 0) + 1
        kept = {each: value for each, value in inherited().items() if each not in FORGOTTEN}
        variables = {**kept, "PYTHONUNBUFFERED": "1", **launch.environment}
        part = self.supervisor.start(f"{name}.{self.starts[name]}", launch.command, variables, ROOT)
        self.nodes[name] = Node(launch.spec, part)

    def _await_answers(self, names: Sequence[str]) -> None:
        await_ready(
            {f"{name} node": f"{node.url}/health" for name, node in self.nodes.items() if name in names},
            within=self.options.ready_seconds,
            still_alive=self.supervisor.require_all_alive,
            say=self.say,
        )


def _say_nothing(_line: str) -> None:
    """For a wait of which nobody needs to hear."""


def batches(launches: Sequence[Launch]) -> list[list[Launch]]:
    """Nodes that may start at once: no two on one GPU."""
    made: list[list[Launch]] = []
    for launch in launches:
        gpu = launch.environment.get("CUDA_VISIBLE_DEVICES", launch.spec.name)
        free = (each for each in made if gpu not in (one.environment.get("CUDA_VISIBLE_DEVICES") for one in each))
        batch = next(free, None)
        if batch is None:
            made.append([launch])
        else:
            batch.append(launch)
    return made


@contextmanager
def running_alone(options: Options, logs: Path, say: Say) -> Iterator[Fleet]:
    """While inside, one plain engine is up. Raises as `Fleet.start_nodes` does."""
    launch = alone(options)
    with Supervisor(logs) as supervisor:
        fleet = Fleet(supervisor, options, say, {launch.spec.name: launch})
        fleet.start_nodes()
        yield fleet


@contextmanager
def running_pair(options: Options, key: str, logs: Path, say: Say) -> Iterator[Fleet]:
    """While inside, prefill node, decode nodes and proxy are up; `key` signs tickets. Raises as `Fleet` does."""
    launches = {launch.spec.name: launch for launch in pair(options, key)}
    with Supervisor(logs) as supervisor:
        fleet = Fleet(supervisor, options, say, launches)
        fleet.start_nodes()
        fleet.start_proxy(proxy_settings(inherited(), options))
        yield fleet
