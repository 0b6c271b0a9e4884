"""One of each kind where no decode node can wait, or none shall; the whole tables are in `test_in_turn_whole`."""

import pytest

from pdproxy.request import Endpoint
from pdproxy.settings.types import Legs, OnPrefillFailure
from tests.fakes.faults import FaultKind, InjectedFault
from tests.fakes.node import FakeNode
from tests.orchestration import test_client_gone, test_matrix
from tests.orchestration.cluster import FakeCluster
from tests.orchestration.in_turn import in_turn
from tests.orchestration.prompts import body_for
from tests.orchestration.test_matrix import Cell

__all__ = ["in_turn"]

CHAT = Endpoint.CHAT


@pytest.mark.parametrize("all_faulty", [False, True], ids=["one", "all"])
@pytest.mark.parametrize("injected", test_matrix.PREFILL)
async def test_prefill_leg(injected: str, all_faulty: bool) -> None:
    for policy in OnPrefillFailure:
        await test_matrix.test_prefill_leg(Cell(injected, all_faulty, CHAT, stream=all_faulty, policy=policy))


@pytest.mark.parametrize("all_faulty", [False, True], ids=["one", "all"])
@pytest.mark.parametrize("injected", test_matrix.OPENING)
async def test_decode_leg(injected: str, all_faulty: bool) -> None:
    await test_matrix.test_decode_leg_before_its_first_event(Cell(injected, all_faulty, CHAT, stream=not all_faulty))


@pytest.mark.parametrize("ill", test_matrix.STREAMING)
async def test_decode_leg_in_the_middle(ill: FaultKind) -> None:
    await test_matrix.test_decode_leg_in_the_middle(CHAT, (ill, False), 3)


async def test_the_client_leaves() -> None:
    await test_client_gone.test_cancelled_at_every_await("stream", test_client_gone.everything_fails_first, 1)


@pytest.mark.parametrize("why", ["the node cannot wait", "the setting"])
async def test_the_decode_node_gets_the_request_with_its_ticket(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    legs = Legs.TOGETHER
    if why == "the setting":
        monkeypatch.setattr(FakeNode, "can_wait", True)
        legs = Legs.IN_TURN
    cluster = FakeCluster(legs=legs)
    cluster.prefills[0].fault = InjectedFault(FaultKind.RESET, times=1)
    assert (await cluster.ask(CHAT, body_for(CHAT, stream=True))).status == 200
    [leg] = cluster.decodes[0].legs() + cluster.decodes[1].legs()
    assert leg.body["kv_transfer_params"]["do_remote_prefill"]
    assert all(node.waiting.deliveries == [] for node in cluster.nodes)
    await cluster.settle()
