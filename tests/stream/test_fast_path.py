"""The fast path reads an event as the parser does, or leaves it to the parser."""

import json

import pytest

from pdproxy.request import Endpoint
from pdproxy.stream.chunks import EventFrame, fast_path
from tests.stream.engine import Engine, events

TEXTS = ["a", "", "é", "\n", '"', "\\", '","token_ids":[9]}]}', "😀", "\u2028", "\ud83d"]
HEAD = 'data: {"id":"1","object":"o","created":1,"model":"m","choices":[{"index":3,'
NULLS = '"logprobs":null,"finish_reason":null,'
COMPLETION = NULLS + '"stop_reason":null,"prompt_token_ids":null,"token_ids":[1,22]}]}\n\n'
CHAT = NULLS + '"token_ids":[1,22]}]}\n\n'


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("ascii_only", [True, False])
def test_the_fast_path_reads_what_a_parser_reads(text: str, ascii_only: bool) -> None:
    quoted = json.dumps(text, ensure_ascii=ascii_only).encode("utf-8", "ignore")
    expected = json.loads(quoted)
    for head, tail in ((b'"text":' + quoted, COMPLETION), (b'"delta":{"content":' + quoted + b"}", CHAT)):
        data = HEAD.encode() + head + b"," + tail.encode()
        said = fast_path(data)
        assert said is not None
        assert (said.choice, said.text, said.token_ids) == (3, expected, [1, 22])
        assert data[said.ids_from : said.ids_to] == b"[1,22]"


@pytest.mark.parametrize(
    "data",
    [
        HEAD + '"text":"a",' + COMPLETION.replace('"finish_reason":null', '"finish_reason":"stop"'),
        HEAD + '"text":"a",' + COMPLETION.replace('"logprobs":null', '"logprobs":{}'),
        HEAD + '"text":"a",' + COMPLETION.replace("[1,22]", "null"),
        HEAD + '"text":"a",' + COMPLETION[:-3] + ',"usage":{}}\n\n',
        HEAD + '"text":"a",' + COMPLETION.replace("[1,22]", "[1,,22]"),
        HEAD + '"text":"a",' + COMPLETION[:-1],
        HEAD + '"text":"a",' + COMPLETION + "\n",
        HEAD + '"text":"a",' + COMPLETION + HEAD + '"text":"b",' + COMPLETION,
        HEAD.replace('"1"', '"1\n"') + '"text":"a",' + COMPLETION,
        HEAD.replace("data: ", "data:") + '"text":"a",' + COMPLETION,
        HEAD + '"delta":{"content":"a","reasoning":"b"},' + CHAT,
        HEAD + '"delta":{"role":"assistant","content":""},' + CHAT,
        HEAD + '"text":"bad \\x escape",' + COMPLETION,
        HEAD + '"text":"control \n",' + COMPLETION,
        "{}",
    ],
)
def test_other_events_are_left_to_the_parser(data: str) -> None:
    assert fast_path(data.encode()) is None


def test_bad_utf8_is_left_to_the_parser() -> None:
    assert fast_path(HEAD.encode() + b'"text":"\xff",' + COMPLETION.encode()) is None


@pytest.mark.parametrize("endpoint", [Endpoint.COMPLETIONS, Endpoint.CHAT])
def test_the_fast_path_reads_the_engine_of_these_tests(endpoint: Endpoint) -> None:
    stream = Engine(("a", "b", "c"), endpoint=endpoint).stream()
    assert fast_path(events(stream[1])[0].raw) is not None


@pytest.mark.parametrize(("ids", "meant"), [("[]", []), ("[7]", [7]), ("[7,8,9]", [7, 8, 9])])
def test_the_fast_path_reads_any_number_of_token_ids(ids: str, meant: list[int]) -> None:
    data = (HEAD + '"text":"a",' + COMPLETION.replace("[1,22]", ids)).encode()
    said = fast_path(data)
    assert said is not None
    assert (said.token_ids, data[said.ids_from : said.ids_to]) == (meant, ids.encode())


FIRST = (HEAD + '"text":"a",' + COMPLETION.replace("[1,22]", "[7]")).encode()


def frame() -> EventFrame:
    read = fast_path(FIRST)
    assert read is not None
    return EventFrame.of(FIRST, read)


@pytest.mark.parametrize("ascii_only", [True, False])
@pytest.mark.parametrize("text", [*TEXTS, " two words", '"', "a\\"])
def test_a_frame_reads_what_the_pattern_reads_or_nothing(text: str, ascii_only: bool) -> None:
    quoted = json.dumps(text, ensure_ascii=ascii_only).encode("utf-8", "ignore")
    data = HEAD.encode() + b'"text":' + quoted + b"," + COMPLETION.replace("[1,22]", "[99]").encode()
    said, known = frame().read(data), fast_path(data)
    assert known is not None
    if said is None:
        assert b"\\" in quoted or not text.isprintable()
    else:
        assert said == (known.text, known.token_ids[0], known.text_to - 1)
        assert data[: said[2]] + frame().rest == data.replace(b"[99]", b"null")


@pytest.mark.parametrize(
    "data",
    [
        FIRST.replace(b'"1"', b'"2"'),
        FIRST.replace(b'"index":3', b'"index":4'),
        FIRST.replace(b"[7]", b"[7,8]"),
        FIRST.replace(b"[7]", b"[]"),
        FIRST.replace(b"[7]", b"[" + b"7" * 5000 + b"]"),
        FIRST.replace(b'"finish_reason":null', b'"finish_reason":"stop"'),
        FIRST.replace(b'"a"', b'"\xff"'),
        FIRST.replace(b'"a"', b'"a""'),
        FIRST[:-1],
        FIRST + b"\n",
        FIRST + FIRST,
        FIRST[: len(FIRST) // 2],
        b"",
    ],
)
def test_a_frame_leaves_other_events_alone(data: bytes) -> None:
    assert frame().read(FIRST) == ("a", 7, FIRST.index(b'"a"') + 2)
    assert frame().read(data) is None
