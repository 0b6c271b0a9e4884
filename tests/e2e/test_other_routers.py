"""Nodes with our connector behind other routers: hand-overs are read and verified (docs/other-parts.md)."""

import socket
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from deploy.bench.peers import BENCH_VENV, make_environment
from deploy.local.model.quiz import quiz
from deploy.local.node import SERVED_NAME
from deploy.local.ports import HOST, free_row
from tests.e2e.conftest import REQUEST_TIMEOUT_S, Pair
from tests.e2e.metrics_reader import watch

pytestmark = pytest.mark.e2e

Ask = Callable[[dict[str, Any]], dict[str, Any]]
QUESTIONS = 4
UP_WITHIN_S = 60.0


def post(url: str, body: dict[str, Any], name: str) -> dict[str, Any]:
    """Send a leg. Raises httpx.HTTPError."""
    headers = {"x-request-id": name}
    got = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=REQUEST_TIMEOUT_S, trust_env=False)
    found: dict[str, Any] = got.raise_for_status().json()
    return found


def as_llm_d(pair: Pair) -> Ask:
    """Both legs as llm-d's sidecar sends them (its NIXL v2 protocol): its fields, and one id for both."""

    def ask(body: dict[str, Any]) -> dict[str, Any]:
        name = str(uuid.uuid4())
        nothing = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
        wanted = {"do_remote_decode": True, "do_remote_prefill": False, **nothing}
        first = {**body, "max_tokens": 1, "max_completion_tokens": 1, "stream": False, "kv_transfer_params": wanted}
        given = post(pair.prefill.url, first, name)["kv_transfer_params"]
        return post(pair.decode.url, {**body, "kv_transfer_params": given}, name)

    return ask


@contextmanager
def vllm_router(pair: Pair) -> Iterator[Ask]:
    """vLLM's own router, as installed for `make bench`, with the command in docs/other-parts.md."""
    make_environment()
    port, metrics = free_row(2)
    line = [str(BENCH_VENV / "bin" / "vllm-router"), "--vllm-pd-disaggregation", "--kv-connector", "nixl"]
    line += ["--prefill", pair.prefill.url, "--decode", pair.decode.url, "--host", HOST, "--port", str(port)]
    line += ["--prometheus-port", str(metrics), "--worker-startup-check-interval", "1"]
    process = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + UP_WITHIN_S
        while time.monotonic() < until and not answers(port):
            time.sleep(0.2)
        yield lambda body: post(f"http://{HOST}:{port}", body, str(uuid.uuid4()))
    finally:
        process.kill()
        process.wait()


def answers(port: int) -> bool:
    with socket.socket() as asking:
        if asking.connect_ex((HOST, port)):
            return False
    return httpx.get(f"http://{HOST}:{port}/health", trust_env=False).status_code == 200


def check(ask: Ask, pair: Pair, seeds: range) -> None:
    """Every answer is right, and every prompt was read."""
    verified, ended = watch(pair.decode.url, "reads", outcome="verified"), watch(pair.decode.url, "reads")
    refused = watch(pair.decode.url, "refused")
    for seed in seeds:
        question = quiz(seed, 800)
        body = {"model": SERVED_NAME, "prompt": question.prompt(), "max_tokens": 8, "temperature": 0}
        assert ask(body)["choices"][0]["text"] == question.answer
    ended.reaches(len(seeds))
    assert (verified.grown(), refused.grown()) == (len(seeds), 0)


def test_behind_llm_d_s_sidecar(pair: Pair) -> None:
    check(as_llm_d(pair), pair, range(7200, 7200 + QUESTIONS))


@pytest.mark.long
def test_behind_vllm_s_router(pair: Pair) -> None:
    with vllm_router(pair) as ask:
        check(ask, pair, range(7300, 7300 + QUESTIONS))
