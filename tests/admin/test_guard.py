"""Which requests the operators' port takes, whatever they ask for."""

import asyncio
import logging
import re
from collections import Counter
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdproxy.admin.guard import (
    GuardedPort,
    KnownHosts,
    Receive,
    RefusalLog,
    Scope,
    Send,
    is_loopback,
    open_port_warning,
    send_answer,
)
from pdproxy.observe import rare_lines
from pdproxy.observe.labels import OperatorRefusal
from pdproxy.settings.model import Listen
from tests.admin.attack import on_operators

LISTEN = Listen(admin_names=("demo-admin.llm.svc", "Proxy.Example."))
KNOWN = [
    "127.0.0.1",
    "127.0.0.1:8081",
    "127.8.9.1",
    "localhost",
    "LocalHost:80",
    "localhost.",
    "localhost:",
    "[::1]",
    "[::1]:8081",
    "[fe80::1%eth0]:8081",
    "[fe80::1%25eth0]",
    "[::ffff:10.0.0.1]",
    "10.1.2.3:8081",  # a pod's address: the kubelet's probes, Prometheus
    "192.168.1.7",
    "0.0.0.0:8081",
    "10.0.0.1.",  # an address to browsers, which send it without the dot
    "demo-admin.llm.svc:8081",
    "DEMO-ADMIN.LLM.SVC",
    "proxy.example",
    "proxy.example.:8081",
]
UNKNOWN = [
    "",
    ":8081",
    ".",
    "evil.example",
    "evil.example:8081",
    "localhost.evil.example",
    "evil.localhost",
    "localhost..",
    "127.0.0.1.evil.example",
    "127.0.0.1.nip.io",
    "demo-admin",
    "demo-admin.llm.svc.cluster.local",
    "x.proxy.example",
    "127.1",
    "2130706433",
    "0x7f.0.0.1",
    "0177.0.0.1",
    "127.0.0.256",
    "::1",
    "[127.0.0.1]",
    "[evil.example]",
    "[::1",
    "[::1]x",
    "localhost:8081:8082",
    "localhost:x",
    "127.0.0.1@evil.example",
    "evil.example@127.0.0.1",
    "127.0.0.1, evil.example",
    "127.0.0.1 evil.example",
    "127%2e0%2e0%2e1",
    "http://127.0.0.1",
    "127.0.0.1/evil.example",
    "127\u00b70\u00b70\u00b71",
]


@pytest.mark.parametrize("host", KNOWN)
def test_addresses_and_the_names_of_the_settings_are_known(host: str) -> None:
    assert host in KnownHosts(LISTEN)


@pytest.mark.parametrize("host", UNKNOWN)
def test_other_names_and_what_is_no_host_are_not(host: str) -> None:
    assert host not in KnownHosts(LISTEN)


LABEL = st.from_regex(r"[a-z0-9_]([a-z0-9_-]{0,10}[a-z0-9_])?", fullmatch=True)


@given(st.lists(LABEL, min_size=1, max_size=6).map(".".join), st.sampled_from(["", ":80", ".:8081"]))
def test_no_name_that_dns_can_have_is_known_but_those_of_the_settings(name: str, after: str) -> None:
    """A browser takes a name whose last part is a number for an address, and looks up no such name."""
    if not re.fullmatch(r"[0-9]+", name.rpartition(".")[2]) and name not in ("localhost", "proxy.example"):
        assert name + after not in KnownHosts(LISTEN)


def test_the_address_that_is_listened_on_may_be_a_name() -> None:
    assert "Host7.internal:8081" in KnownHosts(Listen(admin_host="host7.internal"))


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True), ("127.3.2.1", True), ("::1", True), ("localhost", True), ("LOCALHOST", True),
        ("::ffff:127.0.0.1", True), ("0.0.0.0", False), ("::", False), ("10.0.0.1", False), ("proxy", False),
        ("::ffff:10.0.0.1", False), ("127.1", False),
    ],
)  # fmt: skip
def test_which_addresses_are_loopback(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback
    assert (open_port_warning(Listen(admin_host=host)) == "") is loopback


class Port:
    """The operators' port in memory, in front of an application that does what it is asked."""

    def __init__(self, listen: Listen = LISTEN) -> None:
        self.asked: list[tuple[str, str]] = []
        self.refused: Counter[OperatorRefusal] = Counter()
        self._app = GuardedPort(self._answer, listen, RefusalLog(self._count))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.asked.append((scope["method"], scope["path"]))
        await send_answer(send, 200, "text/plain", b"done")

    def _count(self, reason: OperatorRefusal) -> None:
        self.refused[reason] += 1

    async def ask(self, method: str, path: str, headers: list[tuple[str, str]]) -> httpx.Response:
        transport = httpx.ASGITransport(app=cast(Any, self._app))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8081") as client:
            request = client.build_request(method, path, headers=headers)
            if not any(name == "host" for name, _ in headers):
                del request.headers["host"]
            return await client.send(request)


async def test_whatever_a_page_sends_by_a_rebound_name_or_from_elsewhere_reaches_no_route() -> None:
    port, sent = Port(), 0
    for attack in on_operators(8081):
        if attack.target.startswith("/"):  # the server answers for the others
            headers = [(name, value) for name, _, value in (field.partition(": ") for field in attack.fields)]
            answer = await port.ask(attack.method, attack.target, headers)
            error = answer.json()["error"]
            assert (answer.status_code, set(error)) == (403, {"message", "type", "param", "code"}), attack
            sent += 1
    assert port.asked == []
    assert port.refused.total() == sent > 80
    assert "listen.admin_names" in (await port.ask("GET", "/nodes", [("host", "evil.example")])).text


HERE = ("host", "127.0.0.1:8081")
OWN = [
    [HERE],
    [HERE, ("origin", "http://127.0.0.1:8081")],
    [HERE, ("origin", "http://127.0.0.1:8081"), ("sec-fetch-site", "same-origin")],
    [HERE, ("sec-fetch-site", "none")],
    [("host", "demo-admin.llm.svc:8081"), ("origin", "https://admin.example"), ("sec-fetch-site", "same-origin")],
]
"""Headers of curl, of the page itself, of a person at the browser, of the page behind a proxy with another host."""


@pytest.mark.parametrize("headers", OWN, ids=range(len(OWN)))
@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "POST", "DELETE"])
async def test_operators_get_through(method: str, headers: list[tuple[str, str]]) -> None:
    port = Port()
    assert (await port.ask(method, "/nodes/d1/drain", headers)).status_code == 200
    assert port.asked == [(method, "/nodes/d1/drain")]


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
async def test_a_page_of_another_origin_may_link_to_the_live_page(site: str) -> None:
    """The page cannot read the answer that it gets: no answer here allows that (CORS)."""
    port = Port()
    assert (await port.ask("GET", "/ui", [HERE, ("sec-fetch-site", site)])).status_code == 200


async def test_where_other_machines_reach_the_port_nodes_change_by_a_token_alone(tmp_path: Path) -> None:
    open_to_all = Port(Listen(admin_host="0.0.0.0"))
    for method in ("POST", "DELETE", "PUT", "PATCH"):
        refused = await open_to_all.ask(method, "/nodes", [HERE])
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "admin_token_not_set")
        assert "listen.admin_token_file" in refused.text
    assert (await open_to_all.ask("GET", "/metrics", [("host", "10.0.0.5:8081")])).status_code == 200
    assert open_to_all.refused == {OperatorRefusal.NO_TOKEN_SET: 4}
    (tmp_path / "token").write_text("s3cret")
    with_token = Listen(admin_host="0.0.0.0", admin_token_file=tmp_path / "token")
    assert open_port_warning(with_token) == ""
    assert (await Port(with_token).ask("POST", "/nodes", [HERE])).status_code == 200  # `guarded` asks for the token


async def test_refusals_are_counted_each_and_logged_once_in_a_while(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.WARNING, "pdproxy.admin")
    monkeypatch.setattr(rare_lines, "PERIOD", 1.0)
    port = Port()
    for number in range(100):
        await port.ask("GET", "/nodes", [("host", f"evil{number}.example" + "x" * 1000)])
        await port.ask("POST", "/nodes", [HERE, ("origin", "null")])
    await port.ask("GET", "/nodes", [("host", "evil.example")])
    async with asyncio.timeout(20):
        while sum(vars(record)["times"] for record in caplog.records) < 201:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert len(caplog.records) < 20, "two at once, and two for each period"
    details = [vars(record)["detail"] for record in caplog.records]
    assert any("'evil.example'" in detail for detail in details)
    assert max(map(len, details)) < 500
    assert port.refused == {OperatorRefusal.UNKNOWN_HOST: 101, OperatorRefusal.FOREIGN_ORIGIN: 100}
