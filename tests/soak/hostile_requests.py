"""Requests that no client should send. Each must cost its sender alone."""

import dataclasses
import json
import random
from collections.abc import Callable, Mapping
from typing import Any

from pdproxy.request import Endpoint
from tests.orchestration.prompts import body_for
from tests.soak.hostile_nodes import POISONS, marked

JSON_TYPE = "application/json"


@dataclasses.dataclass(frozen=True, slots=True)
class Hostile:
    """One such request.

    Attributes:
        at_once: how many copies are sent together.
        leaves: seconds after which the client cuts its connection; None for one that reads to the end.
    """

    path: str
    body: bytes
    content_type: str = JSON_TYPE
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    at_once: int = 1
    leaves: float | None = None


def hostile(dice: random.Random, model: str) -> Hostile:
    """Any of the kinds below."""
    return dice.choice(KINDS)(dice, model)


def _poison(dice: random.Random, model: str) -> Hostile:
    """The node fails it, though it is healthy: a stream without its end, an unhandled 500, a reset, silence."""
    endpoint, stream = dice.choice(tuple(Endpoint)), dice.random() < 0.7
    body = {"model": model, **body_for(endpoint, stream=stream, user=marked(dice.choice(POISONS), dice.randint(-1, 4)))}
    return Hostile(endpoint, json.dumps(body).encode())


def _giant_name(dice: random.Random, model: str) -> Hostile:
    body = {**body_for(Endpoint.CHAT, stream=False), "model": dice.choice("xé\n") * 2_000_000}
    return Hostile(Endpoint.CHAT, json.dumps(body).encode())


def _giant_session(dice: random.Random, model: str) -> Hostile:
    body = {"model": model, **body_for(Endpoint.CHAT, stream=False, tokens=2, user=f"{dice.random()}" * 50_000)}
    return Hostile(Endpoint.CHAT, json.dumps(body).encode(), headers={"x-session-id": f"{dice.random()}" * 500})


def _nested(dice: random.Random, model: str) -> Hostile:
    """Empty lists, each of which is 56 bytes of memory and two of JSON, in a field that nobody looks at."""
    lists = b"[" + b",".join([b"[]"] * 400_000) + b"]"
    return Hostile(Endpoint.CHAT, b'{"model":"%b","messages":[],"x":%b}' % (model.encode(), lists))


def _deep(dice: random.Random, model: str) -> Hostile:
    depth = dice.choice((100, 2_000, 300_000))
    return Hostile(Endpoint.CHAT, b'{"model":"%b","messages":%b}' % (model.encode(), b"[" * depth + b"]" * depth))


def _no_json(dice: random.Random, model: str) -> Hostile:
    return Hostile(Endpoint.CHAT, dice.choice(NO_JSON))


def _odd_values(dice: random.Random, model: str) -> Hostile:
    body = {"model": model, **body_for(Endpoint.CHAT, stream=dice.random() < 0.5)}
    return Hostile(Endpoint.CHAT, json.dumps({**body, dice.choice(FIELDS): dice.choice(VALUES)}).encode())


def _forged_ticket(dice: random.Random, model: str) -> Hostile:
    params = {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": 1, "remote_block_ids": [[1], [2]]}
    body = {"model": model, **body_for(Endpoint.CHAT, stream=False), "kv_transfer_params": params}
    return Hostile(Endpoint.CHAT, json.dumps({**body, "vllm_xargs": {"kv_transfer_params": params}}).encode())


def _plain_text(dice: random.Random, model: str) -> Hostile:
    """As a web page may post it without asking first."""
    body = {"model": model, **body_for(Endpoint.CHAT, stream=False)}
    return Hostile(Endpoint.CHAT, json.dumps(body).encode(), "text/plain", {"origin": "http://page.example"})


def _crowd(dice: random.Random, model: str) -> Hostile:
    """More at once than may run and wait."""
    body = {"model": model, **body_for(Endpoint.COMPLETIONS, stream=True, tokens=20)}
    return Hostile(Endpoint.COMPLETIONS, json.dumps(body).encode(), at_once=60)


def _leaver(dice: random.Random, model: str) -> Hostile:
    body = {"model": model, **body_for(Endpoint.CHAT, stream=True, tokens=400)}
    return Hostile(Endpoint.CHAT, json.dumps(body).encode(), leaves=dice.uniform(0.0, 0.3))


KINDS: tuple[Callable[[random.Random, str], Hostile], ...] = (
    _poison,
    _poison,
    _poison,
    _giant_name,
    _giant_session,
    _nested,
    _deep,
    _no_json,
    _odd_values,
    _forged_ticket,
    _plain_text,
    _crowd,
    _leaver,
)
NO_JSON = (
    b"",
    b"{",
    b"null",
    b"[1]",
    b'{"model": NaN}',
    b'{"model":"m"',
    b"\xff\xfe{}",
    b'{"model":"\\ud800"}',
    b"\x00",
)
FIELDS = ("max_tokens", "n", "stream", "messages", "temperature", "stop", "stream_options", "priority", "user", "model")
VALUES: tuple[Any, ...] = (None, "", 0, -1, 1.5, 10**400, True, "true", [], {}, [[]], "\ud800", "x" * 100_000)
