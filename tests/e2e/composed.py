"""Run the services of compose.yaml's `cpu` profile as processes, by their own commands, environments and health checks.

Only addresses, ports and the paths of files in the images are replaced: containers would provide those.
"""

import functools
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import httpx

from deploy.local.client import body, pieces
from deploy.local.model.quiz import Quiz
from deploy.local.paths import VENV
from deploy.local.ports import HOST, free_ports
from deploy.local.readiness import await_ready
from deploy.local.stack import PROXY_UP_WITHIN_S
from deploy.local.supervise import Part, Supervisor
from deploy.local.wait_joined import all_joined
from tests.deploy.compose import Service, resolved
from tests.deploy.containers import Container, Moved, container, copied
from tests.deploy.dockerfile import FOLDER
from tests.e2e.conftest import REQUEST_TIMEOUT_S

NODES = ("cpu-prefill", "cpu-decode")
PROXY = "cpu-proxy"
TOKEN_FILE = "/access/admin.token"
BASE = {"PATH": "/usr/local/bin:/usr/bin:/bin"}
"""The environment of the base images."""
LOOK_EVERY_S = 1.0
LONG = 400
"""A limit above the length of any answer asked for."""


@dataclass(frozen=True)
class Running:
    """A started container."""

    container: Container
    part: Part


@dataclass(frozen=True)
class Composed:
    """The running services: URLs by service, the operators' URL of the proxy, the order of becoming healthy."""

    running: Mapping[str, Running]
    order: tuple[str, ...]
    urls: Mapping[str, str]
    admin_url: str


def start(supervisor: Supervisor, folder: Path, nodes: Path = VENV, proxy: Path = VENV) -> Composed:
    """Start all services as `docker compose up` does. `nodes`, `proxy`: the environments of the images.

    Raises PartEndedError, AssertionError.
    """
    services = resolved("cpu")
    ports = dict(zip((*NODES, PROXY, "operators"), free_ports(4), strict=True))
    containers = [
        _node(name, services, ports[name], {"/opt/pdproxy": str(nodes), "/tmp": str(folder)}) for name in NODES
    ]
    token = _make_token(services, folder)
    containers.append(_proxy(services, ports, {"/opt/pdproxy": str(proxy), TOKEN_FILE: str(folder / "admin.token")}))
    running = {one.name: Running(one, part) for one, part in _in_turn(supervisor, containers, folder)}
    order = tuple(_await_health(supervisor, [each.container for each in running.values()]))
    urls = {name: f"http://{HOST}:{ports[name]}" for name in (*NODES, PROXY)}
    composed = Composed(running, order, urls, f"http://{HOST}:{ports['operators']}")
    # The proxy is healthy while it lives: its nodes join a moment after they are healthy.
    joined = functools.partial(all_joined, token=token)
    url, alive = f"{composed.admin_url}/nodes", supervisor.require_all_alive
    await_ready({"proxy": url}, within=PROXY_UP_WITHIN_S, still_alive=alive, say=print, probe=joined)
    return composed


def _in_turn(supervisor: Supervisor, containers: list[Container], folder: Path) -> Iterator[tuple[Container, Part]]:
    """Start each service after those that it depends on, and once the ones it waits for are healthy."""
    waiting = list(containers)
    started: dict[str, Container] = {}
    while waiting:
        one = next((each for each in waiting if each.after <= started.keys()), None)
        assert one is not None, "they wait for each other"
        list(_await_health(supervisor, [started[name] for name in sorted(one.waits)]))
        waiting.remove(one)
        started[one.name] = one
        yield one, supervisor.start(one.name, one.command, one.environment, folder)


def healthy(one: Container) -> bool:
    """The result of the health check, now."""
    try:
        done = subprocess.run(one.health.command, env=one.environment, timeout=one.health.timeout, check=False)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


@contextmanager
def chat(composed: Composed, question: Quiz) -> Iterator[Iterator[str]]:
    """Ask the proxy: the pieces of an answer that both nodes worked on, as they come."""
    asked = body(question.messages(), LONG)
    with (
        httpx.Client(timeout=REQUEST_TIMEOUT_S, trust_env=False) as client,
        client.stream("POST", f"{composed.urls[PROXY]}/v1/chat/completions", json=asked) as response,
    ):
        assert response.status_code == 200, response.read()
        assert response.headers["x-pdproxy-route"].startswith("disaggregated; reason=")
        yield pieces(response.iter_lines())


def _node(name: str, services: Mapping[str, Service], port: int, places: Mapping[str, str]) -> Container:
    """A node. Its container's address and ports are replaced, for here all nodes share one network."""
    one = container(name, services[name], BASE)
    address = services[name]["networks"]["cpu"]["ipv4_address"]
    [side_channel] = free_ports(1)
    texts = {
        **copied(FOLDER / "cpu-node.Dockerfile"),
        **places,
        address: HOST,
        "8000": str(port),
        "5600": str(side_channel),
    }
    moved = Moved(texts).of(one)
    return replace(moved, command=(*moved.command, f"--host={HOST}"))


def _proxy(services: Mapping[str, Service], ports: Mapping[str, int], places: Mapping[str, str]) -> Container:
    """The proxy. Ports of this machine replace the published ones."""
    one = container(PROXY, services[PROXY], BASE)
    clients, operators = one.published.values()
    texts = {f"{name}:8000": f"{HOST}:{ports[name]}" for name in NODES}
    texts |= {"0.0.0.0": HOST, clients: str(ports[PROXY]), operators: str(ports["operators"]), **places}
    moved = Moved(texts).of(one)
    return replace(moved, environment={**moved.environment, "PDPROXY_LISTEN_PORT": str(ports[PROXY])})


def _make_token(services: Mapping[str, Service], folder: Path) -> str:
    """Run the container that makes the operators' token; returns the token."""
    _, *words = container("admin-token", services["admin-token"], BASE).command
    made = folder / "admin.token"
    subprocess.run([sys.executable, *(word.replace(TOKEN_FILE, str(made)) for word in words)], check=True)
    return made.read_text()


def _await_health(supervisor: Supervisor, containers: list[Container]) -> Iterator[str]:
    """Yield names as they become healthy. Checks may fail in the start period, then as often as `retries` says."""
    began = time.monotonic()
    waiting = list(containers)
    while waiting:
        supervisor.require_all_alive()
        for one in [each for each in waiting if healthy(each)]:
            waiting.remove(one)
            yield one.name
        late = [one.name for one in waiting if time.monotonic() - began > _patience(one)]
        assert not late, f"unhealthy: {late}"
        time.sleep(LOOK_EVERY_S)


def _patience(one: Container) -> float:
    check = one.health
    return check.start_period + check.retries * (check.interval + check.timeout)
