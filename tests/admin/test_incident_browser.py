"""Incidents as an operator sees them: nodes die, freeze, are refused, cut off, drained and come back, in a browser."""

import asyncio
import re
from collections.abc import AsyncIterator

import pytest
from prometheus_client import CollectorRegistry

from pdproxy import __version__
from pdproxy.admin.context import AdminContext
from pdproxy.admin.next_step import DOCS, PAGE, PageSection
from pdproxy.background import Background
from pdproxy.errors import Fault
from pdproxy.failures import Step
from pdproxy.nodes.circuit_breaker import CircuitBreakerConfig
from pdproxy.nodes.drain import Drainer
from pdproxy.nodes.node import Role
from pdproxy.nodes.pool import Pool
from pdproxy.observe.labels import Leg, Outcome, Rejection
from pdproxy.orchestration.client_errors import final_error_of, rejected_error
from pdproxy.orchestration.in_flight import InFlightRequests, LegFailure
from pdproxy.orchestration.request_record import FailureRecord, RequestRecord
from pdproxy.request import Endpoint
from tests.admin.browser import CHROMIUM, Page, new_page, served
from tests.fakes.clock import FakeClock
from tests.nodes.fake_pool import FakeNodeInfo, FakePoolTransport
from tests.nodes.health import health_check, visit_all

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on this machine")

WIDTH, HEIGHT = 390, 844
"""CSS pixels of a phone."""
SLOWER = "Served, slower: decode nodes compute the prompts themselves."


class Fleet:
    """A prefill and two decode nodes on hosts of their own, watched by active health; time passes as the test says."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.live = InFlightRequests()
        self.pool = Pool(self.clock, CircuitBreakerConfig())
        self.drainer = Drainer(self.pool, self.clock, Background(self.clock))
        roles = {"p0": Role.PREFILL, "d0": Role.DECODE, "d1": Role.DECODE}
        self.transport = FakePoolTransport(**{name: FakeNodeInfo(role) for name, role in roles.items()})
        self.health = health_check(self.pool, self.transport, self.clock)
        for name in roles:
            self.pool.add(self.transport.node(name))

    def context(self) -> AdminContext:
        """The context that the page is served from."""
        return AdminContext(
            self.pool, self.drainer, CollectorRegistry(), asyncio.Event(), live=self.live, clock=self.clock
        )

    async def become(self, fault: Fault | None, *names: str, silent: bool = False) -> None:
        """From now on the exchanges of these nodes end like this; health finds out."""
        for name in names:
            self.transport.nodes[name].fault, self.transport.nodes[name].silent = fault, silent
        for _ in range(3):
            await visit_all(self.health, self.pool)

    def leg_failed(self, node: str, fault: Fault, outcome: Outcome = Outcome.OK) -> None:
        """A decode leg failed there, and its request ended."""
        now, ended = self.clock.now(), FailureRecord(outcome=outcome)
        step = Step.MIGRATE if outcome is Outcome.OK else Step.FAIL
        self.live.failed(LegFailure(now, "req-1", Leg.DECODE, node, fault, step, ended))
        request = RequestRecord("req-1", Endpoint.CHAT, Endpoint.CHAT, "tiny", "alice")
        self.live.recent.ended(request, now, outcome)


@pytest.fixture
async def fleet() -> Fleet:
    """All of it serves."""
    made = Fleet()
    await visit_all(made.health, made.pool)
    made.clock.advance(600)
    return made


@pytest.fixture(params=[None, (WIDTH, HEIGHT)], ids=["desk", "phone"])
async def page(fleet: Fleet, chromium_url: str, request: pytest.FixtureRequest) -> AsyncIterator[Page]:
    """The page, open before anything happens; on a phone nothing of it may be wider than the screen."""
    async with served(fleet.context()) as address, new_page(chromium_url) as shown:
        if request.param:
            await shown.become_phone(*request.param)
        await shown.show(f"{address}/ui")
        await shown.until("document.getElementById('content')?.hidden === false")
        yield shown
        assert not shown.complaints
        assert await shown.value("document.documentElement.scrollWidth <= window.innerWidth")


async def text(page: Page, name: str) -> str:
    return str(await page.value(f"document.getElementById('{name}').innerText.trim()"))


async def shows(page: Page, name: str, words: str) -> None:
    """Wait until an element begins with these words."""
    try:
        async with asyncio.timeout(30):
            await page.until(f"document.getElementById('{name}').textContent.startsWith({words!r})")
    except TimeoutError:
        assert (await text(page, name)).startswith(words)


async def findings(page: Page, name: str) -> list[str]:
    """The sentences of a list, each without its time of day, which must be there where it is known."""
    lines = await page.value(f"[...document.querySelectorAll('#{name} li')].map((each) => each.textContent)")
    assert all(re.match(r"\d\d:\d\d:\d\d \S|(20\d\d-\S+ \d\d:\d\d)? \S", line) for line in lines), lines
    return [re.sub(r"^\S* ", "", line) for line in lines]


async def next_step(page: Page) -> tuple[list[str], str]:
    """The commands, and the section of the documentation to which the link leads."""
    link = str(await page.value("document.getElementById('next-docs').href"))
    commands = await page.value("[...document.querySelectorAll('#next-commands code')].map((each) => each.textContent)")
    return commands, link.removeprefix(f"{DOCS}/{PAGE}#")


def processes(host: str) -> str:
    return f"ssh {host} \"ps -eo pid,stat,args | grep -i '[v]llm'\""


async def test_while_all_is_well(page: Page) -> None:
    assert await text(page, "cause") == "● nothing is wrong"
    assert await text(page, "loss") == "nothing"
    assert await page.value(
        "['next', 'what', 'earlier', 'now-title'].every((id) => document.getElementById(id).hidden)"
    )
    assert re.fullmatch(rf"{re.escape(__version__)} · \d\d:\d\d:\d\d UTC", await text(page, "version"))
    assert await text(page, "hand-overs") == (
        "● nothing keeps hand-overs from happening. No ticket was given in 5 minutes"
    )


async def test_times_of_day_are_utc_by_the_proxys_clock(page: Page, fleet: Fleet) -> None:
    await page.call("Emulation.setTimezoneOverride", timezoneId="Asia/Tokyo")
    await fleet.become(Fault.REFUSED, "d0")
    await shows(page, "cause", "✕ a node: d0")
    shown = await page.value("document.querySelector('#what time').textContent")
    now = await page.value("fetch('/ui/state').then((answer) => answer.json()).then((state) => state.at)")
    hours = (now % 86400) / 3600
    assert abs((int(shown[:2]) + int(shown[3:5]) / 60 - hours + 12) % 24 - 12) < 0.2


async def test_a_decode_node_is_killed_and_comes_back(page: Page, fleet: Fleet) -> None:
    fleet.leg_failed("d0", Fault.RESET)
    await shows(page, "cause", "◐ a node, and others took over: d0")
    assert await findings(page, "what") == ["On d0 1 leg failed in the last 30 s (reset); it still gets requests."]
    assert (await next_step(page))[1] == PageSection.LEGS_FAIL_ON_A_NODE
    await fleet.become(Fault.REFUSED, "d0")
    await shows(page, "cause", "✕ a node: d0")
    await shows(page, "loss", "Served, with less room: 1 of 2 decode nodes take requests as usual.")
    assert await findings(page, "what") == ["d0 has been down for 0 s (health: cannot be reached: injected)."]
    asked = ["curl -sS -i -m 5 http://d0/health", processes("d0")]
    assert await next_step(page) == (asked, PageSection.A_NODE_IS_DOWN)
    assert (await text(page, "hit")).endswith("1 leg failed, and others took over")
    assert await text(page, "hit-most") == "stream moved on: 1"
    fleet.clock.advance(20)
    await fleet.become(None, "d0")
    await shows(page, "cause", "● nothing is wrong any more")
    assert await text(page, "loss") == "nothing"
    why = "health: cannot be reached: injected"
    assert await findings(page, "earlier") == [f"d0 was out for 20 s ({why}), and 1 leg failed; it came back 0 s ago."]
    assert await page.value("document.getElementById('what').hidden")
    assert (await next_step(page))[0] == ["grep 'node d0 is' pdproxy.log"]
    assert "injected" not in await text(page, "nodes"), "a fault that is over is not why it is up"


async def test_both_decode_nodes_are_killed_and_it_is_not_us(page: Page, fleet: Fleet) -> None:
    await fleet.become(Fault.REFUSED, "d0")
    fleet.clock.advance(22)
    await fleet.become(Fault.REFUSED, "d1")
    fleet.leg_failed("d1", Fault.REFUSED, Outcome.FAILED)
    await shows(page, "cause", "✕ nodes: d0, d1")
    await shows(page, "hit", "1 of 1 requests in 5 minutes failed")
    assert await text(page, "loss") == "New requests get a 503: no decode node serves."
    assert (await findings(page, "what"))[0] == "This proxy serves nothing: no decode node serves."
    assert await text(page, "hit-most") == "key alice: 1; model tiny: 1; /v1/chat/completions: 1"


async def test_the_prefill_node_is_killed(page: Page, fleet: Fleet) -> None:
    await fleet.become(Fault.REFUSED, "p0")
    await shows(page, "loss", SLOWER)
    assert await text(page, "cause") == "✕ a node: p0"
    line = "✕ nothing is handed over: no prefill node serves. No ticket was given in 5 minutes"
    assert await text(page, "hand-overs") == line
    await shows(page, "ready", "◐ /ready: degraded")


async def test_the_prefill_node_freezes(page: Page, fleet: Fleet) -> None:
    await fleet.become(Fault.HEADERS_TIMEOUT, "p0", silent=True)
    await shows(page, "cause", "✕ a node: p0")
    assert await text(page, "loss") == SLOWER
    frozen = "p0 has been down for 0 s (health: cannot be reached: injected). Nothing comes back from it."
    assert await findings(page, "what") == [frozen]
    assert (await next_step(page))[1] == PageSection.A_NODE_IS_SILENT


async def test_the_network_is_cut(page: Page, fleet: Fleet) -> None:
    await fleet.become(Fault.REFUSED, "p0", "d0", "d1", silent=True)
    await shows(page, "cause", "✕ us: this proxy, its network or its settings")
    cut = (
        "Nothing comes back from any prefill or decode node, on several hosts: look at this proxy's own network first."
    )
    assert (await findings(page, "what"))[2] == cut
    assert await text(page, "loss") == "New requests get a 503: no decode node serves."
    section = PageSection.NOTHING_COMES_BACK_FROM_ANY_NODE
    assert await next_step(page) == (["curl -sS -i -m 5 http://p0/health"], section)


async def test_a_node_is_refused_for_a_setting(page: Page, fleet: Fleet) -> None:
    fleet.pool.refuse("d1", "mamba_cache_mode is 'all' there and 'align' on its partners: set it to 'align'")
    await shows(page, "cause", "✕ a node: d1")
    why = "mamba_cache_mode is 'all' there and 'align' on its partners: set it to 'align'"
    assert await findings(page, "what") == [f"d1 has been refused for 0 s ({why})."]
    check = "pdproxy check --prefill http://p0 --decode http://d0 --decode http://d1"
    assert await next_step(page) == ([check], PageSection.A_NODE_IS_REFUSED)


async def test_a_node_is_drained(page: Page, fleet: Fleet) -> None:
    fleet.pool.drain("d0")
    await shows(page, "loss", "Served, with less room: 1 of 2 decode nodes take requests as usual.")
    assert await text(page, "cause") == "● nothing is wrong; taken out on purpose: d0"
    runs = "No leg runs on it any more."
    assert await findings(page, "what") == [f"d0 has been draining for 0 s (drained by the operator). {runs}"]
    assert re.match(r"\d\d:\d\d:\d\d UTC", await text(page, "since"))
    (command,), section = await next_step(page)
    assert section == PageSection.A_NODE_GOES_AWAY
    fleet.pool.drain("d1")
    await shows(page, "cause", "✕ nodes: d0, d1")
    assert (await next_step(page)) == ([command], section)
    assert re.fullmatch(r"curl -sS -X POST http://127\.0\.0\.1:\d+/nodes/d0/rejoin", command)


async def test_requests_are_turned_away(page: Page, fleet: Fleet) -> None:
    request = RequestRecord("req-2", Endpoint.CHAT, Endpoint.CHAT, "tiny", "bob")
    request.failure.ended_with(final_error_of(rejected_error(Rejection.QUEUE_FULL, "Too many.", 1)))
    fleet.live.recent.ended(request, fleet.clock.now(), Outcome.REJECTED)
    await shows(page, "cause", "◐ neither: too much is asked")
    assert (await findings(page, "what"))[0].startswith("Requests were turned away: all nodes are full")
    assert await text(page, "loss") == "Most requests get a 429: 1 of 1 in 5 minutes. They may ask again."
    room = "0 run (limits.concurrency is 1,024), and 0 wait (limits.queue is 4,096)"
    assert (await findings(page, "what"))[1] == f"Of prompts, {room}."
    assert await text(page, "hit") == "1 of 1 requests in 5 minutes was turned away"
    assert (await next_step(page))[1] == PageSection.REQUESTS_ARE_TURNED_AWAY
    for _ in range(2):
        fleet.live.recent.ended(request, fleet.clock.now(), Outcome.REJECTED)
    failed = RequestRecord("req-3", Endpoint.CHAT, Endpoint.CHAT, "tiny", "bob")
    fleet.live.recent.ended(failed, fleet.clock.now(), Outcome.FAILED)
    await shows(page, "hit", "1 of 4 requests in 5 minutes failed, 3 were turned away")
    fleet.clock.advance(60)
    await shows(page, "cause", "● nothing is wrong any more")
    assert await findings(page, "earlier") == [
        "Requests failed: 1, the last one 60 s ago.",
        "Requests turned away: 3, the last one 60 s ago.",
    ]
