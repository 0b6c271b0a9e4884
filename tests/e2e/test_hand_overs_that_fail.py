"""Mistakes that prevent hand-overs between two hosts are reported everywhere within half a minute of the proxy's start.

Each case has two nodes in network namespaces and a proxy in front of them. `pdproxy check`, /ready, the page's state,
the log and the metric all report the cause and the change to make.
"""

import functools
import ipaddress
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from deploy.local.node import NodeSpec, Role
from deploy.local.paths import ROOT
from deploy.local.ports import HOST, free_row
from deploy.local.stack import await_nodes, logs_of
from deploy.local.supervise import Supervisor, inherited
from tests.e2e.networks import CONTROL, SIDE_CHANNEL_PORT, Network, can_make_networks
from tests.e2e.proxy_log import log_when

pytestmark = [
    pytest.mark.e2e, pytest.mark.own_engines, pytest.mark.timeout(600),
    pytest.mark.skipif(not can_make_networks(), reason="network namespaces need root"),
]  # fmt: skip

LONG = pytest.mark.long
WITHIN_S = 30.0
"""Seconds from the proxy's start."""


@dataclass(frozen=True)
class Case:
    """One mistake.

    Attributes:
        said: a pattern in the report.
        prefill, decode: more environment variables of the nodes.
        refused: it is found before the first hand-over.
        named: the proxy has host names for the nodes, not addresses.
        cut: the data network drops everything.
        closed: the decode node's questions to the side channel are dropped.
    """

    said: str
    prefill: dict[str, str] = field(default_factory=dict)
    decode: dict[str, str] = field(default_factory=dict)
    refused: bool = False
    named: bool = False
    cut: bool = False
    closed: bool = False


FORGOTTEN = {"VLLM_NIXL_SIDE_CHANNEL_HOST": HOST, "VLLM_HOST_IP": HOST}
CANNOT = rf"decode-0 cannot reach prefill-0 at {re.escape(HOST)}:{SIDE_CHANNEL_PORT}"
THERE = rf"prefill-0 at {re.escape(CONTROL)}\.2:{SIDE_CHANNEL_PORT}"
MINE, YOURS = ({"PDPROXY_TICKET_KEYS": letter * 32} for letter in "ab")
CASES = (
    pytest.param(Case(rf"{CANNOT} .*: set NODE_ADDRESS", FORGOTTEN, FORGOTTEN, refused=True), id="forgotten address"),
    pytest.param(Case(rf"{CANNOT}: set NODE_ADDRESS", FORGOTTEN, FORGOTTEN, named=True), id="and nodes by name"),
    pytest.param(
        Case(rf"decode-0 cannot reach {THERE} \(no answer .*firewall", closed=True), id="closed port", marks=LONG
    ),
    pytest.param(Case(rf"decode-0 reaches {THERE}, but .*UCX_NET_DEVICES", cut=True), id="cut network", marks=LONG),
    pytest.param(Case("give both the same .PDPROXY_TICKET_KEYS", MINE, YOURS), id="other keys", marks=LONG),
    pytest.param(Case("UCX_TLS", decode={"UCX_NET_DEVICES": "lo"}), id="no common transport", marks=LONG),
)


@dataclass(frozen=True)
class Asked:
    """A proxy before two nodes."""

    operators: httpx.Client
    settings: tuple[str, ...]
    log: Path

    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = self.operators.get("/ui/state").raise_for_status().json()
        return found


@contextmanager
def asked(supervisor: Supervisor, prefill: str, decode: str) -> Iterator[Asked]:
    clients, operators = free_row(2)
    settings = (f"--prefill={prefill}", f"--decode={decode}")
    line = [sys.executable, "-m", "pdproxy", "serve", *settings, f"--listen-port={clients}",
            f"--listen-admin-port={operators}"]  # fmt: skip
    part = supervisor.start("proxy", line, inherited() | {"NO_PROXY": "*"}, ROOT)
    try:
        with httpx.Client(base_url=f"http://{HOST}:{operators}", trust_env=False, timeout=10) as client:
            yield Asked(client, settings, part.log)
    finally:
        supervisor.stop(part)


@dataclass(frozen=True)
class Up:
    """Two nodes that answer, by their addresses."""

    supervisor: Supervisor
    urls: tuple[str, ...]


class Hosts:
    """The hosts of one case at a time. The next case uses them if its nodes are the same."""

    def __init__(self) -> None:
        self._entered = ExitStack()
        self._nodes: tuple[object, ...] = ()
        self._up: Up | None = None

    def of(self, case: Case) -> Up:
        """Both nodes with the case's mistakes."""
        nodes = (case.prefill, case.decode, case.cut, case.closed)
        if self._up is None or nodes != self._nodes:
            self.close()
            self._nodes, self._up = nodes, self._started(case)
        return self._up

    def close(self) -> None:
        """End the nodes and remove the network."""
        self._up = None
        self._entered.close()

    def _started(self, case: Case) -> Up:
        network = self._entered.enter_context(Network())
        supervisor = self._entered.enter_context(Supervisor(logs_of("e2e-no-hand-over")))
        give = network.start(supervisor, NodeSpec("prefill", Role.PREFILL, 0, 0, more_environment=case.prefill))
        take = network.start(supervisor, NodeSpec("decode", Role.DECODE, 0, 0, more_environment=case.decode))
        await_nodes(supervisor, [give, take], print)
        if case.cut:
            network.cut()
        if case.closed:
            network.close_side_channel()
        return Up(supervisor, (give.url, take.url))


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    hosts = Hosts()
    yield hosts
    hosts.close()


@pytest.mark.parametrize("case", CASES)
def test_it_is_said_everywhere(hosts: Hosts, case: Case) -> None:
    up = hosts.of(case)
    began = time.monotonic()
    with asked(up.supervisor, *(name(url) if case.named else url for url in up.urls)) as proxy:
        status, state = until_said(proxy, case.said, began)
        print(f"{time.monotonic() - began:.1f} s: {state['incident']['hand_overs']}")
        assert state["incident"]["hand_overs"].startswith("hand-overs fail: ")
        assert (status, state["incident"]["cause"]) == ("degraded", "hand_overs")
        assert "pdproxy_hand_overs_failing 1.0" in proxy.operators.get("/metrics").text
        log_when(proxy.log, functools.partial(re.search, case.said))
        assert time.monotonic() - began < WITHIN_S
        checked = subprocess.run(
            [sys.executable, "-m", "pdproxy", "check", *proxy.settings],
            cwd=ROOT, env=inherited() | {"NO_PROXY": "*"}, capture_output=True, text=True, check=False, timeout=120,
        )  # fmt: skip
        print(checked.stdout)
        assert checked.returncode == 1
        assert re.search(case.said, checked.stdout)
        assert ("refused" in checked.stdout) is case.refused


def name(url: str) -> str:
    """The same address as a decimal number, which only a resolver reads as one."""
    host = url.split("/")[2].partition(":")[0]
    return url.replace(host, str(int(ipaddress.IPv4Address(host))))


def until_said(proxy: Asked, said: str, began: float) -> tuple[str, dict[str, Any]]:
    """The contents of /ready and of the page once the proxy reports the mistake; until the known-answer test has ended
    it reports that this is under way."""
    while True:
        try:
            state = proxy.state()
            answer = proxy.operators.get("/ready").json()
            if re.search(said, state["incident"]["hand_overs"]):
                return answer["status"], state
        except (httpx.TransportError, json.JSONDecodeError):
            state = {"incident": {"hand_overs": "not up yet"}}
        assert time.monotonic() - began < 3 * WITHIN_S, state["incident"]["hand_overs"]
        time.sleep(0.2)
