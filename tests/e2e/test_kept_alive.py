"""Kept connections that nodes close: uvicorn closes them after an unhandled 500, without announcing it."""

import secrets
import socket
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus

import httpx
import msgspec
import pytest

from deploy.local.model.quiz import quiz
from deploy.local.node import SERVED_NAME
from deploy.local.stack import Proxy
from tests.e2e.conftest import REQUEST_TIMEOUT_S, Pair
from tests.e2e.legs import TO_HAND_OVER, complete, hand_over, prefill, release
from tests.e2e.metrics_reader import watch

pytestmark = pytest.mark.e2e

TRIES = 20


def status_of_chat(client: httpx.Client, **more: object) -> int:
    """Ask the proxy for one token."""
    messages = [{"role": "user", "content": quiz(3100, 100).prompt()}]
    body = {"model": SERVED_NAME, "messages": messages, "max_tokens": 1, "temperature": 0, **more}
    return client.post("/v1/chat/completions", json=body).status_code


def test_who_asks_after_an_unhandled_500_is_answered(proxy: Proxy) -> None:
    with httpx.Client(base_url=proxy.url, timeout=REQUEST_TIMEOUT_S, trust_env=False) as client:
        for _ in range(TRIES):
            assert status_of_chat(client, structured_outputs=[-1]) >= HTTPStatus.BAD_REQUEST
            assert status_of_chat(client) == HTTPStatus.OK


def leg(prompt: str, name: str) -> bytes:
    """A prefill leg as bytes, with one request id for all copies, as the proxy sends them."""
    params = {**TO_HAND_OVER, "pdproxy_hand_over": name}
    body = msgspec.json.encode({"model": SERVED_NAME, "prompt": prompt, "max_tokens": 1, "kv_transfer_params": params})
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-request-id: {name}\r\ncontent-type: application/json\r\n"
    return head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body


def cut_off(pair: Pair, prompt: str, name: str) -> None:
    """Send a prefill leg and cut its connection before the answer."""
    with socket.create_connection(("127.0.0.1", pair.prefill.spec.port)) as connection:
        connection.sendall(leg(prompt, name))


def send_leg(pair: Pair, prompt: str, name: str) -> bytes:
    """Send a prefill leg and wait for the beginning of its answer."""
    with socket.create_connection(("127.0.0.1", pair.prefill.spec.port), REQUEST_TIMEOUT_S) as connection:
        connection.sendall(leg(prompt, name))
        return connection.recv(15)


def test_a_prefill_leg_that_was_sent_twice_is_answered_and_leaves_nothing(pair: Pair) -> None:
    """Both copies have one request id and one hand-over id; the engine gives each a request id of its own."""
    ended = watch(pair.prefill.url, "leases_ended", how="released")
    for at in range(4):
        question, name = quiz(3110 + at, 700), secrets.token_hex(16)
        cut_off(pair, question.prompt(), name)
        ticket = prefill(pair.prefill.url, question.prompt(), pdproxy_hand_over=name)
        assert complete(pair.decode.url, question.prompt(), params=ticket).text == question.answer
        release(pair.prefill.url, name)
    question, name = quiz(3120, 700), secrets.token_hex(16)
    with ThreadPoolExecutor(2) as threads:
        answers = list(threads.map(lambda _: send_leg(pair, question.prompt(), name), range(2)))
    assert answers == [b"HTTP/1.1 200 OK"] * 2
    release(pair.prefill.url, name)
    ended.reaches(2)
    hand_over(pair.prefill.url, pair.decode.url, quiz(3121, 300))
