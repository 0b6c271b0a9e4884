"""The list of models: the nodes' own cards, and adapters that come and go while nodes run."""

import json
from typing import Any

from pdproxy.settings.model import Health, Settings
from tests.app.running_proxy import RunningProxy, running_proxy, until
from tests.fakes.node import JSON, Script

OFTEN = Settings(health=Health(interval=0.05))
BASE = {"id": "m", "object": "model", "created": 7, "owned_by": "vllm", "root": "/models/m", "parent": None}
ADAPTER = {"id": "poet", "object": "model", "created": 8, "owned_by": "vllm", "root": "/loras/poet", "parent": "m"}


def serve(proxy: RunningProxy, *cards: dict[str, Any]) -> None:
    """Have both nodes list these models."""
    for node in (proxy.prefill, proxy.decode):
        listed = json.dumps({"object": "list", "data": cards}).encode()
        node.forwarded["/v1/models"] = Script(200, JSON, (listed,))


async def test_cards_are_the_nodes_own() -> None:
    async with running_proxy(OFTEN) as proxy:
        card = {**BASE, "max_model_len": 4096, "of_a_later_vllm": [1]}
        serve(proxy, card)
        await until(proxy.client, "max_model_len", path="/v1/models")
        assert (await proxy.client.get("/v1/models")).json() == {"object": "list", "data": [card]}
        assert (await proxy.client.get("/v1/models/m")).json() == card


async def test_an_adapter_is_served_soon_after_a_node_has_it_and_no_more_once_it_is_gone() -> None:
    ask = {"model": "poet", "prompt": "one two", "max_tokens": 2}
    async with running_proxy(OFTEN) as proxy:
        serve(proxy, BASE)
        await until(proxy.client, "/models/m", path="/v1/models")
        assert (await proxy.client.post("/v1/completions", json=ask)).status_code == 404
        serve(proxy, BASE, ADAPTER)
        await until(proxy.client, "/loras/poet", path="/v1/models")
        assert (await proxy.client.get("/v1/models/poet")).json() == ADAPTER
        assert (await proxy.client.post("/v1/completions", json=ask)).status_code == 200
        serve(proxy, BASE)
        while "poet" in (await proxy.client.get("/v1/models")).text:
            pass
        assert (await proxy.client.post("/v1/completions", json=ask)).status_code == 404


async def test_a_list_that_cannot_be_read_changes_nothing() -> None:
    async with running_proxy(OFTEN) as proxy:
        serve(proxy, BASE, ADAPTER)
        await until(proxy.client, "/loras/poet", path="/v1/models")
        looks = len(proxy.decode.seen)
        for answer in (Script(500, JSON, (b"{}",)), Script(200, JSON, (b"[]",))):
            proxy.decode.forwarded["/v1/models"] = answer
            while len(proxy.decode.seen) < looks + 8:
                await proxy.client.get("/v1/models")
            looks = len(proxy.decode.seen)
            assert (await proxy.client.get("/v1/models/poet")).status_code == 200
