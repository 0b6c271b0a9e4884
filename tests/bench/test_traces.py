"""Traces: equal tokens have equal names, the generators follow their seed, recorded ones are read as they are meant."""

import collections
import json
from pathlib import Path

import pytest

from deploy.bench import generators
from deploy.bench.kv_events import hash_ids
from deploy.bench.recorded import mooncake, rescaled, weka
from deploy.bench.traces import Prompt, Segment, hashed, length, token_ids, without_sessions

DATA = Path(__file__).with_name("data")
PROMPTS: list[Prompt] = [
    (Segment(1, 300), Segment(2, 500)),
    (Segment(1, 300), Segment(2, 500), Segment(3, 40)),
    (Segment(1, 300), Segment(4, 500)),
    (Segment(5, 300),),
]


def test_a_shorter_segment_of_a_name_is_the_beginning_of_a_longer_one() -> None:
    assert token_ids((Segment(1, 500),))[:300] == token_ids((Segment(1, 300),))
    assert token_ids((Segment(1, 300),)) != token_ids((Segment(2, 300),))


@pytest.mark.parametrize("step", [16, 64, 256])
def test_names_of_beginnings_are_equal_where_vllms_hashes_are(step: int) -> None:
    ours = [hashed(prompt, step) for prompt in PROMPTS]
    theirs = [hash_ids(token_ids(prompt), step) for prompt in PROMPTS]
    assert [each.tokens for each in ours] == [each.tokens for each in theirs] == [length(each) for each in PROMPTS]
    for one in range(len(PROMPTS)):
        for other in range(len(PROMPTS)):
            equal = [a == b for a, b in zip(ours[one].hashes, ours[other].hashes, strict=False)]
            assert equal == [a == b for a, b in zip(theirs[one].hashes, theirs[other].hashes, strict=False)]


@pytest.mark.parametrize("name", list(generators.ALL))
def test_a_generator_follows_its_seed(name: str) -> None:
    make = generators.ALL[name]
    assert make(1) == make(1)
    assert make(1) != make(2)
    assert make(1).name == name
    assert all(request.after is None or request.after < number for number, request in enumerate(make(1).requests))


def test_the_chat_is_that_of_the_comparison() -> None:
    trace = generators.ALL["chat"](1)
    assert len(trace.requests) == 36 * 6
    assert {request.prompt[0].tokens for request in trace.requests} == {1300}
    assert len({request.prompt[0] for request in trace.requests}) == 4
    last, turn = trace.requests[5], trace.requests[4]
    assert last.prompt[: len(turn.prompt)] == turn.prompt
    assert last.prompt[len(turn.prompt)].tokens == turn.output
    assert trace.followers()[4] == [5]


def test_a_sub_agent_goes_on_from_its_parents_context() -> None:
    trace = generators.agents(generators.Agents(agents=2, sub_agents=1.0))
    first = trace.requests[0]
    branches = [trace.requests[number] for number in trace.followers()[0]]
    assert len(branches) == 3  # the next call, and two sub-agents
    shared = {branch.prompt[: len(first.prompt) + 2] for branch in branches}
    assert len(shared) == 1


def test_agents_with_tools_pause_for_up_to_two_minutes_and_some_are_left_alone() -> None:
    trace = generators.ALL["agents-tools"](1)
    pauses = [request.at for request in trace.requests if request.after is not None]
    assert 1.0 <= min(pauses) < 2.0
    assert 100.0 < max(pauses) <= 120.0
    calls = collections.Counter(request.session for request in trace.requests)
    assert len(calls) == generators.TOOLS.agents
    assert min(calls.values()) < generators.TOOLS.calls <= max(calls.values())


def test_without_sessions_nothing_else_changes() -> None:
    trace = generators.ALL["chat"](1)
    bare = without_sessions(trace)
    assert {request.session for request in bare.requests} == {None}
    assert [request.prompt for request in bare.requests] == [request.prompt for request in trace.requests]


def test_mooncakes_form_is_read() -> None:
    rows = [
        {"timestamp": 500, "input_length": 1100, "output_length": 7, "hash_ids": [1, 2, 3]},
        {"timestamp": 0, "input_length": 1025, "output_length": 0, "hash_ids": [1, 2, 4]},
    ]
    first, second = mooncake("m", map(json.dumps, rows)).requests
    assert (first.at, second.at) == (0.0, 0.5)
    assert [segment.tokens for segment in second.prompt] == [512, 512, 76]
    assert first.prompt[:2] == second.prompt[:2]
    assert (first.output, second.output) == (1, 7)


def test_of_a_mooncake_file_the_first_lines_can_be_taken() -> None:
    lines = (DATA / "mooncake.jsonl").read_text(encoding="utf-8").splitlines()
    trace = mooncake("sample", lines, limit=25)
    assert len(trace.requests) == 25
    assert rescaled(trace, 2.0).requests[-1].at == trace.requests[-1].at / 2


def test_wekas_form_is_read_with_its_sub_agents() -> None:
    inner = {"t": 1.0, "type": "n", "in": 130, "out": 3, "hash_ids": [1, 2, 9]}
    rows = [
        {"t": 0.0, "type": "s", "in": 128, "out": 5, "hash_ids": [1, 2]},
        {"t": 2.0, "type": "subagent", "requests": [inner]},
    ]
    session = json.dumps({"id": "a", "block_size": 64, "hash_id_scope": "local", "requests": rows})
    trace = weka("w", [session, session], within=0.0)
    assert sorted(request.at for request in trace.requests) == [0.0, 0.0, 3.0, 3.0]
    parent, *_, child = sorted((each for each in trace.requests if each.session == 0), key=lambda each: each.at)
    assert child.prompt[:2] == parent.prompt
    assert length(child.prompt) == 130
    other = next(each for each in trace.requests if each.session == 1)
    assert not set(other.prompt) & set(parent.prompt)


def test_the_sample_of_sessions_shares_what_it_says() -> None:
    trace = weka("sample", (DATA / "weka.jsonl").read_text(encoding="utf-8").splitlines())
    distinct = {segment for request in trace.requests for segment in request.prompt}
    assert sum(segment.tokens for segment in distinct) < trace.tokens / 3


def test_tokens_without_an_id_are_nobody_elses() -> None:
    rows = [{"timestamp": 0, "input_length": length_, "output_length": 1, "hash_ids": [1]} for length_ in (700, 800)]
    first, second = mooncake("m", map(json.dumps, rows)).requests
    assert (first.tokens, second.tokens) == (700, 800)
    assert first.prompt[0] == second.prompt[0]
    assert first.prompt[1].name != second.prompt[1].name


def test_what_is_no_object_is_refused() -> None:
    with pytest.raises(ValueError, match="object on each line"):
        mooncake("m", ["[1]"])
