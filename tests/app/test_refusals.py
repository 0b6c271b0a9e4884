"""Refusals at the door: each has a line that says why, and is counted, and no flood of them fills the log."""

import logging
from pathlib import Path
from typing import Any

import pytest

from pdproxy.observe.rare_lines import MOST_LINES, WINDOW_SECONDS, LineBudget
from pdproxy.orchestration.orchestrator import Orchestrator
from pdproxy.settings.model import Keys, Limits, Settings
from tests.app.running_proxy import bearer, running_proxy
from tests.fakes.clock import FakeClock

LOG = "pdproxy.orchestration.access_log"
ASK: dict[str, Any] = {"json": {"model": "m", "prompt": "one two"}}
KEYS = """
sk-one one
sk-rated rated input_tokens_per_minute=1
"""
COMPLETIONS = "/v1/completions"
JSON = {"content-type": "application/json"}
CASES = {
    "no key": ("POST", COMPLETIONS, {**ASK, "headers": bearer("sk-wrong")}, 401, "invalid_api_key"),
    "no key for a list": ("GET", "/v1/models", {"headers": bearer("sk-wrong")}, 401, "invalid_api_key"),
    "no key for what is forwarded": ("POST", "/v1/embeddings", {**ASK, "headers": bearer("x")}, 401, "invalid_api_key"),
    "path": ("GET", "/nowhere%0Aoutcome=ok", {}, 404, "unknown_url"),
    "model": ("GET", "/v1/models/x", {}, 404, "model_not_found"),
    "method": ("PUT", COMPLETIONS, ASK, 405, "method_not_allowed"),
    "length": ("POST", COMPLETIONS, {"content": b"x" * 2000, "headers": JSON}, 413, "request_too_large"),
    "length of what is forwarded": (
        "POST",
        "/tokenize",
        {"content": b"x" * 2000, "headers": JSON},
        413,
        "request_too_large",
    ),
    "type": ("POST", COMPLETIONS, {"content": b"{}"}, 400, "unsupported_media_type"),
    "coding": (
        "POST",
        COMPLETIONS,
        {**ASK, "headers": {"content-encoding": "br"}},
        415,
        "unsupported_content_encoding",
    ),
    "JSON": ("POST", COMPLETIONS, {"content": b"{", "headers": JSON}, 400, "invalid_value"),
    "rate": ("POST", COMPLETIONS, {**ASK, "headers": bearer("sk-rated")}, 429, "rate_limit_exceeded"),
}


async def test_each_refusal_says_why_and_is_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "keys").write_text(KEYS)
    settings = Settings(keys=Keys(file=tmp_path / "keys"), limits=Limits(body_bytes=1024))
    async with running_proxy(settings, key="sk-one") as server:
        first = await server.client.post(COMPLETIONS, **ASK, headers=bearer("sk-rated"))
        assert first.status_code == 200, "of its rates, only the next one exceeds them"
        for name, (method, path, more, status, code) in CASES.items():
            caplog.clear()
            with caplog.at_level(logging.INFO, LOG):
                answer = await server.client.request(method, path, **more)
            assert answer.status_code == status, name
            (line,) = [vars(record) for record in caplog.records if record.name == LOG]
            assert (line["levelname"], line["status"], line["code"]) == ("INFO", status, code), name
            assert line["request_id"] == answer.headers["x-pdproxy-request-id"], name
            assert line["reason"] == answer.json()["error"]["message"], name
        page = (await server.operator.get("/metrics")).text
    refused = [line for line in page.splitlines() if line.startswith("pdproxy_requests_total{")]
    ended = {outcome: sum(float(line.split()[-1]) for line in refused if f'"{outcome}"' in line)
             for outcome in ("client_error", "rejected", "failed")}  # fmt: skip
    assert ended == {"client_error": len(CASES) - 1, "rejected": 1, "failed": 0}


def test_lines_beyond_a_bound_are_counted() -> None:
    clock = FakeClock()
    budget = LineBudget(clock)
    taken = [budget.next_line() for _ in range(MOST_LINES + 7)]
    assert taken == [0] * MOST_LINES + [None] * 7
    clock.advance(WINDOW_SECONDS)
    assert [budget.next_line(), budget.next_line()] == [7, 0]


async def test_a_request_that_the_proxy_itself_fails_on_tells_that_its_connection_closes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The server closes it after an exception: a client that is not told loses its next request."""

    async def fail(*_: object) -> None:
        raise RuntimeError("a bug")

    async with running_proxy(Settings()) as proxy:
        with monkeypatch.context() as patch:
            patch.setattr(Orchestrator, "answer", fail)
            failed = await proxy.client.post(COMPLETIONS, **ASK)
        assert (failed.status_code, failed.json()["error"]["code"]) == (500, "internal_error")
        assert failed.headers["connection"] == "close"
        assert (await proxy.client.post(COMPLETIONS, **ASK)).status_code == 200
