"""Which bodies are refused for their declared type: as vLLM's own check does, asked with the same types.

One difference: HTTP allows blanks around a type (RFC 9110, 8.3.1 and 5.6.3), and vLLM takes them for a part of it.
"""

import asyncio

import pytest
from fastapi import Request
from fastapi.exceptions import RequestValidationError
from vllm.entrypoints.serve.utils.api_utils import validate_json_request

from pdproxy.errors import ClientError
from pdproxy.intake.routes import check_media_type

TYPES = [
    "application/json",
    "Application/JSON; charset=utf-8",
    "application/json;",
    "application/json, text/plain",
    "application/problem+json",
    "application/jsonp",
    "text/json",
    "text/plain",
    "text/plain; application/json",
    "application/x-www-form-urlencoded",
    "multipart/form-data; boundary=x",
    "application/octet-stream",
    "*/*",
    "json",
    "",
]


@pytest.mark.parametrize("kind", [*TYPES, None])
def test_a_type_is_refused_where_vllm_refuses_it(kind: str | None) -> None:
    fields = [] if kind is None else [("content-type", kind)]
    asked = Request({"type": "http", "headers": [(name.encode(), value.encode()) for name, value in fields]})
    try:
        asyncio.run(validate_json_request(asked))
    except RequestValidationError as refused:
        [said] = refused.errors()
        with pytest.raises(ClientError) as ours:
            check_media_type("/v1/chat/completions", dict(fields))
        assert ours.value.status == 400
        assert ours.value.message.startswith(said)
    else:
        check_media_type("/v1/chat/completions", dict(fields))


@pytest.mark.parametrize("kind", ["application/json ; charset=utf-8", " Application/JSON", "application/json\t;a=b"])
def test_blanks_around_a_type_are_no_part_of_it(kind: str) -> None:
    check_media_type("/v1/chat/completions", {"content-type": kind})
