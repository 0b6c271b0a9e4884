"""Which bodies are accepted, what is removed from them, and which model one names that is not looked into."""

import json

import httpx
import pytest

from pdproxy.errors import ClientError
from pdproxy.legs.parse import model_of, parse, scrub
from pdproxy.request import Endpoint


@pytest.mark.parametrize(
    ("raw", "param"),
    [
        (b"", None),
        (b"{", None),
        (b"[]", None),
        (b'"text"', None),
        (b"\xff\xfe", None),
        (b'{"model":"m","temperature":NaN}', None),
        (b'{"model":"m","temperature":-Infinity}', None),
        (b'{"model":"m","seed":' + b"9" * 5000 + b"}", None),
        (b"[" * 100_000, None),
        (b"{}", "model"),
        (b'{"model":""}', "model"),
        (b'{"model":7}', "model"),
        (b'{"model":"m","max_tokens":"5"}', "max_tokens"),
        (b'{"model":"m","max_tokens":-1}', "max_tokens"),
        (b'{"model":"m","max_tokens":1.5}', "max_tokens"),
        (b'{"model":"m","max_completion_tokens":true}', "max_completion_tokens"),
        (b'{"model":"m","n":0}', "n"),
        (b'{"model":"m","stream":"yes"}', "stream"),
        (b'{"model":"m","stream_options":[]}', "stream_options"),
        (b'{"model":"m","priority":"high"}', "priority"),
        (b'{"model":"m","prompt":[1,"a"]}', "prompt"),
        (b'{"model":"m","prompt":[true]}', "prompt"),
        (b'{"model":"m","prompt":' + json.dumps(["x"] * 1025).encode() + b"}", "prompt"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(raw: bytes, param: str | None) -> None:
    with pytest.raises(ClientError) as caught:
        parse(Endpoint.COMPLETIONS, raw)
    assert caught.value.status == 400
    assert caught.value.param == param
    assert len(caught.value.message) > 10


@pytest.mark.parametrize("extra", [{"previous_response_id": "resp_1"}, {"background": True}])
def test_responses_are_stateless(extra: dict[str, object]) -> None:
    with pytest.raises(ClientError) as caught:
        parse(Endpoint.RESPONSES, json.dumps({"model": "m", "input": "x", **extra}).encode())
    assert caught.value.param in extra


def test_what_the_proxy_does_not_know_is_left_alone() -> None:
    body = {"model": "m", "prompt": [1, 2], "max_tokens": None, "vendor": {"x": [1.5]}, "user": "ü\ud800"}
    assert scrub(parse(Endpoint.COMPLETIONS, json.dumps(body).encode())) == body


@pytest.mark.parametrize("key", ["kv_transfer_params", "ec_transfer_params", "kv_cache_report_mode"])
@pytest.mark.parametrize("carrier", [None, "vllm_xargs", "extra_args", "extra_body", "sampling_params"])
def test_what_only_nodes_may_set_is_removed_wherever_it_hides(key: str, carrier: str | None) -> None:
    hidden: dict[str, object] = {key: {"do_remote_prefill": True}, "kept": 1}
    body = {"model": "m", "prompt": "x", **({carrier: hidden, "kept": 1} if carrier else hidden)}
    clean = scrub(body)
    assert key not in json.dumps(clean)
    assert clean["kept"] == 1
    assert key in json.dumps(body)


def test_transfer_parameters_deep_inside_are_removed_too() -> None:
    body: dict[str, object] = {"model": "m", "vllm_xargs": {"extra_args": [{"kv_transfer_params": {}}], "a": "b"}}
    assert scrub(body) == {"model": "m", "vllm_xargs": {"extra_args": [{}], "a": "b"}}


def test_a_message_may_mention_transfer_parameters() -> None:
    body: dict[str, object] = {"model": "m", "messages": [{"role": "user", "content": "kv_transfer_params?"}]}
    assert scrub(body) == body


def test_pdproxy_fields_of_a_client_are_removed() -> None:
    assert scrub({"model": "m", "pdproxy_release": "x", "pdproxy_resume": {"records": []}}) == {"model": "m"}


def test_prompt_embeddings_are_refused() -> None:
    with pytest.raises(ClientError, match="prompt_embeds"):
        scrub({"model": "m", "prompt_embeds": "AAAA"})


def test_the_number_of_values_in_a_body_is_bounded() -> None:
    many = b'{"model":"m","prompt":[1' + b",1" * 2_000_001 + b"]}"
    with pytest.raises(ClientError) as caught:
        parse(Endpoint.COMPLETIONS, many)
    assert (caught.value.status, caught.value.code) == (413, "request_too_large")
    long = {"model": "m", "prompt": "words, " * 500_000}
    assert parse(Endpoint.COMPLETIONS, json.dumps(long).encode()) == long


def test_what_is_nested_too_deeply_names_no_model() -> None:
    assert model_of(b"[" * 100_000) == ""


def test_a_form_names_its_model() -> None:
    data = {"temperature": "0", "model": "whisper-é"}
    form = httpx.Request("POST", "http://x", data=data, files={"file": ("a.wav", b'RIFF\r\n\r\nname="model"')})
    assert model_of(form.read()) == "whisper-é"
    assert model_of(httpx.Request("POST", "http://x", files={"file": b"RIFF"}).read()) == ""
