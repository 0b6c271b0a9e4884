"""Streams of all shapes, and what a client got of one with its ids and times made equal."""

import re
from functools import cache
from typing import Any

from pdproxy.orchestration.context import OrchestrationConfig
from pdproxy.request import Endpoint
from tests.fakes.faults import InjectedFault
from tests.orchestration.cluster import FakeCluster
from tests.orchestration.prompts import body_for, right

CHAT, COMPLETIONS = Endpoint.CHAT, Endpoint.COMPLETIONS
TOKENS = 8
TOOL = {"type": "function", "function": {"name": "look", "parameters": {}}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
MEDIA = [{"role": "user", "content": [{"type": "text", "text": "one two three"}, IMAGE]}]
_FINGERPRINT = b',"system_fingerprint":"vllm-0.32.0-fake"'
_ODD = re.compile(rb'(cmpl-)\d+|("created":)\d+')


def _shape(endpoint: Endpoint, **more: Any) -> tuple[Endpoint, dict[str, Any]]:
    return endpoint, {**body_for(endpoint, stream=True, tokens=TOKENS), **more}


SHAPES: dict[str, tuple[Endpoint, dict[str, Any]]] = {
    "plain": _shape(COMPLETIONS),
    "usage": _shape(COMPLETIONS, stream_options={"include_usage": True}),
    "usage-always": _shape(CHAT, stream_options={"include_usage": True, "continuous_usage_stats": True}),
    "chat": _shape(CHAT),
    "hidden-reasoning": _shape(CHAT, include_reasoning=False),
    "tools": _shape(CHAT, tools=[TOOL]),
    "json": _shape(CHAT, response_format={"type": "json_object"}),
    "regex": _shape(COMPLETIONS, structured_outputs={"regex": "a+"}),
    "penalties": _shape(COMPLETIONS, presence_penalty=1.0),
    "seeded": _shape(COMPLETIONS, temperature=1.0, seed=7),
    "logprobs": _shape(CHAT, logprobs=True, top_logprobs=2),
    "choices": _shape(COMPLETIONS, n=3, stream_options={"include_usage": True}),
    "chat-choices": _shape(CHAT, n=2),
    "echo": _shape(COMPLETIONS, echo=True),
    "token-ids": _shape(CHAT, return_token_ids=True),
    "stop": _shape(COMPLETIONS, stop=[right(COMPLETIONS)[20:26]]),
    "stop-held": _shape(CHAT, stop=["never there, and long"]),
    "media": _shape(CHAT, messages=MEDIA),
    "messages": _shape(Endpoint.MESSAGES),
    "responses": _shape(Endpoint.RESPONSES),
}


def seen(body: bytes) -> bytes:
    """A stream whose ids and times are made equal; within it, they must be those of one answer.

    The fingerprint is left out: vLLM writes it into the last event, which a stream that is ended by the proxy lacks.
    """
    for found in (re.findall(rb"cmpl-\d+", body), re.findall(rb'"created":\d+', body)):
        assert len(set(found)) <= 1
    return _ODD.sub(rb"\1\g<2>0", body).replace(_FINGERPRINT, b"")


async def ask(cluster: FakeCluster, shape: str, **more: Any) -> bytes:
    """What the client gets; everything is given back."""
    endpoint, body = SHAPES[shape]
    got = await cluster.ask(endpoint, {**body, **more})
    assert got.status == 200
    await cluster.settle()
    return got.body


async def uncut(shape: str, burst: int = 1, **more: Any) -> bytes:
    """What the client gets of nodes that stay well, as `seen`; nothing is added for moves. It is asked for once."""
    known, key = _known(), (shape, burst, repr(more))
    if key not in known:
        cluster = FakeCluster(1, 1, config=OrchestrationConfig(migrations=0), burst=burst)
        known[key] = seen(await ask(cluster, shape, **more))
    return known[key]


@cache
def _known() -> dict[tuple[str, int, str], bytes]:
    """What `uncut` has got so far."""
    return {}


async def broken(shape: str, *faults: InjectedFault | None, **options: Any) -> tuple[bytes, FakeCluster]:
    """What the client gets where the first decode nodes have these faults, as `seen`; all can resume."""
    cluster = FakeCluster(**{"decodes": 3, "journaling": 3} | options)
    for node, fault in zip(cluster.decodes, faults, strict=False):
        node.fault = fault
    return seen(await ask(cluster, shape)), cluster
