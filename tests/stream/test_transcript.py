"""A broken stream is continued on another node, and the client sees one answer."""

import dataclasses
import itertools
import json
import random
from array import array

import msgspec
import pytest

from pdproxy.errors import Fault, NodeFault
from pdproxy.request import Addition, Continuation, Endpoint, LegForm, NotContinuableReason, Shape
from pdproxy.stream.choice_state import NotContinuable
from pdproxy.stream.transcript import Transcript
from tests.stream.engine import Engine, events, heard

CHUNKED = (Endpoint.COMPLETIONS, Endpoint.CHAT)
ASKED_USAGE = frozenset({Addition.USAGE})
ASKED_IDS = frozenset({Addition.TOKEN_IDS, Addition.USAGE})


def shape(engine: Engine, *, greedy: bool = True, asked: frozenset[Addition] = ASKED_USAGE) -> Shape:
    return Shape(1, stream=True, asked=asked, held_back=engine.held_back, greedy=greedy)


def take_all(transcript: Transcript, stream: list[bytes]) -> bytes:
    return b"".join(transcript.take(event) for event in events(b"".join(stream)))


def broken(engine: Engine, cuts: list[int], *, greedy: bool = True) -> bytes:
    """What the client gets when the stream breaks after ``cuts[0]`` events, its continuation after ``cuts[1]``, …"""
    transcript = Transcript(engine.endpoint, shape(engine, greedy=greedy))
    seen = b""
    produced = 0
    for number, cut in enumerate(cuts):
        seen += take_all(transcript, engine.stream(produced, f"node-{number}")[:cut])
        if transcript.finished:
            return seen if transcript.ended else seen + transcript.ending()
        if transcript.prompt_token_ids is None:
            transcript.restart()
            produced = 0
            continue
        produced = len(transcript.continuation().produced_token_ids)
        transcript.resume()
    return seen + take_all(transcript, engine.stream(produced, "last"))


def engines() -> list[Engine]:
    rng = random.Random(20261121)
    alphabet = ["", "a", "b", "ab", "é", "\n", "STOP", "ST", "OP", "long piece ", "😀", '\\"token_ids\\":[1]']
    made = []
    for endpoint, per_event, number in itertools.product(CHUNKED, (1, 3), range(12)):
        pieces = (*(rng.choice(alphabet) for _ in range(rng.randrange(2, 14))), "end")
        stops = [(), ("STOP",), ("\n", "ab"), ("never there",)][number % 4]
        made.append(Engine(pieces, stops=stops, endpoint=endpoint, per_event=per_event))
    return made


@pytest.mark.parametrize("engine", engines(), ids=lambda e: f"{e.endpoint.name}-{e.per_event}-{'/'.join(e.stops)}")
def test_the_client_sees_one_answer_wherever_the_stream_breaks(engine: Engine) -> None:
    text, count, finish = engine.answer()
    usage = {"prompt_tokens": 3, "completion_tokens": count, "total_tokens": 3 + count}
    length = len(engine.stream())
    for first, second in itertools.product(range(length), range(length)):
        seen = heard(broken(engine, [first, second]))
        assert seen[:3] == (text, finish, usage), (first, second)
        assert len(seen[3]) == 1


@pytest.mark.parametrize("engine", engines(), ids=str)
def test_sampled_streams_are_held_to_the_text_that_the_client_has(engine: Engine) -> None:
    text = engine.answer()[0]
    for cut in range(1, len(engine.stream()) - 2):
        transcript = Transcript(engine.endpoint, shape(engine, greedy=False))
        seen = heard(take_all(transcript, engine.stream()[:cut]))[0]
        if transcript.finished:
            continue
        going_on = transcript.continuation()
        assert transcript.choices[0].boundary()[1] == going_on.forced
        assert text.startswith(seen)
        assert seen.endswith(going_on.forced)
        settled = "".join(engine.pieces[: len(going_on.produced_token_ids)])
        assert settled + going_on.forced == seen


def test_a_sampled_stream_without_held_text_is_free() -> None:
    engine = Engine(("ab", "cd", "ef"))
    transcript = Transcript(engine.endpoint, shape(engine, greedy=False))
    take_all(transcript, engine.stream()[:2])
    assert transcript.continuation() == Continuation(array("I", (7, 8, 9)), (100, 101))


@pytest.mark.parametrize("endpoint", CHUNKED)
def test_an_unbroken_stream_is_what_the_client_would_have_got_without_us(endpoint: Endpoint) -> None:
    engine = Engine(("a", "", "é", '{"token_ids":[1]}', "z"), endpoint=endpoint)
    transcript = Transcript(endpoint, shape(engine))
    bare = b"".join(dataclasses.replace(engine, ids=False).stream())
    assert take_all(transcript, engine.stream()) == bare
    assert transcript.ended
    assert transcript.finished
    assert transcript.completion_tokens == 5


@pytest.mark.parametrize("endpoint", CHUNKED)
def test_token_ids_that_the_client_asked_for_stay_and_add_up(endpoint: Endpoint) -> None:
    engine = Engine(("a", "b", "c", "d"), endpoint=endpoint)
    transcript = Transcript(endpoint, shape(engine, asked=ASKED_IDS))
    seen = take_all(transcript, engine.stream()[:3])
    produced = len(transcript.continuation().produced_token_ids)
    transcript.resume()
    seen += take_all(transcript, engine.stream(produced))
    payloads = [json.loads(event.data) for event in events(seen) if event.data and event.data != b"[DONE]"]
    choices = [choice for payload in payloads for choice in payload["choices"]]
    assert [i for choice in choices for i in choice.get("token_ids") or []] == [100, 101, 102, 103]
    told = [holder.get("prompt_token_ids") for holder in (*payloads, *choices)]
    assert [ids for ids in told if ids] == [[7, 8, 9]]


def test_offsets_of_log_probabilities_count_on() -> None:
    engine = Engine(("x", "x", "x"), details=True)
    transcript = Transcript(engine.endpoint, shape(engine))
    take_all(transcript, engine.stream()[:2])
    transcript.resume()
    (event,) = events(transcript.take(events(engine.stream(2)[0])[0]))
    assert json.loads(event.data or b"")["choices"][0]["logprobs"]["text_offset"] == [1]


@pytest.mark.parametrize(
    ("engine", "own", "greedy", "reason"),
    [
        (Engine(("a", "b", "c"), ids=False), None, True, "no_token_ids"),
        (Engine(("a", "b", "c")), NotContinuableReason.PENALTIES, True, "penalties"),
        (Engine(("a", "", "b"), details=True), None, True, "token_details"),
    ],
)
def test_what_cannot_be_continued_has_a_reason(
    engine: Engine, own: NotContinuableReason | None, greedy: bool, reason: str
) -> None:
    request = msgspec.structs.replace(shape(engine, greedy=greedy), not_continuable=own)
    transcript = Transcript(engine.endpoint, request)
    take_all(transcript, engine.stream()[:2])
    with pytest.raises(NotContinuable) as caught:
        transcript.continuation()
    assert caught.value.reason == reason


@pytest.mark.parametrize(
    ("delta", "reason"), [({"reasoning": "hm"}, "reasoning"), ({"tool_calls": [{}]}, "tool_calls")]
)
def test_parsed_output_in_progress_cannot_be_continued(delta: dict[str, object], reason: str) -> None:
    transcript = Transcript(Endpoint.CHAT, Shape(1, stream=True))
    payload = {"id": "1", "choices": [{"index": 0, "delta": delta, "token_ids": [1]}], "prompt_token_ids": [7]}
    transcript.take(events(b"data: " + json.dumps(payload).encode() + b"\n\n")[0])
    assert transcript.started
    with pytest.raises(NotContinuable) as caught:
        transcript.continuation()
    assert caught.value.reason == reason


def test_a_continuation_that_says_something_else_is_noticed() -> None:
    engine = Engine(("abcdef", "ghi", "j"), stops=("xxx",))
    transcript = Transcript(engine.endpoint, shape(engine))
    take_all(transcript, engine.stream()[:1])
    assert len(transcript.choices[0].boundary()[1]) == 4
    transcript.resume()
    other = dataclasses.replace(engine, pieces=("abXdef", "ghi", "j"))
    with pytest.raises(NotContinuable, match="diverged"):
        take_all(transcript, other.stream())


def test_a_request_that_cannot_be_continued_is_repeated_while_nothing_was_sent() -> None:
    engine = Engine(("a", "b"), endpoint=Endpoint.CHAT, ids=False)
    request = Shape(1, stream=True, not_continuable=NotContinuableReason.TOOL_CALLS, asked=ASKED_USAGE)
    transcript = Transcript(engine.endpoint, request)
    seen = take_all(transcript, engine.stream()[:1])
    assert not transcript.started
    transcript.restart()
    seen += take_all(transcript, engine.stream(name="another"))
    assert heard(seen)[:2] == ("ab", "length")
    assert seen.count(b'"role"') == 1
    assert heard(seen)[3] == {"cmpl-one"}


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
    transcript = Transcript(endpoint, Shape(1, stream=True, not_continuable=NotContinuableReason.MESSAGES))
    raw = b'event: first\ndata: {"type":"first"}\n\n'
    assert transcript.take(events(raw)[0]) == raw
    assert (transcript.started, transcript.ended) == (True, False)
    transcript.take(events(b"event: " + last + b'\ndata: {"type":"last"}\n\n')[0])
    assert (transcript.started, transcript.ended) == (True, True)
    with pytest.raises(NodeFault):
        transcript.take(events(b'event: error\ndata: {"type":"error","error":{"message":"x"}}\n\n')[0])


def test_streamed_usage_has_the_prefill_nodes_cached_tokens() -> None:
    engine = Engine(("a", "b"))
    transcript = Transcript(engine.endpoint, shape(engine), cached_tokens=2)
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
    transcript = Transcript(endpoint, Shape(1, stream=True, not_continuable=NotContinuableReason.MESSAGES))
    before = transcript.checkpoint()
    transcript.take(events(raw)[0])
    assert (transcript.finish_reasons, transcript.ended) == ([reason], endpoint is Endpoint.RESPONSES)
    transcript.rollback(before)
    assert (transcript.finish_reasons, transcript.finished, transcript.ended) == ([], False, False)


def test_why_each_choice_ended_is_kept_where_token_ids_are_followed() -> None:
    engine = Engine(("a", "b"))
    transcript = Transcript(engine.endpoint, shape(engine))
    assert [heard(take_all(transcript, engine.stream()))[1]] == transcript.finish_reasons


@pytest.mark.parametrize("endpoint", CHUNKED)
def test_ids_that_the_client_asked_for_are_followed_only_where_the_stream_may_move(endpoint: Endpoint) -> None:
    engine = Engine(("a", " b", " c"), endpoint=endpoint)
    stream = engine.stream()
    for may_move in (True, False):
        transcript = Transcript(endpoint, shape(engine, asked=ASKED_IDS))
        transcript.begin_leg(LegForm(), may_move=may_move)
        assert take_all(transcript, stream) == b"".join(stream)
        assert (transcript.finished, transcript.ended) == (True, True)
        assert bool(transcript.completion_tokens) is may_move
