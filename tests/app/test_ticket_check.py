"""Decode nodes whose tickets are of no use show in `pdproxy check`."""

import pytest

from pdproxy.app.check import inspect
from pdproxy.app.host import HostEnvironment
from pdproxy.app.ticket_check import in_vain
from pdproxy.settings.model import ConfiguredNode, Settings
from pdproxy.settings.types import Role
from tests.fakes import node as fake_node
from tests.fakes.kv_transfer import FakeKvTransfer
from tests.fakes.loopback import LoopbackNode
from tests.fakes.node import FakeNode

REFUSED = 'pdproxy_connector_refused_total{engine="0",reason="digest"} '
READS = 'pdproxy_connector_reads_total{engine="0",outcome="%s"} '


def metrics(refused: float, verified: float, not_held: float = 0.0) -> str:
    return f"{REFUSED}{refused}\n{READS % 'verified'}{verified}\n{READS % 'not_held'}{not_held}\n"


@pytest.mark.parametrize(
    ("refused", "verified", "not_held"), [(0, 0, 0), (49, 0, 0), (80, 20, 0), (0, 500, 0), (40, 10, 40)]
)
def test_a_node_that_uses_its_tickets_or_has_few_is_not_named(refused: int, verified: int, not_held: int) -> None:
    assert in_vain(metrics(refused, verified, not_held).encode()) == ""


def test_one_that_does_not_is_named_with_the_causes() -> None:
    assert in_vain(metrics(90, 5, 5).encode()) == (
        "95 of 100 since the node started were of no use (digest 90, not_held 5)"
    )
    assert in_vain(b"\xff not metrics\npdproxy_connector_refused_total{ what") == ""


async def test_check_shows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_node, "METRICS", fake_node.METRICS + metrics(60, 0))
    async with LoopbackNode(FakeNode("d", FakeKvTransfer())) as there:
        told = Settings(nodes=tuple(ConfiguredNode(url=there.url, roles=(role,)) for role in Role))
        report = await inspect(told, HostEnvironment())
    assert [line for line in report.caches if "tickets:" in line] == [
        "node-0: tickets: 60 of 60 since the node started were of no use (digest 60)"
    ]
