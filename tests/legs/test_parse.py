"""Which bodies are accepted, what is removed from them, and which model one names that is not looked into."""

import json

import msgspec
import pytest

from pdproxy.errors import ClientError
from pdproxy.legs.lax_fields import UnreadableField
from pdproxy.legs.parse import LONGEST_MODEL, checked_fields, model_in, model_of, parse, scrub
from pdproxy.legs.rewrite import decode_body
from pdproxy.raw_json import MOST_FIELDS, SMALL, at_once
from pdproxy.request import Endpoint, write_json


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b'"text"',
        b"\xff\xfe",
        b'{"model":"m","temperature":NaN}',
        b'{"model":"m","temperature":-Infinity}',
        b'{"model":"m","user":"\\ud800"}',
        b'{"model":"m","user":"\xff"}',
        b'{"model":"m","user":"a\nb"}',
        b'{"model":"m"} {}',
        b'{"model":"m"%b}' % b"".join(b',"f%d":1' % number for number in range(MOST_FIELDS)),
        b"[" * 100_000,
    ],
)
def test_what_is_no_json_object_is_refused(raw: bytes) -> None:
    with pytest.raises(ClientError) as caught:
        parse(raw)
    assert (caught.value.status, caught.value.param) == (400, None)
    assert len(caught.value.message) > 10


UNREADABLE = [
    (Endpoint.COMPLETIONS, b'{"n":1e400}', "n"),
    (Endpoint.COMPLETIONS, b'{"n":0}', "n"),
    (Endpoint.CHAT, b'{"stream_options":[%b]}' % (b"[]," * 20_000 + b"[]"), "stream_options"),
    (Endpoint.CHAT, b'{"stream":"%b"}' % (b" " * SMALL), "stream"),
    (Endpoint.RESPONSES, b'{"background":"perhaps"}', "background"),
]


@pytest.mark.parametrize(("endpoint", "raw", "name"), UNREADABLE)
def test_what_nodes_refuse_is_told_by_name(endpoint: Endpoint, raw: bytes, name: str) -> None:
    with pytest.raises(UnreadableField) as caught:
        at_once(checked_fields(endpoint, parse(raw)))
    assert caught.value.name == name


MIXED = [b'[1,"a"]', b"[true]", b'["a",[1]]', json.dumps(["x"] * 1025).encode()]


@pytest.mark.parametrize("prompt", MIXED, ids=range(len(MIXED)))
def test_a_list_that_is_no_prompt_is_refused(prompt: bytes) -> None:
    with pytest.raises(ClientError) as caught:
        at_once(checked_fields(Endpoint.COMPLETIONS, parse(b'{"prompt":%b}' % prompt)))
    assert (caught.value.status, caught.value.param) == (400, "prompt")


@pytest.mark.parametrize("raw", [b"{}", b'{"model":null}', b'{"model":""}', b'{"model":"m"}'])
def test_a_model_need_not_be_named_where_vllm_does_not_require_it(raw: bytes) -> None:
    body = parse(raw)
    named = "m" if b'"m"' in raw else ""
    assert [model_in(endpoint, body) for endpoint in Endpoint if endpoint is not Endpoint.MESSAGES] == [named] * 3
    if not named:
        with pytest.raises(UnreadableField):
            model_in(Endpoint.MESSAGES, body)


@pytest.mark.parametrize("model", [b"7", b"[[[]]]", b"false", b"0", b"{}", b"[]", b"[%b1]" % (b"1," * SMALL)])
def test_what_is_no_text_names_no_model(model: bytes) -> None:
    with pytest.raises(UnreadableField):
        model_in(Endpoint.CHAT, parse(b'{"model":%b}' % model))


@pytest.mark.parametrize("extra", [{"previous_response_id": "resp_1"}, {"background": True}, {"background": "yes"}])
def test_responses_are_stateless(extra: dict[str, object]) -> None:
    body = parse(json.dumps({"model": "m", "input": "x", **extra}).encode())
    with pytest.raises(ClientError) as caught:
        at_once(checked_fields(Endpoint.RESPONSES, body))
    assert caught.value.param in extra


LEFT_ALONE = [
    b'{"x":[1.5], "y" : {"\\u0041":null}}', b"1e400", b"[-0.0,1E5,0.10]", b"9" * 5000,
    b'"\xc3\xbc\\u00fc\\/"', b"[ 1 , 2 ]",
]  # fmt: skip


@pytest.mark.parametrize("value", LEFT_ALONE)
@pytest.mark.parametrize("name", ["vendor", "seed", "temperature", "messages"])
def test_what_is_not_replaced_leaves_as_it_came(name: str, value: bytes) -> None:
    body = scrub(parse(b'{ "model": "m",\n"%b": %b, "user":"u" }' % (name.encode(), value)))
    leg = write_json(decode_body(body, msgspec.Raw(b'{"ticket":1}')))
    assert leg == b'{"model":"m","%b":%b,"user":"u","kv_transfer_params":{"ticket":1}}' % (name.encode(), value)


def test_of_equal_names_the_last_one_leaves() -> None:
    body = scrub(parse(b'{"model":"a","n":2,"m\\u006fdel":"b","n":3}'))
    assert write_json(body) == b'{"model":"b","n":3}'


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


@pytest.mark.parametrize("name", ["kv_transfer_params", "kv_cache_report_mode", "pdproxy_release"])
def test_an_escaped_name_is_the_same_name(name: str) -> None:
    escaped = "".join(f"\\u{ord(character):04x}" for character in name)
    body = scrub(parse(b'{"model":"m","%b":1,"vllm_xargs":{"a":1}}' % escaped.encode()))
    assert json.loads(write_json(body)) == {"model": "m", "vllm_xargs": {"a": 1}}


def test_an_escaped_name_is_found_deep_inside() -> None:
    raw = b'{"model":"m","vllm_xargs":{"x":[{"kv_transfer_param\\u0073":{"do_remote_prefill":true},"a":0.10}]}}'
    assert json.loads(write_json(scrub(parse(raw)))) == {"model": "m", "vllm_xargs": {"x": [{"a": 0.1}]}}


def test_what_hides_nothing_is_not_rewritten() -> None:
    raw = b'{"model":"m","vllm_xargs":{"x" : [0.10,1e400],"text":"a\\nb"}}'
    assert write_json(scrub(parse(raw))) == raw


@pytest.mark.parametrize("inner", [b"1e400", b"[" * 900 + b"]" * 900, b"[1" + b",1" * 600_000 + b"]"])
def test_what_hides_something_and_cannot_be_read_is_refused(inner: bytes) -> None:
    raw = b'{"model":"m","vllm_xargs":{"kv_transfer_params":1,"x":%b}}' % inner
    with pytest.raises(ClientError) as caught:
        scrub(parse(raw))
    assert (caught.value.status, caught.value.param) == (400, "vllm_xargs")


def test_a_message_may_mention_transfer_parameters() -> None:
    body: dict[str, object] = {"model": "m", "messages": [{"role": "user", "content": "kv_transfer_params?"}]}
    assert scrub(body) == body


def test_pdproxy_fields_of_a_client_are_removed() -> None:
    assert scrub({"model": "m", "pdproxy_release": "x", "pdproxy_resume": {"records": []}}) == {"model": "m"}


@pytest.mark.parametrize("embeddings", [b'"AAAA"', b'["AAAA"]', b'""', b'[""]', b"{}", b"0"])
def test_prompt_embeddings_are_refused(embeddings: bytes) -> None:
    with pytest.raises(ClientError, match="prompt_embeds"):
        scrub({"model": "m", "prompt_embeds": msgspec.Raw(embeddings)})


@pytest.mark.parametrize("none", [b"null", b"[]", b"[ ]"])
def test_no_prompt_embeddings_are_left_to_the_node(none: bytes) -> None:
    body: dict[str, object] = {"model": "m", "prompt": "Hello", "prompt_embeds": msgspec.Raw(none)}
    assert scrub(body) == body


@pytest.mark.parametrize("length", [LONGEST_MODEL + 1, 100_000])
def test_a_name_that_is_longer_than_any_names_no_model(length: int) -> None:
    raw = json.dumps({"model": "m" * length}).encode()
    for read in (lambda raw: model_in(Endpoint.CHAT, parse(raw)), model_of):
        with pytest.raises(ClientError) as caught:
            read(raw)
        assert (caught.value.status, caught.value.code, caught.value.param) == (404, 404, "model")
        assert len(caught.value.message) < 200


def test_what_is_nested_too_deeply_names_no_model() -> None:
    assert model_of(b"[" * 100_000) == ""
