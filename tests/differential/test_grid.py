"""The grid's cases, what is compared of two answers, and the ledger."""

import json
from pathlib import Path
from typing import Any

import pytest

from pdproxy.request import Endpoint
from tests.differential.answers import aspects, differences
from tests.differential.grid import ODD_VALUES, case, cases, fields_of, some_of
from tests.differential.ledger import Difference, read, unexplained, unused
from tests.differential.page import PAGE, differences_page

DOCUMENT = {
    "paths": {
        Endpoint.CHAT: {"post": {"requestBody": {"content": {"application/json": {"schema": {"$ref": "#/x/Chat"}}}}}}
    },
    "components": {"schemas": {"Chat": {"properties": {"model": {}, "n": {}, "stream": {}}}}},
}
GOOD = {Endpoint.CHAT: {"model": "m", "n": 1}}
LEDGER = Path(__file__).with_name("ledger.toml")


def test_every_field_has_every_value_streamed_and_not() -> None:
    whole = list(cases(DOCUMENT, GOOD))
    assert len(whole) == len({each.name for each in whole}) == 3 * len(ODD_VALUES) * 2
    assert fields_of(DOCUMENT, Endpoint.CHAT) == ("model", "n", "stream")


def test_values_stand_in_the_body_as_they_are_written() -> None:
    assert b'"n":1e400' in case(Endpoint.CHAT, GOOD[Endpoint.CHAT], "n", "1e400", stream=True).body
    assert b"\\ud800" in case(Endpoint.CHAT, GOOD[Endpoint.CHAT], "model", "lone surrogate", stream=False).body
    missing = case(Endpoint.CHAT, GOOD[Endpoint.CHAT], "n", "missing", stream=False)
    assert json.loads(missing.body) == {"model": "m", "stream": False}


def test_a_slice_has_every_field_and_is_small() -> None:
    whole = list(cases(DOCUMENT, GOOD))
    chosen = some_of(whole)
    assert {each.field for each in chosen} == {each.field for each in whole}
    assert len(chosen) <= 2 * 3


def whole_answer(**more: Any) -> bytes:
    choice = {"index": 0, "message": {"content": "a"}, "finish_reason": "stop", "logprobs": None}
    return json.dumps({"id": "1", "choices": [choice], "usage": {"prompt_tokens": 3}, **more}).encode()


def differ(one: bytes, other: bytes, status: int = 200, kind: str = "application/json") -> tuple[str, ...]:
    return differences(aspects(200, "application/json", one), aspects(status, kind, other))


def test_ids_times_and_cached_tokens_may_differ() -> None:
    other = whole_answer(id="2", created=5, usage={"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": 1}})
    assert differ(whole_answer(), other) == ()


def test_what_the_client_sees_may_not() -> None:
    assert "status" in differ(whole_answer(), whole_answer(), status=201)
    assert "content type" in differ(whole_answer(), whole_answer(), kind="text/plain")
    assert "usage" in differ(whole_answer(), whole_answer(usage={"prompt_tokens": 4}))
    assert "fields" in differ(whole_answer(), whole_answer(more=1))
    assert "text" in differ(whole_answer(), whole_answer().replace(b'"a"', b'"b"'))
    assert "finish reason" in differ(whole_answer(), whole_answer().replace(b"stop", b"length"))
    error = b'{"error":{"message":"x","type":"a","param":null,"code":400}}'
    assert differ(error, error.replace(b'"x"', b'"y"')) == ()
    assert differ(error, error.replace(b'"a"', b'"b"')) == ("error",)


def test_a_stream_must_end_and_its_pieces_are_one_text() -> None:
    events = [b'data: {"choices":[{"index":0,"text":"a"}]}\n\n', b'data: {"choices":[{"index":0,"text":"b"}]}\n\n']
    cut = b'data: {"choices":[{"index":0,"text":"ab"}]}\n\n'
    end = b"data: [DONE]\n\n"

    def of(body: bytes) -> Any:
        return aspects(200, "text/event-stream; charset=utf-8", body)

    assert differences(of(b"".join(events) + end), of(cut + end)) == ()
    assert differences(of(cut + end), of(cut)) == ("end",)


ROW = '[[differences]]\nendpoints = "/v1/chat/*"\nfields = "n"\nvalues = ["true", "1*"]\nreason = "why it differs"\n'


def test_a_row_explains_what_its_patterns_say() -> None:
    [row] = read(ROW)
    fits = Difference(case(Endpoint.CHAT, {}, "n", "1.0", stream=False), ("status",), "")
    other = Difference(case(Endpoint.CHAT, {}, "n", "null", stream=False), ("status",), "")
    assert unexplained([fits, other], [row]) == [other]
    assert unused([other], [row]) == [row]
    assert unused([fits], [row]) == []


def test_each_row_of_the_ledger_has_a_reason() -> None:
    assert all(len(row.reason) > 30 for row in read(LEDGER.read_text(encoding="utf-8")))
    with pytest.raises(ValueError, match="reason"):
        read('[[differences]]\nfields = "n"\n')


def test_the_page_for_users_is_made_of_the_ledger() -> None:
    assert PAGE.read_text(encoding="utf-8") == differences_page(), (
        "python -m tests.differential.page > docs/differences.md"
    )
