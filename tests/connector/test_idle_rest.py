"""When an engine rests, for how long, and what ends the rest."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from connector import idle_rest
from connector.idle_rest import LEASES_REST, LEFTOVERS_REST, IdleRest

pytestmark = pytest.mark.timeout(20)

LONG = 60.0


@dataclass
class Reads:
    """The known facts of an engine's reads."""

    under_way: bool = False
    has_pending_orders: bool = False


@dataclass
class Engine:
    """An engine's rest, with what it looks at. It keeps the blocks of one lease; a step is planned before the last
    one's output is processed."""

    batches: int = 2
    leases: list[str] = field(default_factory=lambda: ["l"])
    reads: Reads = field(default_factory=Reads)
    quarantine: list[str] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rest = IdleRest(self.batches, self.leases, self.reads, self.quarantine, self.paths)

    def step(self, *, computes: bool = False) -> float:
        """Plan a step, and end it; how many seconds its end took."""
        self.rest.on_step_planned(computes=computes)
        began = time.monotonic()
        self.rest.rest_if_idle()
        return time.monotonic() - began


def idle(engine: Engine) -> Engine:
    """The step whose output is processed next computes nothing."""
    assert engine.step() < LEASES_REST / 2
    return engine


@pytest.fixture
def long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rest that is taken outlasts the test."""
    monkeypatch.setattr(idle_rest, "LEASES_REST", LONG)
    monkeypatch.setattr(idle_rest, "LEFTOVERS_REST", LONG)


def test_it_rests_at_the_first_idle_step_where_one_ends_before_the_next_is_planned() -> None:
    assert Engine(batches=1).step() >= LEASES_REST


def test_it_rests_from_the_second_idle_step_on_while_blocks_are_kept_to_be_read() -> None:
    engine = idle(Engine())
    assert engine.step() >= LEASES_REST
    assert engine.step() >= LEASES_REST


def test_it_rests_longer_for_what_is_left_of_reads() -> None:
    assert idle(Engine(leases=[], quarantine=["n"])).step() >= LEFTOVERS_REST
    assert idle(Engine(leases=[], reads=Reads(has_pending_orders=True))).step() >= LEFTOVERS_REST


@pytest.mark.usefixtures("long")
def test_it_does_not_rest_where_nothing_is_kept() -> None:
    idle(Engine(leases=[])).step()


@pytest.mark.usefixtures("long")
def test_it_does_not_rest_where_that_delays_a_token() -> None:
    engine = idle(Engine())
    engine.step(computes=True)
    engine.step()


@pytest.mark.usefixtures("long")
def test_it_does_not_rest_while_a_read_is_under_way_nor_when_one_has_just_ended() -> None:
    engine = idle(Engine(reads=Reads(under_way=True)))
    engine.step()
    engine.reads.under_way = False
    engine.step()


@pytest.mark.usefixtures("long")
def test_it_does_not_rest_where_a_read_has_just_begun() -> None:
    engine = idle(Engine())
    engine.reads.under_way = True
    assert engine.step() < LEASES_REST / 2


@pytest.mark.usefixtures("long")
def test_what_arrives_ends_the_rest() -> None:
    engine = idle(Engine())
    timer = threading.Timer(0.05, engine.rest.interrupt)
    timer.start()
    engine.step()
    timer.join()


@pytest.mark.usefixtures("long")
def test_what_has_arrived_keeps_it_from_resting_once() -> None:
    engine = idle(Engine())
    engine.rest.interrupt()
    engine.step()
    timer = threading.Timer(0.05, engine.rest.interrupt)
    timer.start()
    assert engine.step() > 0.04
    timer.join()


def test_a_request_that_arrives_ends_the_rest_of_its_engine() -> None:
    pytest.importorskip("vllm")
    from connector.nixl_connector import wrap_preprocessing
    from tests.connector.harness import make_node

    class EngineCore:
        """The used part of vLLM's engine."""

        def __init__(self, scheduler: Any) -> None:
            self.scheduler = scheduler

        def preprocess_add_request(self, request: Any) -> tuple[Any, int]:
            return request, 3

    stock: Callable[..., Any] = EngineCore.preprocess_add_request
    wrap_preprocessing(EngineCore)
    wrapped = EngineCore.preprocess_add_request
    wrap_preprocessing(EngineCore)
    assert EngineCore.preprocess_add_request is wrapped is not stock
    node, plain = make_node("kv_consumer"), SimpleNamespace(get_kv_connector=lambda: None)
    assert EngineCore(node.scheduler).preprocess_add_request("r") == ("r", 3)
    assert node.side.rest._arrived.is_set()
    assert EngineCore(plain).preprocess_add_request("r") == ("r", 3)
