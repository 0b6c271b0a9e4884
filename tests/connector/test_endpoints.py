"""The route that brings tickets to a decode node, in an app as vLLM makes it, on an engine's client that records."""

from argparse import Namespace
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest
from fastapi import FastAPI
from vllm.plugins.endpoint_plugins.interface import EndpointPlugin

from connector.config import SECRET_VARIABLE
from connector.endpoints import MOST_BYTES, PROMPTS_ROUTE, ROUTE, TicketRoute, number_of_ranks
from connector.streams import PREFIX
from connector.tokenizer_files import TokenizerSource, chat_template_part
from deploy.local.paths import MODEL

ID = "wait-0123456789abcdef"
TICKET = {"do_remote_prefill": True, "remote_block_ids": [[1, 2], [3]]}


@dataclass
class Engine:
    """An engine's client: what it was told, per rank."""

    ranks: int = 1
    consumer: bool = True
    told: list[tuple[str, Any, int]] = field(default_factory=list)

    @property
    def vllm_config(self) -> Any:
        parallel = SimpleNamespace(data_parallel_size=self.ranks, data_parallel_size_local=1, local_engines_only=False)
        return SimpleNamespace(
            parallel_config=parallel,
            kv_transfer_config=SimpleNamespace(is_kv_consumer=self.consumer, kv_connector_extra_config={}),
            model_config=SimpleNamespace(tokenizer=str(MODEL), tokenizer_revision=None, tokenizer_mode="auto"),
            load_config=SimpleNamespace(download_dir=None),
        )

    async def notify_kv_transfer_request_rejected(
        self, request_id: str, kv_transfer_params: dict[str, Any], *, data_parallel_rank: int
    ) -> None:
        msgspec.msgpack.encode(kv_transfer_params)  # as vLLM sends it
        self.told.append((request_id, kv_transfer_params, data_parallel_rank))


async def client_of(engine: Any, **arguments: Any) -> httpx.AsyncClient:
    """A client of an API server with this engine and these arguments."""
    app, plugin = FastAPI(), TicketRoute()
    plugin.attach_router(app)
    await plugin.init_state(engine, app.state, Namespace(**arguments))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://node")


@pytest.fixture
def engine() -> Engine:
    return Engine(ranks=2)


@pytest.fixture
async def client(engine: Engine) -> AsyncIterator[httpx.AsyncClient]:
    async with await client_of(engine) as made:
        yield made


def test_vllm_takes_it_for_a_plugin() -> None:
    assert isinstance(TicketRoute(), EndpointPlugin)


@pytest.mark.parametrize("consumer", [True, False])
async def test_an_api_server_tells_which_chat_template_it_uses(consumer: bool) -> None:
    """Of both roles. Without arguments it is what the engine's fingerprint has."""
    own = chat_template_part(TokenizerSource(str(MODEL)))
    answers = []
    for arguments in ({}, {"chat_template": None}, {"chat_template": "{{ messages }}"}):
        async with await client_of(Engine(consumer=consumer), **arguments) as client:
            answers.append((await client.get(PROMPTS_ROUTE)).raise_for_status().json()["chat_template"])
    assert answers[:2] == [own, own]
    assert answers[2] != own


@pytest.mark.parametrize("secret", ["", "short"])
async def test_a_node_without_a_secret_delivers_and_has_no_streams(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, secret: str
) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, secret)
    async with await client_of(engine) as client:
        delivered = await client.post(ROUTE, json={"id": ID, "kv_transfer_params": None})
        streamed = await client.post(f"{PREFIX}/v1/completions", json={"prompt": "a", "stream": True})
    assert (delivered.status_code, streamed.status_code) == (202, 404)
    assert SECRET_VARIABLE in caplog.text


@pytest.mark.parametrize("ticket", [TICKET, None])
async def test_every_rank_is_told_under_a_name_of_its_own(
    engine: Engine, client: httpx.AsyncClient, ticket: dict[str, Any] | None
) -> None:
    answer = await client.post(ROUTE, json={"id": ID, "kv_transfer_params": ticket, "more": 1})
    assert (answer.status_code, answer.json()) == (202, {"id": ID})
    assert [params for _, params, _ in engine.told] == [{"pdproxy_deliver": {"id": ID, "ticket": ticket}}] * 2
    assert [rank for _, _, rank in engine.told] == [0, 1]
    assert len({name for name, _, _ in engine.told}) == 2


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"\xff",
        b"[" * 100_000,
        b"[]",
        b'{"kv_transfer_params": null}',
        b'{"id": "short", "kv_transfer_params": null}',
        b'{"id": 7, "kv_transfer_params": null}',
        b'{"id": "%s"}' % ID.encode(),
        b'{"id": "%s", "kv_transfer_params": []}' % ID.encode(),
        b'{"id": "%s", "kv_transfer_params": {"a": 1%s}}' % (ID.encode(), b"0" * 30),
        b'{"id": "%s", "kv_transfer_params": null}' % ID.encode() + b" " * MOST_BYTES,
    ],
    ids=range(12),
)
async def test_a_bad_body_is_refused_in_openai_s_shape(engine: Engine, client: httpx.AsyncClient, body: bytes) -> None:
    answer = await client.post(ROUTE, content=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["code"]) == (400, "BadRequestError", 400)
    assert error["message"]
    assert engine.told == []


@pytest.mark.parametrize("engine", [None, Engine(consumer=False)])
async def test_a_node_that_does_not_decode_has_no_such_route(engine: Any) -> None:
    async with await client_of(engine) as client:
        answer = await client.post(ROUTE, json={"id": ID, "kv_transfer_params": None})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, 404)


@pytest.mark.parametrize(("local_only", "ranks"), [(False, 8), (True, 2)])
def test_with_a_load_balancer_of_the_operator_s_an_api_server_drives_its_own_ranks(
    local_only: bool, ranks: int
) -> None:
    parallel: Any = SimpleNamespace(data_parallel_size=8, data_parallel_size_local=2, local_engines_only=local_only)
    config: Any = SimpleNamespace(parallel_config=parallel)
    assert number_of_ranks(config) == ranks
