"""The model of a form: found as a node finds it (starlette's own parser is asked the same), with bounds."""

import asyncio
import time

import httpx
import pytest
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException
from starlette.requests import Request

from pdproxy.errors import ClientError
from pdproxy.legs.form import LONGEST_HEADER, MOST_PARTS, STEP_BYTES, model_in_form
from pdproxy.legs.parse import LONGEST_MODEL
from pdproxy.raw_json import at_once

KIND = "multipart/form-data; boundary=b"
MB = 1024 * 1024


def part(disposition: bytes, value: bytes = b"m", header: bytes = b"Content-Disposition") -> bytes:
    """One part of a form whose boundary is ``b``."""
    return b"--b\r\n%b: %b\r\n\r\n%b\r\n" % (header, disposition, value)


def file(content: bytes) -> bytes:
    return part(b'form-data; name="file"; filename="a.wav"', content)


def form(*parts: bytes) -> bytes:
    return b"".join(parts) + b"--b--\r\n"


def model(raw: bytes, kind: str = KIND) -> str:
    return at_once(model_in_form(raw, kind))


MODEL = part(b'form-data; name="model"')


def nodes_model(raw: bytes, kind: str) -> str:
    """The model in a form as a node's web framework reads it; "" where it refuses the form, or reads no text."""

    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": raw, "more_body": False}

    async def read() -> str:
        scope = {"type": "http", "headers": [(b"content-type", kind.encode("latin-1"))]}
        async with Request(scope, receive).form() as found:
            value = found.get("model")
            return value if isinstance(value, str) else ""

    try:
        return asyncio.run(read())
    except (MultiPartException, HTTPException):
        return ""


FORMS: dict[str, tuple[bytes, str, str]] = {
    "first": (form(MODEL, file(b"sound")), KIND, "m"),
    "last": (form(file(b"sound"), MODEL), KIND, "m"),
    "not quoted": (form(part(b"form-data; name=model")), KIND, "m"),
    "quoted with blanks": (form(part(b'form-data ;  name = "model" ')), KIND, "m"),
    "header in another case": (form(part(b'FORM-DATA; NAME="model"', header=b"CONTENT-disposition")), KIND, "m"),
    "name in another case": (form(part(b'form-data; name="Model"')), KIND, ""),
    "escaped name": (form(part(b'form-data; name="mo\\"del"')), KIND, ""),
    "extended name": (form(part(b"form-data; name*=utf-8''model")), KIND, ""),
    "extended file name": (form(part(b"form-data; name=\"model\"; filename*=utf-8''a")), KIND, "m"),
    "a file": (form(part(b'form-data; name="model"; filename="a"')), KIND, ""),
    "model in a file": (form(file(b'x\r\n\r\nname="model"\r\n\r\nno\r\n--'), MODEL), KIND, "m"),
    "model in a file name": (form(part(b'form-data; name="file"; filename="; name=model"', b"no"), MODEL), KIND, "m"),
    "other headers": (form(b"--b\r\nX: name=model\r\n" + part(b"form-data; name=a", b"no")[5:], MODEL), KIND, "m"),
    "line ends in it": (form(part(b'form-data; name="model"', b"a\r\nb")), KIND, "a\r\nb"),
    "empty": (form(part(b'form-data; name="model"', b"")), KIND, ""),
    "not ascii": (form(part(b'form-data; name="model"', "whisper-é".encode())), KIND, "whisper-é"),
    "type in another case": (form(MODEL), "Multipart/FORM-Data ; charset=utf-8; BOUNDARY=b", "m"),
    "boundary quoted": (form(MODEL).replace(b"--b", b"--a;b c"), 'multipart/form-data; boundary="a;b c"', "m"),
    "no boundary": (form(MODEL), "multipart/form-data", ""),
    "another boundary": (form(MODEL), "multipart/form-data; boundary=c", ""),
    "boundary too long": (form(MODEL).replace(b"b", b"b" * 300), KIND + "b" * 299, ""),
    "line before": (b"\r\n" + form(MODEL), KIND, "m"),
    "text before": (b"x" + form(MODEL), KIND, ""),
    "nothing": (b"", KIND, ""),
    "no form": (b'{"model":"m"}', KIND, ""),
    "huge name": (form(part(b'form-data; name="%b"' % (b"n" * 100_000)), MODEL), KIND, ""),
    "huge header": (form(part(b'form-data; name="a"', header=b"n" * 100_000), MODEL), KIND, ""),
    "no name": (form(part(b"form-data"), file(b"x")), KIND, ""),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_a_forms_model_is_what_its_node_reads(name: str) -> None:
    raw, kind, expected = FORMS[name]
    assert (model(raw, kind), nodes_model(raw, kind)) == (expected, expected)


def test_forms_of_a_real_client() -> None:
    data = {"temperature": "0", "model": "whisper-é"}
    for fields in (data, {}):
        sent = httpx.Request("POST", "http://x", data=fields, files={"file": ("a.wav", b"RIFF\r\n\r\nname=model")})
        assert model(sent.read(), sent.headers["content-type"]) == fields.get("model", "")


@pytest.mark.parametrize("at", range(-60, 20, 3))
def test_a_step_may_end_anywhere(at: int) -> None:
    before = len(file(b""))
    assert model(form(file(b"x" * (STEP_BYTES - before + at)), MODEL)) == "m"


def test_it_is_found_at_the_end_of_a_large_upload_and_others_have_their_turn() -> None:
    raw, began = form(file(b"\r\n-" * (20 * MB)), MODEL), time.thread_time()
    steps = sum(1 for _ in model_in_form(raw, KIND))
    assert at_once(model_in_form(raw, KIND)) == "m"
    assert steps >= 60 * MB // STEP_BYTES - 1
    assert time.thread_time() - began < 2.0


@pytest.mark.parametrize("content", [b"\r\n--bX", part(b'form-data; name="a"')], ids=["what looks like parts", "parts"])
def test_a_form_of_very_many_parts_is_left_to_its_node(content: bytes) -> None:
    began = time.thread_time()
    assert model(form(part(b'form-data; name="file"; filename="a"', content * 500_000), MODEL)) == ""
    assert time.thread_time() - began < 1.0
    assert model(form(part(b'form-data; name="a"') * (MOST_PARTS - 10), MODEL)) == "m"


def test_what_is_longer_than_any_header_is_not_looked_into() -> None:
    long = b";" * LONGEST_HEADER
    assert model(form(part(b'form-data; name="model"' + long))) == ""
    assert model(form(MODEL), f"{KIND}{long.decode()}") == ""


def test_a_name_that_is_longer_than_any_names_no_model() -> None:
    for value in (b"m" * (LONGEST_MODEL + 1), "🙂".encode() * (LONGEST_MODEL + 1), b"m" * MB):
        with pytest.raises(ClientError) as caught:
            model(form(part(b'form-data; name="model"', value)))
        assert (caught.value.status, caught.value.code) == (404, 404)
    longest = "é" * LONGEST_MODEL
    assert model(form(part(b'form-data; name="model"', longest.encode()))) == longest
