"""A client's view of a stream, and of one that was asked for anew."""

import json

import pytest

from pdproxy.errors import Fault, NodeFault
from pdproxy.request import Endpoint, Shape
from pdproxy.stream.sse import event_of
from pdproxy.stream.transcript import Transcript
from pdproxy.usage import CacheUse
from tests.stream.engine import Engine, events, heard

CHUNKED = (Endpoint.COMPLETIONS, Endpoint.CHAT)


def transcript_of(engine: Engine, cache_use: CacheUse | None = None) -> Transcript:
    return Transcript(engine.endpoint, Shape(1, stream=True, wants_usage=engine.usage), cache_use)


def take_all(transcript: Transcript, stream: list[bytes]) -> bytes:
    return b"".join(transcript.take(event) for event in events(b"".join(stream)))


@pytest.mark.parametrize("ids", [False, True])
@pytest.mark.parametrize("endpoint", CHUNKED)
def test_an_unbroken_stream_is_what_its_node_sends(endpoint: Endpoint, ids: bool) -> None:
    engine = Engine(("a", "", "é", '{"token_ids":[1]}', "z"), endpoint=endpoint, ids=ids)
    transcript = transcript_of(engine)
    assert take_all(transcript, engine.stream()) == b"".join(engine.stream())
    assert (transcript.started, transcript.finished, transcript.ended) == (True, True, True)


def test_what_was_asked_anew_is_part_of_the_answer_that_began() -> None:
    """The client has the role, and the answer's name; it gets the second node's usage, with the true cached tokens."""
    engine = Engine(("a", "b"), endpoint=Endpoint.CHAT)
    transcript = transcript_of(engine)
    seen = take_all(transcript, engine.stream()[:1])
    assert not transcript.started
    transcript.restart()
    transcript.cache_use = CacheUse(2)
    seen += take_all(transcript, engine.stream("another"))
    assert heard(seen)[:2] == ("ab", "length")
    assert heard(seen)[2] == {
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    assert heard(seen)[3] == {"cmpl-one"}
    assert seen.count(b'"role"') == 1
    assert (transcript.finished, transcript.ended, transcript.finish_reasons) == (True, True, ["length"])


def test_the_ids_of_the_prompt_come_once_where_it_was_asked_anew() -> None:
    engine = Engine(("a", "b"), endpoint=Endpoint.CHAT, ids=True)
    transcript = transcript_of(engine)
    seen = take_all(transcript, engine.stream()[:1])
    transcript.restart()
    seen += take_all(transcript, engine.stream("another"))
    assert seen.count(b"[7,8,9]") == 1
    assert (seen.count(b"[100]"), seen.count(b"[101]")) == (1, 1)


@pytest.mark.parametrize("endpoint", CHUNKED)
def test_what_was_asked_anew_before_any_event_is_passed_on(endpoint: Endpoint) -> None:
    engine = Engine(("a", "b"), endpoint=endpoint)
    transcript = transcript_of(engine)
    transcript.restart()
    assert take_all(transcript, engine.stream("another")) == b"".join(engine.stream("another"))


def test_a_first_event_that_did_not_reach_the_client_gives_the_answer_no_name() -> None:
    engine = Engine(("a", "b"), endpoint=Endpoint.CHAT)
    transcript = transcript_of(engine)
    before = transcript.checkpoint()
    take_all(transcript, engine.stream()[:1])
    transcript.rollback(before)
    transcript.restart()
    assert take_all(transcript, engine.stream("another")) == b"".join(engine.stream("another"))


@pytest.mark.parametrize(
    "delta", [{"content": "a"}, {"reasoning": "hm"}, {"reasoning_content": "hm"}, {"tool_calls": [{}]}, {"role": "x"}]
)
def test_an_answer_has_started_once_there_is_more_than_its_role(delta: dict[str, object]) -> None:
    transcript = Transcript(Endpoint.CHAT, Shape(1, stream=True))
    payload = {"id": "1", "choices": [{"index": 0, "delta": delta}]}
    transcript.take(events(b"data: " + json.dumps(payload).encode() + b"\n\n")[0])
    assert transcript.started is ("role" not in delta)


@pytest.mark.parametrize(("usage", "known"), [(False, True), (True, False)])
def test_the_end_of_a_finished_stream_is_known_unless_usage_is_to_come(usage: bool, known: bool) -> None:
    engine = Engine(("a", "b"), usage=usage)
    transcript = transcript_of(engine)
    take_all(transcript, engine.stream()[:2])
    assert (transcript.finished, transcript.ended, transcript.ending_known) == (True, False, known)
    assert transcript.ending() == b"data: [DONE]\n\n"


@pytest.mark.parametrize("endpoint", CHUNKED)
def test_an_error_inside_a_stream_is_a_fault(endpoint: Endpoint) -> None:
    transcript = Transcript(endpoint, Shape(1, stream=True))
    (event,) = events(b'data: {"error": {"message": "boom", "code": 500}}\n\n')
    with pytest.raises(NodeFault) as caught:
        transcript.take(event)
    assert caught.value.fault is Fault.ERROR_EVENT
    assert caught.value.status == 500
    assert b"boom" in caught.value.body


def test_an_event_that_is_no_json_is_a_fault() -> None:
    transcript = Transcript(Endpoint.CHAT, Shape(1, stream=True))
    with pytest.raises(NodeFault) as caught:
        transcript.take(events(b"data: {oops\n\n")[0])
    assert caught.value.fault is Fault.INVALID_BODY


def test_comments_pass() -> None:
    transcript = Transcript(Endpoint.CHAT, Shape(1, stream=True))
    assert transcript.take(events(b": keep-alive\n\n")[0]) == b": keep-alive\n\n"
    assert not transcript.started


@pytest.mark.parametrize(
    ("endpoint", "last"),
    [(Endpoint.MESSAGES, b"message_stop"), (Endpoint.RESPONSES, b"response.completed")],
)
def test_of_other_endpoints_the_end_and_errors_are_noticed(endpoint: Endpoint, last: bytes) -> None:
    transcript = Transcript(endpoint, Shape(1, stream=True))
    raw = b'event: first\ndata: {"type":"first"}\n\n'
    assert transcript.take(events(raw)[0]) == raw
    assert (transcript.started, transcript.ended) == (True, False)
    transcript.take(events(b"event: " + last + b'\ndata: {"type":"last"}\n\n')[0])
    assert (transcript.started, transcript.ended) == (True, True)
    with pytest.raises(NodeFault):
        transcript.take(events(b'event: error\ndata: {"type":"error","error":{"message":"x"}}\n\n')[0])


def test_streamed_usage_has_the_prefill_nodes_cached_tokens() -> None:
    engine = Engine(("a", "b"))
    transcript = transcript_of(engine, cache_use=CacheUse(2))
    usage = heard(take_all(transcript, engine.stream()))[2]
    assert usage is not None
    assert usage["prompt_tokens_details"] == {"cached_tokens": 2}


CHAT_END = b'data: {"id":"x","choices":[{"index":0,"delta":{},"finish_reason":"length"}]}\n\n'
STOP_REASON = b'event: message_delta\ndata: {"type":"message_delta","delta":{"stop_reason":"end_turn"}}\n\n'
LAST_RESPONSE = b'event: response.incomplete\ndata: {"type":"response.incomplete","response":{}}\n\n'


@pytest.mark.parametrize(
    ("endpoint", "raw", "reason"),
    [
        (Endpoint.CHAT, CHAT_END, "length"),
        (Endpoint.MESSAGES, STOP_REASON, "end_turn"),
        (Endpoint.RESPONSES, LAST_RESPONSE, "incomplete"),
    ],
)
def test_why_an_answer_ended_is_kept_unless_its_last_events_did_not_count(
    endpoint: Endpoint, raw: bytes, reason: str
) -> None:
    transcript = Transcript(endpoint, Shape(1, stream=True))
    before = transcript.checkpoint()
    transcript.take(events(raw)[0])
    assert (transcript.finish_reasons, transcript.ended) == ([reason], endpoint is Endpoint.RESPONSES)
    transcript.rollback(before)
    assert (transcript.finish_reasons, transcript.finished, transcript.ended) == ([], False, False)


def event(text: str, name: str = "") -> bytes:
    head = f"event: {name}\n" if name else ""
    said = {"id": "c-1", "choices": [{"index": 0, "text": text, "finish_reason": None}]}
    return f"{head}data: {json.dumps(said, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()


PASSING = (event("a"), event('é "quoted": { \\'))
LOOKED_AT = (
    event("a") + event("b"),
    event("a")[:-1],
    event("a").replace(b"null", b'"stop"'),
    event("a").replace(b'"choices"', b'"usage":{},"choices"'),
    event("a").replace(b'"choices"', b'"kv_transfer_params":{},"choices"'),
    b'data: {"error":{}}\n\n',
    b"data: [DONE]\n\n",
    event("a", "some"),
    event("a").replace(b'"a"', b'"\r"'),
    event("a").replace(b'"a"', b'"\n"'),
    b": keep-alive\n\n",
)


def started(endpoint: Endpoint) -> Transcript:
    transcript = Transcript(endpoint, Shape(1, stream=True))
    transcript.take(event_of(event("x", "" if endpoint is Endpoint.COMPLETIONS else "some")))
    return transcript


@pytest.mark.parametrize("raw", PASSING, ids=repr)
def test_an_event_that_says_nothing_but_text_is_not_read(raw: bytes) -> None:
    transcript = started(Endpoint.COMPLETIONS)
    assert transcript.passes(raw)
    before = transcript.checkpoint()
    assert transcript.take(event_of(raw)) == raw
    assert transcript.checkpoint() == before, "so nothing was missed"


@pytest.mark.parametrize("raw", LOOKED_AT, ids=repr)
def test_any_other_is_looked_at(raw: bytes) -> None:
    assert not started(Endpoint.COMPLETIONS).passes(raw)


@pytest.mark.parametrize("endpoint", [Endpoint.MESSAGES, Endpoint.RESPONSES])
@pytest.mark.parametrize(
    ("name", "passes"),
    [
        ("content_block_delta", True),
        ("response.output_text.delta", True),
        ("message_delta", False),
        ("message_stop", False),
        ("response.completed", False),
        ("response.incomplete", False),
        ("response.failed", False),
        ("error", False),
    ],
)
def test_of_named_events_the_name_tells(endpoint: Endpoint, name: str, passes: bool) -> None:
    assert started(endpoint).passes(event("text", name)) is passes


def test_what_did_not_reach_the_client_is_forgotten() -> None:
    transcript = Transcript(Endpoint.COMPLETIONS, Shape(1, stream=True))
    before = transcript.checkpoint()
    for each in events(event("a").replace(b"null", b'"stop"') + b"data: [DONE]\n\n"):
        transcript.take(each)
    assert (transcript.started, transcript.finished, transcript.ended) == (True, True, True)
    transcript.rollback(before)
    assert (transcript.started, transcript.finished, transcript.ended) == (False, False, False)
