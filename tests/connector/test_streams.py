"""Streams with a journal, and streams that are continued from one, in vLLM's own API server on an engine core of ours.

Every shape is cut behind each of its records, in `make unit` behind every third one and the last. What the client then
has, the events of the first leg up to the cut and those of a second node, must be the stream that nobody cut, byte by
byte: ids and times too.
"""

from __future__ import annotations

import json

import pytest

from tests.connector.api_server import ApiServer, ticking
from tests.connector.stream_shapes import (
    CALL,
    CHAT,
    COMPLETIONS,
    MESSAGES,
    RESPONSES,
    TEXT,
    TOOL,
    Shape,
    ask,
    chat,
    completion,
    core_for,
    nameless,
    names,
    read,
    response,
    streamed,
)

USAGE = {"stream_options": {"include_usage": True}}
CONTINUOUS = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
THREE = (TEXT, "Another answer that is longer.", "Short.")
THINKING = "Let me think.|" + TEXT

SHAPES = {
    "completion": Shape(COMPLETIONS, completion()),
    "completion, usage": Shape(COMPLETIONS, completion(**USAGE)),
    "completion, length": Shape(COMPLETIONS, completion(max_tokens=7)),
    "completion, echo": Shape(COMPLETIONS, completion(echo=True)),
    "completion, n = 3": Shape(COMPLETIONS, completion(n=3, **USAGE), THREE),
    "completion, log-probabilities": Shape(COMPLETIONS, completion(logprobs=3)),
    "completion, token ids": Shape(COMPLETIONS, completion(return_token_ids=True)),
    "completion, as token ids": Shape(COMPLETIONS, completion(logprobs=0, return_tokens_as_token_ids=True)),
    "completion, several tokens a step": Shape(COMPLETIONS, completion(logprobs=2), steps=(2, 1, 4)),
    "completion, merged steps": Shape(COMPLETIONS, completion(), steps=(1, 3), merged=2),
    "completion, stop string": Shape(COMPLETIONS, completion(stop=["13? The"], min_tokens=2, **USAGE)),
    "completion, stop string shown": Shape(COMPLETIONS, completion(stop=["13?"], include_stop_str_in_output=True)),
    "completion, stop string in mid-step": Shape(COMPLETIONS, completion(stop=["and 1"], logprobs=1), steps=(5,)),
    "completion, stop token": Shape(COMPLETIONS, completion(stop_token_ids=[34])),
    "completion, letters in pieces": Shape(COMPLETIONS, completion(logprobs=1), ("Straße 東京 🙂 ok",)),
    "chat": Shape(CHAT, chat()),
    "chat, usage": Shape(CHAT, chat(**CONTINUOUS)),
    "chat, n = 3": Shape(CHAT, chat(n=3, logprobs=True, top_logprobs=2, **USAGE), THREE, merged=2),
    "chat, seeded n = 3": Shape(CHAT, chat(n=3, seed=7, temperature=1.0), THREE, steps=(3, 2)),
    "chat, every third token": Shape(CHAT, chat(stream_interval=3)),
    "chat, reasoning": Shape(CHAT, chat(**CONTINUOUS), (THINKING,), parsers=True),
    "chat, hidden reasoning": Shape(CHAT, chat(include_reasoning=False, **USAGE), (THINKING,), parsers=True),
    "chat, tool": Shape(
        CHAT, chat(tools=[{"type": "function", "function": TOOL}]), (f"So.|{CALL}",), (3, 2), parsers=True
    ),
    "messages": Shape(MESSAGES, chat()),
    "messages, stop string": Shape(MESSAGES, chat(stop_sequences=["13"])),
    "messages, reasoning and tool": Shape(
        MESSAGES,
        chat(tools=[{"name": "look", "input_schema": TOOL["parameters"]}]),
        (f"Let me see.|{CALL}",),
        (3, 2),
        parsers=True,
    ),
    "response": Shape(RESPONSES, response()),
    "response, reasoning": Shape(RESPONSES, response(), (THINKING,), parsers=True),
    "response, tool": Shape(
        RESPONSES, response(tools=[{"type": "function", **TOOL}]), (f"So.|{CALL}",), (3, 2), parsers=True
    ),
}


@pytest.fixture
def server(request: pytest.FixtureRequest, shape: Shape) -> ApiServer:
    found: ApiServer = request.getfixturevalue("parsing_server" if shape.parsers else "plain_server")
    return found


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every answer is of another second."""
    time = ticking(1_000_000)
    for module in ("completion", "chat_completion", "responses"):
        monkeypatch.setattr(f"vllm.entrypoints.openai.{module}.serving.time", time)


@pytest.mark.parametrize("apart", [3, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
async def test_a_stream_that_is_cut_anywhere_goes_on_as_if_it_had_not_been(
    server: ApiServer, shape: Shape, apart: int
) -> None:
    async with server.on(core_for(server, shape, cached=16)) as client:
        ordinary = (await client.post(shape.path, json={"model": "tiny", "stream": True, **shape.body})).text
        answer = await ask(client, shape)
        whole = read(answer.text)
        assert (answer.status_code, answer.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
        assert nameless(whole.all_events) == nameless(ordinary.split("\n\n")[:-1])
        assert len(whole.records) > 2
    for cut in sorted({*range(1, len(whole.records), apart), len(whole.records) - 1}):
        began = any(json.loads(record)[1] for record in whole.records[:cut])
        core = core_for(server, shape, cached=cut if began else 16)
        rest = await streamed(server, shape, whole.records[:cut], name=f"leg-{cut}", core=core)
        known = names(whole.records[:cut])
        behind = [event for part in whole.events[cut:] for event in part]
        assert nameless(rest.all_events, known) == nameless(behind, known), cut
        assert [json.loads(each)[:2] for each in rest.records] == [json.loads(each)[:2] for each in whole.records[cut:]]
        assert len(names(rest.records)) == len(names(whole.records[cut:]))
