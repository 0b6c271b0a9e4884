"""Simulated nodes serve what proxies and followers of events ask for; a replay through no proxy counts as it should."""

import asyncio
import json
from collections.abc import AsyncIterator

import httpx
import msgspec
import pytest
import zmq
import zmq.asyncio

from deploy.bench.hybrid_cache import CacheShape
from deploy.bench.kv_events import Publisher, hash_ids
from deploy.bench.outcome import Outcome
from deploy.bench.replay import Replay
from deploy.bench.simulate import MODEL, Fleet
from deploy.bench.simulated_http import serving
from deploy.bench.simulated_nodes import Site, ids_of, text_of
from deploy.bench.traces import Request, Segment, Trace, token_ids
from deploy.local.ports import free_ports
from pdproxy.nodes.node_info import read_node_capacity

IDS = token_ids((Segment(1, 700),))
PROMPT = {"model": MODEL, "prompt": text_of(IDS), "max_tokens": 1}
PREFILL = {**PROMPT, "kv_transfer_params": {"do_remote_decode": True}}


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    fleet = Fleet(1, 1, CacheShape(blocks=20))
    made = Site(fleet, tuple(free_ports(2)), faster=1000.0)
    async with serving(made):
        yield made


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(trust_env=False) as made:
        yield made


async def counted(client: httpx.AsyncClient, url: str) -> dict[str, int]:
    answer: dict[str, int] = (await client.get(f"{url}/simulated")).json()
    return {key: answer[key] for key in ("prompts", "computed", "resumed", "moved")}


async def replayed(endpoint: str) -> AsyncIterator[bytes]:
    """All batches that a publisher has kept."""
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as asking:
        asking.linger = 0
        asking.connect(endpoint)
        await asking.send_multipart((b"", (0).to_bytes(8, "big")))
        while True:
            _, _, number, batch = await asyncio.wait_for(asking.recv_multipart(), 10)
            if number == (-1).to_bytes(8, "big", signed=True):
                return
            yield batch


async def test_a_ticket_brings_the_prompt_to_the_decode_node(site: Site, client: httpx.AsyncClient) -> None:
    prefill, decode = site.urls().values()
    answer = await client.post(f"{prefill}/v1/completions", json=PREFILL)
    ticket = answer.json()["kv_transfer_params"]
    body = {**PROMPT, "max_tokens": 12, "kv_transfer_params": ticket}
    text = (await client.post(f"{decode}/v1/completions", json=body)).json()["choices"][0]["text"]
    assert await counted(client, prefill) == {"prompts": 1, "computed": 700, "resumed": 0, "moved": 0}
    assert await counted(client, decode) == {"prompts": 0, "computed": 1, "resumed": 0, "moved": 699}
    streamed = await client.post(f"{prefill}/v1/completions", json={**PROMPT, "max_tokens": 12, "stream": True})
    events = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
    assert "".join(event["choices"][0]["text"] for event in events) == text
    assert streamed.text.endswith("data: [DONE]\n\n")


async def test_a_ticket_is_good_for_one_prompt_and_one_time(site: Site, client: httpx.AsyncClient) -> None:
    prefill, decode = site.urls().values()
    ticket = (await client.post(f"{prefill}/v1/completions", json=PREFILL)).json()["kv_transfer_params"]
    for _ in range(2):
        await client.post(f"{decode}/v1/completions", json={**PROMPT, "kv_transfer_params": ticket})
    assert (await counted(client, decode))["computed"] == 1 + 700


async def test_the_count_begins_anew_and_the_cache_does_not(site: Site, client: httpx.AsyncClient) -> None:
    prefill = site.urls()["prefill-0"]
    await client.post(f"{prefill}/v1/completions", json=PREFILL)
    await client.post(f"{prefill}/simulated")
    await client.post(f"{prefill}/v1/completions", json=PREFILL)
    assert await counted(client, prefill) == {"prompts": 1, "computed": 700 - 512, "resumed": 512, "moved": 0}


async def test_proxies_find_what_they_ask_for(site: Site, client: httpx.AsyncClient) -> None:
    url = site.urls()["prefill-0"]
    assert (await client.get(f"{url}/v1/models")).json()["data"][0]["id"] == MODEL
    assert (await client.get(f"{url}/version")).json() == {"version": "0.32.0"}
    assert (await client.post(f"{url}/tokenize", json={"prompt": text_of(IDS)})).json()["tokens"] == IDS
    chat = {"messages": [{"role": "user", "content": text_of(IDS)}]}
    assert (await client.post(f"{url}/tokenize", json=chat)).json()["tokens"] == IDS
    assert 'vllm:num_requests_running{model_name="m",engine="0"} 0.0' in (await client.get(f"{url}/metrics")).text
    assert (await client.get(f"{url}/nothing")).status_code == 404


async def test_no_proxy_holds_back_what_the_nodes_take_at_once(site: Site, client: httpx.AsyncClient) -> None:
    """They admit whatever comes: their caches bound what is kept, not what runs."""
    metrics = (await client.get(f"{site.urls()['decode-0']}/metrics")).content
    room, cache = read_node_capacity(metrics), site.fleet.shape.capacity
    assert room is not None
    assert room.part_taken(1000 * cache.tokens, 1000 * (cache.sequences or 1)) < 0.01
    assert (room.sequences is None) == (cache.sequences is None)


async def test_prefill_nodes_tell_what_their_caches_hold(site: Site, client: httpx.AsyncClient) -> None:
    """Plans price a place by how long blocks stay there, and by the agents that live there."""
    metrics = (await client.get(f"{site.urls()['prefill-0']}/metrics")).content
    assert read_node_capacity(metrics) == site.fleet.shape.capacity


async def test_events_go_out_as_vllm_sends_them_and_can_be_had_again(site: Site, client: httpx.AsyncClient) -> None:
    url = site.urls()["prefill-0"]
    source = (await client.get(f"{url}/kv_event_sources")).json()["0"]
    for prompt in (PREFILL, {**PREFILL, "prompt": text_of(token_ids((Segment(2, 4000),)))}):
        await client.post(f"{url}/v1/completions", json=prompt)
    batches = [msgspec.msgpack.decode(batch) async for batch in replayed(source["replay_endpoint"])]
    (_, first, rank), (_, second, _) = batches
    hashes = list(hash_ids(IDS, 256).hashes)
    attention = next(event for event in first if event["kv_cache_spec_kind"] == "full_attention")
    assert (attention["block_hashes"], attention["token_ids"], attention["group_idx"]) == (hashes, IDS[:512], 3)
    states = [event for event in first if event["kv_cache_spec_kind"] == "mamba"]
    assert [(event["group_idx"], event["block_hashes"]) for event in states] == [
        (group, hashes[1:]) for group in range(3)
    ]
    assert (attention["parent_block_hash"], attention["block_size"], rank) == (None, 256, 0)
    removed = [(event["group_idx"], event["block_hashes"][0]) for event in second if event["type"] == "BlockRemoved"]
    assert (3, hashes[1]) in removed


async def test_a_subscriber_gets_batches_with_their_numbers() -> None:
    publisher = Publisher()
    with zmq.asyncio.Context() as context, context.socket(zmq.SUB) as reading:
        reading.linger = 0
        reading.connect(publisher.source()["endpoint"])
        reading.subscribe(b"")
        got = asyncio.ensure_future(reading.recv_multipart())
        while not got.done():  # until the subscription has arrived
            await publisher.publish([{"type": "AllBlocksCleared"}])
            await asyncio.wait([got], timeout=0.01)
        topic, number, batch = got.result()
    await publisher.publish([])
    await publisher.close()
    assert topic == b""
    assert int.from_bytes(number, "big") >= 0
    assert msgspec.msgpack.decode(batch)[1:] == [[{"type": "AllBlocksCleared"}], 0]


async def test_a_replay_asks_all_and_counts_what_fails(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    requests = (Request(0.0, None, 1, (Segment(1, 300),), 3), Request(1.0, 0, 1, (Segment(1, 300), Segment(2, 9)), 3))
    outcome = Outcome("node", site.fleet.roles())
    await Replay(Trace("t", requests), site.urls()["decode-0"], site.faster, outcome).run()
    assert (outcome.tokens, len(outcome.first_tokens), outcome.failed) == (609, 2, 0)
    await Replay(Trace("t", requests), f"{site.urls()['decode-0']}/no", site.faster, outcome).run()
    assert (outcome.tokens, outcome.failed) == (609, 2)
    assert "status 404" in capsys.readouterr().err


def test_a_site_goes_over_the_command_line() -> None:
    site = Site(Fleet(1, 2, CacheShape(unit=16)), (1, 2, 3), 2.0)
    assert Site.from_json(site.to_json()) == site


@pytest.mark.parametrize("prompt", [text_of(IDS), [text_of(IDS)], IDS])
def test_a_prompt_comes_as_text_or_as_ids(prompt: object) -> None:
    assert ids_of(prompt) == IDS


def test_other_text_has_ids_too() -> None:
    assert len(ids_of("w1 what is this?")) == 4
