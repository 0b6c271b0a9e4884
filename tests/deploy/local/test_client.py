"""Asking a proxy: the answer as it streams, what the headers say of the way, and error messages."""

import json
import shlex
from collections.abc import Callable

import httpx
import pytest

from deploy.local.client import AnswerError, ask, curl_line

MESSAGES = [{"role": "user", "content": "it's a 482\n? a"}]
URL = "http://proxy"


def event(value: object) -> str:
    return f"data: {json.dumps(value)}\n\n"


def chunk(text: str | None) -> str:
    return event({"choices": [{"index": 0, "delta": {"content": text}}]})


def client(respond: Callable[[httpx.Request], httpx.Response]) -> httpx.Client:
    return httpx.Client(transport=httpx.MockTransport(respond))


def test_pieces_are_shown_and_put_together(capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[dict[str, object]] = []

    def respond(request: httpx.Request) -> httpx.Response:
        seen.append(json.loads(request.content))
        headers = {"Server-Timing": "plan;dur=1", "X-Pdproxy-Plan": "pd", "X-Other": "no"}
        usage = event({"choices": [], "usage": {"total_tokens": 3}})
        return httpx.Response(
            200, headers=headers, text=chunk(" 4") + chunk(None) + chunk("82") + usage + "data: [DONE]\n\n"
        )

    with client(respond) as asking:
        answer = ask(asking, URL, MESSAGES)
    assert answer.text == " 482"
    assert capsys.readouterr().out == " 482\n"
    assert answer.told() == ["server-timing: plan;dur=1", "x-pdproxy-plan: pd"]
    assert answer.first_token <= answer.whole
    assert (seen[0]["messages"], seen[0]["stream"]) == (MESSAGES, True)


def test_an_error_status_raises_with_the_proxys_message() -> None:
    with (
        client(lambda _: httpx.Response(503, text="no decode node")) as asking,
        pytest.raises(AnswerError, match="503: no decode node"),
    ):
        ask(asking, URL, MESSAGES)


def test_an_error_in_the_stream_raises_with_its_message() -> None:
    stream = chunk(" 4") + event({"error": {"message": "node went away"}})
    with (
        client(lambda _: httpx.Response(200, text=stream)) as asking,
        pytest.raises(AnswerError, match="node went away"),
    ):
        ask(asking, URL, MESSAGES)


def test_an_empty_answer_is_an_error() -> None:
    with (
        client(lambda _: httpx.Response(200, text="data: [DONE]\n\n")) as asking,
        pytest.raises(AnswerError, match="no text"),
    ):
        ask(asking, URL, MESSAGES)


def test_the_curl_line_survives_a_shell() -> None:
    words = shlex.split(curl_line(URL, MESSAGES))
    assert words[:3] == ["curl", "-N", f"{URL}/v1/chat/completions"]
    assert json.loads(words[-1])["messages"] == MESSAGES
