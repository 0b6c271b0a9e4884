"""Answers and streams of several prompts merged into one."""

import json

from pdproxy.orchestration.fanout import StreamMerge, merge_answers
from pdproxy.request import Endpoint, Json, Shape
from pdproxy.stream.transcript import Transcript
from pdproxy.usage import sum_usage
from tests.stream.engine import Engine, events


def answer(name: str, texts: list[str], usage: Json) -> dict[str, object]:
    choices = [{"index": index, "text": text} for index, text in enumerate(texts)]
    return {"id": name, "choices": choices, "usage": usage, "metrics": {"ttft": 1}}


def test_choices_count_through_and_usage_adds_up() -> None:
    usage = {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5, "prompt_tokens_details": None}
    cached = {**usage, "prompt_tokens_details": {"cached_tokens": 1}}
    merged = merge_answers([answer("a", ["x", "y"], usage), answer("b", ["z", "w"], cached)])
    assert merged["id"] == "a"
    assert merged["choices"] == [{"index": i, "text": text} for i, text in enumerate("xyzw")]
    assert merged["usage"] == {
        "prompt_tokens": 4,
        "completion_tokens": 6,
        "total_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 1},
    }
    assert merged["metrics"] is None


def test_details_of_all_are_summed() -> None:
    one = {"prompt_tokens_details": {"cached_tokens": 2}}
    assert sum_usage([one, one]) == {"prompt_tokens_details": {"cached_tokens": 4}}


def test_interleaved_streams_become_one() -> None:
    merge = StreamMerge(choices=1)
    streams = [Engine(("a", "b")).stream(name="one"), Engine(("c", "d"), prompt=(1,)).stream(name="two")]
    seen = b"".join(merge.merged(prompt, streams[prompt][at]) for at in range(4) for prompt in (1, 0))
    payloads = [json.loads(e.data) for e in events(seen + merge.ending()) if e.data and e.data != b"[DONE]"]
    assert {payload["id"] for payload in payloads} == {"cmpl-two"}
    choices = [(c["index"], c["text"]) for payload in payloads for c in payload["choices"]]
    assert choices == [(1, "c"), (0, "a"), (1, "d"), (0, "b")]
    assert [p["usage"] for p in payloads if "usage" in p] == [
        {"prompt_tokens": 4, "total_tokens": 8, "completion_tokens": 4}
    ]
    assert (seen + merge.ending()).count(b"[DONE]") == 1


def test_several_choices_of_several_prompts_keep_apart() -> None:
    merge = StreamMerge(choices=2)
    raw = b'data: {"id":"1","choices":[{"index":1,"text":"x"}]}\n\n'
    assert b'"index":5' in merge.merged(2, raw)


def test_without_usage_there_is_none() -> None:
    merge = StreamMerge(choices=1)
    merge.merged(0, b"".join(Engine(("a",), usage=False).stream()))
    assert merge.ending() == b"data: [DONE]\n\n"


def test_comments_pass_through_transcript_and_merge() -> None:
    transcript = Transcript(Endpoint.COMPLETIONS, Shape(1, stream=True))
    merge = StreamMerge(choices=1)
    raw = b": hi\n\n" + b"".join(Engine(("a",)).stream())
    seen = b"".join(merge.merged(0, transcript.take(event)) for event in events(raw))
    assert seen.startswith(b": hi\n\n")
    assert b'"token_ids":null' in seen
