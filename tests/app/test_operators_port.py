"""The two ports: attacks on a proxy that runs, bodies that are not declared as JSON, and what clients see of
operators' things.
"""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from pdproxy.admin.commands import HERE, Commands
from pdproxy.app.build import commands_of
from pdproxy.intake.routes import AUDIO, BODILESS, FORWARDED, GENERATING
from pdproxy.nodes.node import BOTH, Node, NodeView
from pdproxy.request import Endpoint
from pdproxy.settings.model import Keys, Listen, Settings, Upstream
from pdproxy.settings.types import MetricsPort
from tests.admin.attack import ASK, FORMS, Attack, got_through, on_clients, on_operators, send
from tests.app.running_proxy import RunningProxy, bearer, running_proxy
from tests.watch.process import serving

JSON = "application/json"
BODY = json.loads(ASK)
ON_SHARED_LOOP = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[RunningProxy]:
    """A proxy that lets everybody in."""
    async with running_proxy(Settings()) as made:
        yield made


async def test_no_attack_of_a_web_page_gets_through_and_the_start_says_what_is_open(tmp_path: Path) -> None:
    """127.1 is an address of this machine that the proxy does not know for one: it cannot tell who reaches it."""
    settings = {"listen": {"port": 0, "admin_port": 0, "admin_host": "127.1", "admin_names": ["proxy.example"]}}
    async with serving(tmp_path, {**settings, "nodes": [{"url": "http://127.0.0.1:9", "role": "decode"}]}) as process:
        port = int(process.operators.rpartition(":")[2])
        attacks = [(process.operators, each) for each in on_operators(port)]
        attacks += [(process.clients, each) for each in on_clients(["/v1/completions", "/tokenize"])]
        through = [attack for address, attack in attacks if got_through(send(address, attack))]
        assert through == []
        own = [
            send(process.operators, Attack("own", "GET", "/nodes", (f"host: {host}",)))
            for host in (f"127.0.0.1:{port}", "localhost", "[::1]:8081", "10.0.0.7", "Proxy.example:80")
        ]
        assert [answer.status for answer in own] == [200] * len(own)
        async with httpx.AsyncClient(base_url=process.operators, trust_env=False) as operator:
            refused = await operator.post("/nodes/decode-0/drain")
            counted = (await operator.get("/metrics")).text
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "admin_token_not_set")
    assert 'pdproxy_operator_refusals_total{reason="no_token_set"} 1.0' in counted
    [warning] = [line for line in process.log if "listen.admin_token_file is not set" in line]
    assert "level=warning" in warning
    refusals = [line for line in process.log if "refused requests" in line]
    assert len(refusals) == 3, "one line for each reason, of a hundred requests"


@pytest.mark.parametrize("path", [*GENERATING, *sorted(FORWARDED.keys() - AUDIO - BODILESS)])
@ON_SHARED_LOOP
async def test_a_body_that_is_not_declared_as_json_is_refused(shared: RunningProxy, path: str) -> None:
    for kind in FORMS:
        headers = {"content-type": kind} if kind else {}
        answer = await shared.client.post(path, content=ASK, headers=headers)
        assert answer.status_code == 400, kind
        shown = answer.json()
        assert shown["error"]["message"].startswith("Unsupported Media Type: Only 'application/json' is allowed")
        assert path != Endpoint.MESSAGES or shown["type"] == "error"
        assert path == Endpoint.MESSAGES or shown["error"]["code"] == "unsupported_media_type"
    assert not [seen for seen in shared.decode.seen if seen.path == path and seen.body.get("prompt") == BODY["prompt"]]


@pytest.mark.parametrize("kind", [JSON, "application/JSON; charset=utf-8"])
@ON_SHARED_LOOP
async def test_json_may_be_declared_with_a_charset(shared: RunningProxy, kind: str) -> None:
    for path in ("/v1/completions", "/v1/embeddings"):
        assert (await shared.client.post(path, content=ASK, headers={"content-type": kind})).status_code == 200


@pytest.mark.parametrize("path", sorted(AUDIO))
@ON_SHARED_LOOP
async def test_audio_is_sent_as_a_form_and_nothing_else_is(shared: RunningProxy, path: str) -> None:
    """No web page can be kept from posting it, where the proxy asks for no keys."""
    form = await shared.client.post(path, data={"model": "m"}, files={"file": b"sound"})
    assert form.status_code == 200
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        answer = await shared.client.post(path, content=b"x", headers={"content-type": kind} if kind else {})
        assert (answer.status_code, "multipart/form-data" in answer.text) == (400, True)


@ON_SHARED_LOOP
async def test_a_form_is_read_as_far_as_its_model_whatever_the_case_of_its_type(shared: RunningProxy) -> None:
    for name, status in (("m", 200), ("other", 404), ("", 200)):
        field = f'--B\r\nContent-Disposition: form-data; name="model"\r\n\r\n{name}\r\n' if name else ""
        form = f'--B\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nx\r\n{field}--B--\r\n'
        for kind in ("Multipart/Form-Data; Boundary=B", 'multipart/form-data ; charset=utf-8; boundary="B"'):
            answer = await shared.client.post(min(AUDIO), content=form, headers={"content-type": kind})
            assert answer.status_code == status, (name, kind)


async def test_a_key_comes_before_the_type_of_the_body(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("sk-one alice\n")
    async with running_proxy(Settings(keys=Keys(file=tmp_path / "keys")), "sk-two") as server:
        assert (await server.client.post("/v1/completions", content=ASK)).status_code == 401


OPERATORS_ALONE = ["/metrics", "/nodes", "/nodes/decode-0", "/ui", "/ui/state", "/prometheus/targets", "/may-leave"]


@ON_SHARED_LOOP
async def test_clients_see_of_operators_things_what_load_balancers_ask_for(shared: RunningProxy) -> None:
    for path in (*OPERATORS_ALONE, "/debug/plan"):
        assert (await shared.client.get(path)).status_code == 404, path
        assert (await shared.client.post(path, json={})).status_code == 404, path
    for path in ("/health", "/ready"):
        answer = await shared.client.get(path, headers={"host": "whatever.example"})
        assert (answer.status_code, list(answer.json())) == (200, ["status"])
    for path in OPERATORS_ALONE[:-1]:
        assert (await shared.operator.get(path)).status_code == 200, path
    said = (await shared.client.get("/metrics")).json()["error"]
    assert (said["code"], "listen.metrics: both" in said["message"]) == ("metrics_elsewhere", True)


async def test_metrics_are_at_the_clients_port_too_where_they_are_asked_for_and_need_a_key(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("sk-one alice\n")
    listen = Listen(metrics=MetricsPort.BOTH)
    async with running_proxy(Settings(listen=listen, keys=Keys(file=tmp_path / "keys")), "sk-one") as server:
        assert "pdproxy_node_up" in (await server.client.get("/metrics")).text
        assert (await server.client.head("/metrics")).status_code == 200
        assert (await server.client.post("/metrics")).status_code == 405
        server.client.headers.update(bearer("sk-two"))
        assert (await server.client.get("/metrics")).status_code == 401
        assert "pdproxy_node_up" in (await server.operator.get("/metrics")).text


async def test_the_pages_commands_carry_the_token_where_there_is_one(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("s3cret\n")
    async with running_proxy(Settings(listen=Listen(admin_token_file=token))) as server:
        (await server.operator.post("/nodes/decode-0/drain", headers=bearer("s3cret"))).raise_for_status()
        state = (await server.operator.get("/ui/state", headers=bearer("s3cret"))).json()
    header = f'-H "authorization: Bearer $(cat {token})"'
    assert state["incident"]["next"]["commands"] == [f"curl -sS -X POST {header} {HERE}/nodes/decode-0/rejoin"]


def test_the_pages_commands_ask_nodes_as_the_proxy_does(tmp_path: Path) -> None:
    credential = tmp_path / "credential"
    credential.write_text("word\n")
    upstream = Upstream(credential_file=credential, server_name="nodes.example")
    made = commands_of(Settings(upstream=upstream))
    node = NodeView(Node("n", "https://10.0.0.1:8000", BOTH))
    options = f"--upstream-credential-file {credential} --upstream-server-name nodes.example"
    assert made.check([node]) == f"pdproxy check --node https://10.0.0.1:8000 {options}"
    assert commands_of(Settings()) == Commands()
