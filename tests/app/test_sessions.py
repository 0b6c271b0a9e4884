"""Conversations through the whole proxy with the policy `session`, in front of fake nodes on loopback."""

import contextlib
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from pdproxy.app.build import proxy
from pdproxy.app.host import HostEnvironment
from pdproxy.nodes import join
from pdproxy.observe.logs import TextFormatter
from pdproxy.settings.model import ConfiguredNode, Health, Keys, Policy, Settings
from pdproxy.settings.types import FirstHandOver, Role, Routing
from tests.app.running_proxy import bearer, listening, operator_of, plain_client, until, up
from tests.fakes.kv_transfer import FakeKvTransfer
from tests.fakes.loopback import LoopbackNode
from tests.fakes.node import FakeNode

SESSIONS = [f"secret-conversation-{number}" for number in range(8)]
TURNS = 6
Nodes = tuple[str, str]
"""The names of a prefill and of a decode node."""


@pytest.fixture(autouse=True)
def nodes_join_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake nodes have no cache whose size they could tell, for which a join waits."""
    monkeypatch.setattr(join, "MOST_EARLY_PREFLIGHTS", 1)


@dataclass
class Fleet:
    """A running proxy, its nodes by name, a client and an operator."""

    client: httpx.AsyncClient
    operator: httpx.AsyncClient
    nodes: dict[str, LoopbackNode]
    fabric: FakeKvTransfer
    stack: contextlib.AsyncExitStack
    history: dict[str, list[dict[str, str]]] = field(default_factory=dict)

    async def turn(self, session: str, **more: Any) -> Nodes:
        """One turn of a conversation; the two nodes that served it."""
        messages = self.history.setdefault(session, [])
        messages.append({"role": "user", "content": f"{session} turn {len(messages)}"})
        for each in self.nodes.values():
            each.node.seen.clear()
        body = {"model": "m", "messages": messages, "max_tokens": 4, "stream": True}
        asked = {"headers": {"x-session-affinity": session}, **more}
        answer = await self.client.post("/v1/chat/completions", json={**body, **asked.pop("json", {})}, **asked)
        assert answer.text.endswith("data: [DONE]\n\n")
        messages.append({"role": "assistant", "content": "an answer"})
        return self._served("prefill"), self._served("decode")

    def _served(self, role: str) -> str:
        """The one node of a role that this turn reached."""
        nodes = ((name, each.node) for name, each in self.nodes.items() if name.startswith(role))
        [name] = [name for name, node in nodes if any(leg.path.endswith("/v1/chat/completions") for leg in node.legs())]
        return name

    async def join(self, role: Role) -> str:
        """One more node of a role, that serves when this returns."""
        name = f"{role}-{sum(each.startswith(role) for each in self.nodes)}"
        self.nodes[name] = await self.stack.enter_async_context(LoopbackNode(FakeNode(name, self.fabric)))
        new = {"name": name, "url": self.nodes[name].url, "role": role.value, "model": "m"}
        assert (await self.operator.post("/nodes", json=new)).status_code == 201
        await until(self.operator, is_up(name))
        return name

    async def routed(self, role: Role, outcome: str) -> int:
        """The metric of legs by session."""
        text = (await self.operator.get("/metrics")).text
        wanted = f'pdproxy_session_routes_total{{outcome="{outcome}",role="{role}"}} '
        [line] = [line for line in text.splitlines() if line.startswith(wanted)]
        return int(float(line.removeprefix(wanted)))


def is_up(name: str) -> str:
    """The metric of a node that is named by its role."""
    return up(name, Role(name.partition("-")[0]))


@contextlib.asynccontextmanager
async def fleet(settings: Settings, key: str = "none") -> AsyncIterator[Fleet]:
    """Three prefill and three decode nodes."""
    async with contextlib.AsyncExitStack() as stack:
        fabric = FakeKvTransfer()
        nodes, configured = dict[str, LoopbackNode](), list[ConfiguredNode]()
        for role in Role:
            for index in range(3):
                name = f"{role}-{index}"
                nodes[name] = await stack.enter_async_context(LoopbackNode(FakeNode(name, fabric)))
                configured.append(ConfiguredNode(url=nodes[name].url, roles=(role,), model="m"))
        settings = settings.model_copy(update={"nodes": tuple(configured)})
        running = await stack.enter_async_context(proxy(settings, HostEnvironment()))
        url = await stack.enter_async_context(listening(running, settings))
        client = await stack.enter_async_context(plain_client(url, headers=bearer(key)))
        operator = await stack.enter_async_context(operator_of(running))
        await until(operator, '"ready"', path="/ready")
        await until(operator, *map(is_up, nodes))
        made = Fleet(client, operator, nodes, fabric, stack)
        yield made


QUICK = Health(interval=0.1, slow_start=0, first_hand_over=FirstHandOver.WARM_UP)
"""So that seven nodes join in a moment, and have equal shares however far apart they did."""
BY_SESSION = Settings(policy=Policy(routing=Routing.SESSION), health=QUICK)


async def test_six_turns_meet_the_same_nodes_though_another_joins() -> None:
    async with fleet(BY_SESSION) as made:
        homes = {session: await made.turn(session) for session in SESSIONS}
        assert len({prefill for prefill, _ in homes.values()}) == len({decode for _, decode in homes.values()}) == 3
        for session in SESSIONS:
            assert [await made.turn(session) for _ in range(TURNS // 2 - 1)] == [homes[session]] * (TURNS // 2 - 1)
        new = await made.join(Role.PREFILL), await made.join(Role.DECODE)
        moved = 0
        for session, home in homes.items():
            now = await made.turn(session)
            assert all(one in (before, joined) for one, before, joined in zip(now, home, new, strict=True))
            assert [await made.turn(session) for _ in range(TURNS // 2 - 1)] == [now] * (TURNS // 2 - 1)
            moved += now != home
        assert 0 < moved < len(SESSIONS), "the new nodes get their share, and no more"
        asked = len(SESSIONS) * TURNS
        assert [await made.routed(role, "own") for role in Role] == [asked, asked]


@contextlib.asynccontextmanager
async def another_proxy(made: Fleet, settings: Settings) -> AsyncIterator[httpx.AsyncClient]:
    """A second proxy in front of the same nodes, which knows nothing of the first; a client of it."""
    urls = {name: node.url for name, node in made.nodes.items()}
    nodes = tuple(
        ConfiguredNode(url=url, roles=(Role(name.partition("-")[0]),), model="m") for name, url in urls.items()
    )
    two = settings.model_copy(update={"nodes": nodes})
    async with (
        proxy(two, HostEnvironment()) as running,
        listening(running, two) as url,
        plain_client(url) as client,
        operator_of(running) as operator,
    ):
        await until(operator, *map(is_up, made.nodes))
        yield client


async def test_proxies_choose_alike_without_talking() -> None:
    """A conversation reaches the same nodes through any of several proxies."""
    async with fleet(BY_SESSION) as made, another_proxy(made, BY_SESSION) as other:
        homes: dict[str, Nodes] = {}
        for _ in range(4):
            made.client, other = other, made.client
            for session in SESSIONS:
                met = await made.turn(session)
                assert met == homes.setdefault(session, met)
        assert len({prefill for prefill, _ in homes.values()}) > 1


async def test_a_conversation_goes_on_elsewhere_when_its_nodes_die_and_stays_there() -> None:
    async with fleet(BY_SESSION) as made:
        home = await made.turn(SESSIONS[0])
        for place in range(2):
            await made.nodes[home[place]].kill()
            turns = [await made.turn(SESSIONS[0]) for _ in range(TURNS)]
            assert len(set(turns)) == 1
            assert turns[0][place] != home[place]
            assert turns[0][1 - place] == home[1 - place] or place == 1
            home = turns[0]


async def test_requests_without_a_key_take_turns() -> None:
    async with fleet(BY_SESSION) as made:
        met = [await made.turn("x", headers={}) for _ in range(TURNS)]
        assert len({prefill for prefill, _ in met}) == 3
        assert [await made.routed(role, "none") for role in Role] == [TURNS, TURNS]


async def test_by_what_is_cached_the_session_decides_where_nothing_else_does() -> None:
    settings, met = Settings(health=QUICK), set[Nodes]()
    for session in SESSIONS[:3]:
        async with fleet(settings) as made:
            met.add(await made.turn(session))
    assert len(met) > 1, "the first turn of any proxy would always meet the same nodes"


@pytest.mark.parametrize("field", ["user", "prompt_cache_key"])
async def test_the_body_names_a_session_too(field: str) -> None:
    async with fleet(BY_SESSION) as made:
        met = {(await made.turn("x", headers={}, json={field: "u"})) for _ in range(TURNS)}
        assert len(met) == 1


async def test_equal_keys_of_two_tenants_do_not_meet(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("sk-one alice\nsk-two bob\n")
    async with fleet(BY_SESSION.model_copy(update={"keys": Keys(file=path)}), "sk-one") as made:
        alices = [await made.turn(session) for session in SESSIONS]
        made.client.headers.update(bearer("sk-two"))
        assert [await made.turn(session) for session in SESSIONS] != alices


async def test_the_log_says_how_a_session_was_routed_and_never_its_key(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "pdproxy")
    async with fleet(BY_SESSION) as made:
        await made.turn(SESSIONS[0])
        exported = (await made.operator.get("/metrics")).text
    [line] = [vars(record) for record in caplog.records if record.name == "pdproxy.orchestration.access_log"][-1:]
    assert (line["prefill_session"], line["decode_session"]) == ("own", "own")
    logged = "\n".join(TextFormatter().format(record) for record in caplog.records)
    assert SESSIONS[0] not in logged + exported


async def test_by_load_a_session_is_not_looked_at() -> None:
    async with fleet(Settings(policy=Policy(routing=Routing.LEAST_LOADED), health=QUICK)) as made:
        met = [await made.turn(SESSIONS[0]) for _ in range(TURNS)]
        assert len({prefill for prefill, _ in met}) == 3
        assert await made.routed(Role.PREFILL, "own") == await made.routed(Role.PREFILL, "none") == 0
