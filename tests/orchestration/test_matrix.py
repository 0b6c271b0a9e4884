"""Fault by moment by endpoint, streamed or not: what the client got, what nodes saw, what was released and counted.

Everything happens in memory and on a fake clock: no cell can depend on the machine's speed. In `make test` are as many
cells as it takes for any two values to meet (`tests.tables`): every fault with every endpoint, with every place in the
stream and so on; where three things decide together, two of them are one axis. `make test-long` has all.
"""

import dataclasses
import itertools
from collections.abc import Callable

import pytest
from _pytest.mark import ParameterSet

from pdproxy.orchestration.context import OrchestrationConfig
from pdproxy.request import Endpoint
from pdproxy.settings.types import OnPrefillFailure
from tests.fakes.faults import FaultKind, InjectedFault
from tests.orchestration.answers import read_answer, text_of
from tests.orchestration.cluster import FakeCluster, Got
from tests.orchestration.prompts import body_for, prompt_ids, right
from tests.tables import spread

RETRY_AFTER = (("retry-after", "7"),)
OPENING = {
    "refused": InjectedFault(FaultKind.REFUSE),
    "reset-before-head": InjectedFault(FaultKind.RESET),
    "reset-after-head": InjectedFault(FaultKind.RESET, at=0),
    "hang": InjectedFault(FaultKind.HANG),
    "stall-after-head": InjectedFault(FaultKind.STALL, at=0),
    "400": InjectedFault(FaultKind.STATUS, status=400),
    "429": InjectedFault(FaultKind.STATUS, status=429, headers=RETRY_AFTER),
    "500": InjectedFault(FaultKind.STATUS, status=500),
    "503": InjectedFault(FaultKind.STATUS, status=503, headers=RETRY_AFTER),
    "garbage": InjectedFault(FaultKind.GARBAGE, at=0),
    "short": InjectedFault(FaultKind.SHORT, at=0),
    "aborted": InjectedFault(FaultKind.ABORT, at=0),
}
PREFILL = {**OPENING, "no-ticket": InjectedFault(FaultKind.NO_TICKET)}
ERRORS = {"refused": 503, "reset-before-head": 502, "reset-after-head": 502, "hang": 504, "stall-after-head": 504,
          "400": 400, "429": 429, "500": 500, "503": 503, "garbage": 502, "short": 502, "aborted": 503,
          "no-ticket": 502}  # fmt: skip
FAULTS = {"refused": "refused", "reset-before-head": "reset", "reset-after-head": "reset", "hang": "headers_timeout",
          "stall-after-head": "stall", "400": "client_error", "429": "busy", "500": "server_error", "503": "busy",
          "garbage": "invalid_body", "aborted": "aborted", "no-ticket": "no_ticket"}  # fmt: skip
UNCOUNTED = ("400", "429", "503", "no-ticket")
"""Faults that never count against a node."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """One cell of the matrix. ``all_faulty``: every node of the role has the fault, not only the first."""

    injected: str
    all_faulty: bool
    endpoint: Endpoint
    stream: bool
    policy: OnPrefillFailure = OnPrefillFailure.RETRY

    def __str__(self) -> str:
        scope = "all" if self.all_faulty else "one"
        return (
            f"{self.injected}-{scope}-{self.endpoint.name.lower()}-{'stream' if self.stream else 'whole'}-{self.policy}"
        )

    async def ask(self, cluster: FakeCluster) -> Got:
        return await cluster.ask(self.endpoint, body_for(self.endpoint, stream=self.stream))

    def check_right(self, got: Got) -> None:
        """The client got the right answer."""
        assert got.status == 200
        if not self.stream:
            assert text_of(self.endpoint, got.json()) == right(self.endpoint)
            return
        answer = read_answer(self.endpoint, got.body)
        assert (answer.texts[0], answer.error, answer.ended) == (right(self.endpoint), None, True)

    def check_error(self, got: Got, cluster: FakeCluster) -> None:
        """The client got the table's status, and no internal address."""
        assert got.status == ERRORS[self.injected]
        assert b"8000" not in got.body
        assert got.json()["error"]["message"]
        if self.injected in ("429", "503"):
            assert got.headers["retry-after"] == "7"
        outcome = "client_error" if self.injected == "400" else "failed"
        assert cluster.count("pdproxy_requests_total", endpoint=self.endpoint, outcome=outcome) == 1

    def fault(self, leg: str) -> str:
        if self.injected != "short":
            return FAULTS[self.injected]
        return "reset" if self.stream and leg == "decode" else "invalid_body"


SCOPES = (False, True)
"""`all_faulty`."""


def cells(table: list[ParameterSet], make: Callable[..., Cell]) -> list[ParameterSet]:
    """A cell of each row."""
    return [pytest.param(make(*row.values), marks=row.marks) for row in table]


def prefill_cells() -> list[ParameterSet]:
    """Scope and policy are one axis: with the fault they decide what follows."""
    table = spread(PREFILL, itertools.product(SCOPES, OnPrefillFailure), Endpoint, (False, True))
    return cells(table, lambda ill, how, endpoint, stream: Cell(ill, how[0], endpoint, stream, how[1]))


@pytest.mark.parametrize("cell", prefill_cells(), ids=str)
async def test_prefill_leg(cell: Cell) -> None:
    cluster = FakeCluster(config=OrchestrationConfig(on_prefill_failure=cell.policy))
    for node in cluster.prefills if cell.all_faulty else cluster.prefills[:1]:
        node.fault = PREFILL[cell.injected]
    got = await cell.ask(cluster)
    others = cell.policy is not OnPrefillFailure.LOCAL
    if cell.injected == "400":
        cell.check_error(got, cluster)
        assert [len(node.legs()) for node in cluster.nodes] == [1, 0, 0, 0]
    elif cell.all_faulty and cell.policy is OnPrefillFailure.FAIL:
        cell.check_error(got, cluster)
        assert [len(node.legs()) for node in cluster.decodes] == [0, 0]
    else:
        cell.check_right(got)
        local = cell.all_faulty or not others
        assert got.route == ("local" if local else "disaggregated")
        assert cluster.fabric.pulled == (0 if local else 1)
        assert sum(len(node.legs()) for node in cluster.decodes) == 1
    tried = 2 if cell.all_faulty and others and cell.injected != "400" else 1
    assert cluster.count("pdproxy_leg_faults_total", leg="prefill", fault=cell.fault("prefill")) == tried
    _check_counted(cell, cluster, "p0", served=got.status == 200)
    await cluster.settle()


@pytest.mark.parametrize("cell", cells(spread(OPENING, SCOPES, Endpoint, (False, True)), Cell), ids=str)
async def test_decode_leg_before_its_first_event(cell: Cell) -> None:
    cluster = FakeCluster()
    for node in cluster.decodes if cell.all_faulty else cluster.decodes[:1]:
        node.fault = OPENING[cell.injected]
    got = await cell.ask(cluster)
    if cell.injected == "400" or cell.all_faulty:
        cell.check_error(got, cluster)
    else:
        cell.check_right(got)
        assert got.route == "disaggregated"
        expired = cell.injected in ("hang", "stall-after-head")
        assert sum(len(node.legs()) for node in cluster.prefills) == (2 if expired else 1), (
            "a ticket serves while it can"
        )
    tried = 2 if cell.all_faulty and cell.injected != "400" else 1
    assert cluster.count("pdproxy_leg_faults_total", leg="decode", fault=cell.fault("decode")) == tried
    _check_counted(cell, cluster, "d0", served=got.status == 200)
    await cluster.settle()


def _check_counted(cell: Cell, cluster: FakeCluster, name: str, *, served: bool) -> None:
    """A refused connection counts, and what a request may have caused once another node has served it."""
    uncounted = cell.injected in UNCOUNTED or (cell.injected != "refused" and not served)
    assert (cluster.pool.view(name).reason == "") is uncounted


STREAMING = (
    FaultKind.RESET,
    FaultKind.STALL,
    FaultKind.ERROR_EVENT,
    FaultKind.ABORT,
    FaultKind.SHORT,
    FaultKind.GARBAGE,
)
CHUNKED = (Endpoint.COMPLETIONS, Endpoint.CHAT)


@pytest.mark.parametrize(
    ("endpoint", "how", "at"), spread(Endpoint, itertools.product(STREAMING, SCOPES), [1, 2, 3, 5, 8, 9]), ids=str
)
async def test_decode_leg_in_the_middle(endpoint: Endpoint, how: tuple[FaultKind, bool], at: int) -> None:
    cluster = FakeCluster()
    ill, all_faulty = how
    for node in cluster.decodes if all_faulty else cluster.decodes[:1]:
        node.fault = InjectedFault(ill, at=at)
    got = await cluster.ask(endpoint, body_for(endpoint, stream=True))
    answer = read_answer(endpoint, got.body)
    assert (got.status, answer.ended) == (200, True)
    assert right(endpoint).startswith(answer.texts.get(0, ""))
    if answer.error is None:
        assert answer.texts[0] == right(endpoint)
    else:
        assert all_faulty, "a stream with a journal goes on where a node is left"
    outcome = "ok" if answer.error is None else "failed"
    assert cluster.count("pdproxy_requests_total", endpoint=endpoint, outcome=outcome) == 1
    if endpoint in CHUNKED:
        assert len(answer.ids) == len(answer.created) == 1
        assert answer.roles == (1 if endpoint is Endpoint.CHAT else 0)
        assert answer.usage is None
    await cluster.settle()


@pytest.mark.parametrize(
    ("asked", "ill", "at"), spread(itertools.product(Endpoint, (1, 2)), STREAMING, [1, 2, 5]), ids=str
)
async def test_a_stream_without_a_journal_ends_in_an_error_event(
    asked: tuple[Endpoint, int], ill: FaultKind, at: int
) -> None:
    endpoint, choices = asked
    more = {"n": choices} if choices > 1 and endpoint in CHUNKED else {}
    cluster = FakeCluster(journaling=0)
    cluster.decodes[0].fault = InjectedFault(ill, at=at)
    answer = read_answer(endpoint, (await cluster.ask(endpoint, body_for(endpoint, stream=True, **more))).body)
    assert answer.ended
    if endpoint is Endpoint.CHAT and at <= more.get("n", 1):
        assert answer.error is None, "nothing but roles was out: asked anew"
    if answer.error is None:
        assert answer.texts[0] == right(endpoint)
        assert at < 5, "text was out"
    else:
        assert right(endpoint).startswith(answer.texts.get(0, ""))
        assert cluster.decodes[1].legs() == []
        assert cluster.count("pdproxy_steps_total", leg="decode", step="error_event") == 1
    await cluster.settle()


STOPS = ((), ("never",), ("x" * 12, "never"))


@pytest.mark.parametrize(("endpoint", "at", "burst", "stops"), spread(CHUNKED, range(1, 13), [1, 2, 3], STOPS), ids=str)
async def test_a_migrated_stream_is_exact(endpoint: Endpoint, at: int, burst: int, stops: tuple[str, ...]) -> None:
    """With text held back, characters torn between tokens, several tokens an event: nothing lost, nothing twice."""
    cluster = FakeCluster(burst=burst, decodes=3)
    cluster.decodes[0].fault = InjectedFault(FaultKind.RESET, at=at)
    cluster.decodes[1].fault = InjectedFault(FaultKind.STALL, at=2)
    more = {"stop": list(stops)} if stops else {}
    asked = body_for(endpoint, stream=True, tokens=24, stream_options={"include_usage": True}, **more)
    answer = read_answer(endpoint, (await cluster.ask(endpoint, asked)).body)
    assert (answer.texts[0], answer.finishes, answer.error, answer.ended) == (
        right(endpoint, 24, stops),
        {0: "length"},
        None,
        True,
    )
    assert answer.usage is not None
    assert answer.usage["completion_tokens"] == 24
    assert answer.usage["prompt_tokens"] == len(prompt_ids(endpoint))
    assert len(answer.ids) == 1
    await cluster.settle()


@pytest.mark.parametrize("at", range(1, 12))
@pytest.mark.parametrize("endpoint", CHUNKED)
async def test_a_stop_string_is_found_across_a_migration(endpoint: Endpoint, at: int) -> None:
    whole = right(endpoint, 24)
    stop = whole[len(whole) // 2 - 4 : len(whole) // 2 + 4]
    cluster = FakeCluster()
    cluster.decodes[0].fault = InjectedFault(FaultKind.RESET, at=at)
    asked = body_for(endpoint, stream=True, tokens=24, stop=stop)
    answer = read_answer(endpoint, (await cluster.ask(endpoint, asked)).body)
    assert (answer.texts[0], answer.finishes, answer.error) == (right(endpoint, 24, (stop,)), {0: "stop"}, None)
    await cluster.settle()
