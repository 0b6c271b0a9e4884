"""The node's own routes, in an app as vLLM makes it."""

from argparse import Namespace
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from vllm.plugins.endpoint_plugins.interface import EndpointPlugin

from connector.config import SECRET_VARIABLE
from connector.endpoints import PROMPTS_ROUTE, NodeRoutes
from connector.streams import PREFIX
from connector.tokenizer_files import TokenizerSource, chat_template_part
from deploy.local.paths import MODEL


@dataclass
class Engine:
    """An engine's client."""

    connector: bool = True

    @property
    def vllm_config(self) -> Any:
        return SimpleNamespace(
            kv_transfer_config=SimpleNamespace(kv_connector_extra_config={}) if self.connector else None,
            model_config=SimpleNamespace(tokenizer=str(MODEL), tokenizer_revision=None, tokenizer_mode="auto"),
            load_config=SimpleNamespace(download_dir=None),
        )


async def client_of(engine: Any, **arguments: Any) -> httpx.AsyncClient:
    """A client of an API server with this engine and these arguments."""
    app, plugin = FastAPI(), NodeRoutes()
    plugin.attach_router(app)
    await plugin.init_state(engine, app.state, Namespace(**arguments))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://node")


def test_vllm_takes_it_for_a_plugin() -> None:
    assert isinstance(NodeRoutes(), EndpointPlugin)


async def test_an_api_server_tells_which_chat_template_it_uses() -> None:
    """Without arguments it is what the engine's fingerprint has."""
    own = chat_template_part(TokenizerSource(str(MODEL)))
    answers = []
    for arguments in ({}, {"chat_template": None}, {"chat_template": "{{ messages }}"}):
        async with await client_of(Engine(), **arguments) as client:
            answers.append((await client.get(PROMPTS_ROUTE)).raise_for_status().json()["chat_template"])
    assert answers[:2] == [own, own]
    assert answers[2] != own


async def status_of_a_stream(engine: Engine | None) -> int:
    """The head of the answer to a stream that is asked for at the node's own route."""
    async with await client_of(engine) as client:
        return (await client.post(f"{PREFIX}/v1/completions", json={"prompt": "a", "stream": True})).status_code


@pytest.mark.parametrize("secret", ["", "short"])
async def test_a_node_without_a_secret_has_no_streams(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, secret: str
) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, secret)
    assert await status_of_a_stream(Engine()) == 404
    assert SECRET_VARIABLE in caplog.text


@pytest.mark.parametrize("engine", [None, Engine(connector=False)])
async def test_a_node_without_a_connector_has_no_streams(
    engine: Engine | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, "0123456789abcdef" * 4)
    assert await status_of_a_stream(engine) == 404
