"""Facts that nodes publish about themselves."""

import json

import pytest

from pdproxy.nodes.compatibility import differences
from pdproxy.nodes.hashing import Hashing
from pdproxy.nodes.node import Binding, Capacity, Node, Role
from pdproxy.nodes.node_info import (
    ModelCard,
    NodeInfo,
    read_fingerprint,
    read_hashing,
    read_labels,
    read_model_card,
    read_node_capacity,
    read_node_info,
    read_ranks,
    read_version,
)
from tests.nodes.fake_pool import LABELS, levels, metrics

NODE = Node("p1", "http://p1", (Role.PREFILL,))


def test_base_models_come_before_adapters() -> None:
    lora = {"id": "lora", "root": "/loras/1", "parent": "tiny"}
    tiny = {"id": "tiny", "root": "/models/tiny", "parent": None, "max_model_len": 4096}
    card = read_model_card(json.dumps({"data": [lora, tiny]}).encode())
    assert card == ModelCard(("tiny", "lora"), "/models/tiny", 4096, {"lora": lora, "tiny": tiny})


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"data": 3}', b'{"data": [3, {"id": 4}]}', b"\xff"])
def test_unusable_answers_give_nothing(body: bytes) -> None:
    assert read_model_card(body) == ModelCard()
    assert read_version(body) == ""
    assert read_labels(body) == {}


def test_the_connectors_labels_are_read_out_of_all_metrics() -> None:
    assert read_labels(metrics(LABELS)) == LABELS
    assert read_labels(metrics(None)) == {}
    assert read_labels(b'pdproxy_connector_info{role="x" 1\n') == {}


def test_data_parallel_ranks_are_counted_by_their_metrics() -> None:
    body = b"".join(metrics({**LABELS, "engine": engine}) for engine in ("0", "1", "2"))
    assert read_ranks(body) == 3
    assert NodeInfo(NODE, ranks=3).joined().ranks == 3
    assert [dict(headers) for headers in NodeInfo(NODE, ranks=2).joined().each_rank()] == [
        {"x-data-parallel-rank": "0"},
        {"x-data-parallel-rank": "1"},
    ]


@pytest.mark.parametrize("body", [b"", metrics(None), metrics(LABELS), metrics({**LABELS, "engine": "3"})])
def test_a_lone_engine_is_one_rank_and_needs_no_header(body: bytes) -> None:
    assert read_ranks(body) == 1
    assert NodeInfo(NODE, ranks=read_ranks(body)).joined().each_rank() == ((),)


def test_what_was_configured_wins_over_what_was_found() -> None:
    info = NodeInfo(NODE, ModelCard(("tiny", "lora")), "0.32.0")
    assert info.joined() == Node("p1", "http://p1", (Role.PREFILL,), "tiny", ("lora",), 1.0, "0.32.0")
    configured = Node("p1", "http://p1", (Role.PREFILL,), "lora", ("mine",), 2.0)
    assert NodeInfo(configured, ModelCard(("tiny", "lora"))).joined().model == "lora"
    assert NodeInfo(configured, ModelCard(("tiny", "lora"))).joined().aliases == ("mine", "tiny")


def test_a_cohort_is_what_the_handshake_compares() -> None:
    assert NodeInfo(NODE).cohort() == ""
    assert NodeInfo(NODE, version="0.32.0").cohort() == "0.32.0"
    assert NodeInfo(NODE, version="0.32.0", labels=LABELS).cohort() == "0.32.0+0.1.0"
    fingerprint = {"checkpoint": "c1", "all": "0123456789abcdef"}
    assert NodeInfo(NODE, labels=LABELS, fingerprint=fingerprint).cohort() == "0.32.0+0.1.0+0123456789abcdef"


PROMPTS = b'{"chat_template": "of-the-flag"}'


@pytest.mark.parametrize(
    "prompts", [b"", b"[]", b'{"detail": "Not Found"}', b'{"chat_template": 3}', b'{"chat_template": "own"}']
)
def test_an_api_server_that_uses_the_models_template_or_tells_none_is_of_the_engines_cohort(prompts: bytes) -> None:
    told = metrics(LABELS) + levels({"chat_template": "own", "all": "feed"})
    info = read_node_info(NODE, b"{}", b"{}", told, prompts)
    assert info.fingerprint == {"chat_template": "own", "all": "feed"}
    assert info.cohort() == "0.32.0+0.1.0+feed"


def test_an_api_server_with_another_template_is_of_another_cohort_and_named() -> None:
    told = metrics(LABELS) + levels({"chat_template": "own", "all": "feed"})
    odd, usual = (read_node_info(NODE, b"{}", b"{}", told, prompts) for prompts in (PROMPTS, b""))
    assert odd.fingerprint == {"chat_template": "of-the-flag", "all": "feed"}
    assert odd.cohort() == "0.32.0+0.1.0+feed+of-the-flag"
    (difference,) = differences(odd, usual)
    assert str(difference).startswith("chat_template: of-the-flag here, own on p1: the same --chat-template")


def test_a_template_alone_makes_no_fingerprint() -> None:
    assert read_node_info(NODE, b"{}", b"{}", metrics(LABELS), PROMPTS).cohort() == "0.32.0+0.1.0"


def test_a_fingerprint_is_read_part_by_part() -> None:
    fingerprint = {"checkpoint": "c1", "dtype": "bfloat16", "all": "feed"}
    assert read_fingerprint(metrics(LABELS) + levels(fingerprint)) == fingerprint
    assert read_fingerprint(metrics(LABELS)) == {}
    assert read_fingerprint(b'pdproxy_connector_fingerprint{part="x"} 1.0\n') == {}
    assert NodeInfo(NODE, fingerprint=fingerprint).joined().fingerprint == fingerprint


def test_ranks_that_do_not_agree_are_a_fingerprint_of_their_own() -> None:
    divided = levels({"all": "one"}) + levels({"all": "two"}).replace(b'engine="0"', b'engine="1"')
    assert read_fingerprint(divided) == {"all": "one|two"}


def test_what_a_known_answer_test_needs_is_on_the_node() -> None:
    joined = NodeInfo(NODE, ModelCard(max_model_len=4096), labels=LABELS).joined()
    assert (joined.block_size, joined.max_model_len) == (256, 4096)
    silent = NodeInfo(NODE, labels={"block_size": "None"}).joined()
    assert (silent.block_size, silent.max_model_len) == (0, 0)


CAPACITY = """# TYPE pdproxy_connector_capacity_tokens gauge
pdproxy_connector_capacity_tokens{engine="0",model_name="tiny"} 524032.0
# TYPE pdproxy_connector_capacity_sequences gauge
pdproxy_connector_capacity_sequences{engine="0",limit="max_model_len",model_name="tiny"} 107.0
pdproxy_connector_capacity_sequences{engine="0",limit="state",model_name="tiny"} 682.0
# TYPE pdproxy_connector_capacity_binding gauge
pdproxy_connector_capacity_binding{engine="0",group="attention",model_name="tiny"} 1.0
"""


def test_capacity_is_read_out_of_the_metrics() -> None:
    expected = Capacity(524032, 682, 107, Binding.ATTENTION)
    assert read_node_capacity(metrics(LABELS) + CAPACITY.encode()) == expected
    assert NodeInfo(NODE, capacity=expected).joined().capacity == expected


def test_engines_behind_one_address_add_up() -> None:
    both = CAPACITY + CAPACITY.replace('engine="0"', 'engine="1"')
    assert read_node_capacity(both.encode()) == Capacity(2 * 524032, 2 * 682, 2 * 107, Binding.ATTENTION)


def test_a_dense_model_has_no_limit_by_state() -> None:
    lines = [line for line in CAPACITY.splitlines() if 'limit="state"' not in line]
    capacity = read_node_capacity("\n".join(lines).encode())
    assert capacity == Capacity(524032, None, 107, Binding.ATTENTION)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("capacity_tokens{", "other{"),
        ("524032.0", "NaN"),
        ("107.0", "+Inf"),
        ('group="attention"', 'group="luck"'),
        ("} 1.0", " 1.0"),
    ],
)
def test_a_capacity_in_part_is_none(right: str, wrong: str) -> None:
    assert read_node_capacity(CAPACITY.replace(right, wrong).encode()) is None
    assert read_node_capacity(metrics(LABELS)) is None


@pytest.mark.parametrize(("said", "keeps"), [("0.3", True), ("1", True), ("0", False), (None, False)])
def test_a_node_says_whether_it_keeps_conversations(said: str | None, keeps: bool) -> None:
    labels = {} if said is None else {"keep_share": said}
    assert NodeInfo(NODE, labels=labels).joined().keeps is keeps


@pytest.mark.parametrize(("said", "can_resume"), [("true", True), ("false", False), (None, False)])
def test_a_node_says_whether_it_can_resume_streams(said: str | None, can_resume: bool) -> None:
    labels = {} if said is None else {"resume": said}
    assert NodeInfo(NODE, labels=labels).joined().can_resume is can_resume


ROOT = bytes.fromhex("9bd96a485ad84efdafb72ee48a1d7a69bcead0f8f0433173941b276b9581eef0")
"""`NONE_HASH` of a node with `--prefix-caching-hash-algo sha256_cbor`, as vLLM 0.32 was seen to publish it."""
OURS = {
    "algorithm": "sha256_cbor",
    "unit": "16",
    "block_size": "256",
    "drops_unit": "false",
    "states": "true",
    "root": ROOT.hex(),
}
STOCK = {"prefix_caching_hash_algo": "sha256_cbor", "effective_attention_block_size": "256", "block_size": "128"}


def line(metric: str, labels: dict[str, str]) -> bytes:
    inside = ",".join(f'{name}="{value}"' for name, value in labels.items())
    return f"{metric}{{{inside}}} 1.0\n".encode()


def test_how_a_node_hashes_is_read_out_of_the_connectors_gauge() -> None:
    body = line("pdproxy_connector_hashing", OURS) + line("vllm:cache_config_info", STOCK)
    assert read_hashing(body) == Hashing("sha256_cbor", 16, 256, ROOT, states=True)
    assert read_node_info(NODE, b"", b"", body).joined().hashing == Hashing("sha256_cbor", 16, 256, ROOT, states=True)


def test_ranks_that_hash_differently_are_no_one_node() -> None:
    body = b"".join(line("pdproxy_connector_hashing", {**OURS, "engine": str(rank)}) for rank in range(2))
    assert read_hashing(body) == Hashing("sha256_cbor", 16, 256, ROOT, states=True)
    assert read_hashing(body + line("pdproxy_connector_hashing", {**OURS, "unit": "32"})) is None


@pytest.mark.parametrize("wrong", [{"unit": "0"}, {"unit": "x"}, {"unit": "24"}, {"block_size": ""}, {"root": "zz"}])
def test_labels_that_make_no_sense_are_none(wrong: dict[str, str]) -> None:
    assert read_hashing(line("pdproxy_connector_hashing", OURS | wrong)) is None


def test_a_node_without_our_connector_is_taken_to_hash_as_vllm_does_by_itself() -> None:
    read = read_hashing(line("vllm:cache_config_info", STOCK | {"prefix_match_unit": "16"}))
    assert read == Hashing("sha256_cbor", 16, 256, b"")
    assert read_hashing(line("vllm:cache_config_info", STOCK)) == Hashing("sha256_cbor", 256, 256, b"")
    hybrid = read_hashing(line("vllm:cache_config_info", STOCK | {"mamba_cache_mode": "align"}))
    assert hybrid == Hashing("sha256_cbor", 256, 256, b"", states=True)
    assert read_hashing(line("vllm:cache_config_info", STOCK | {"prefix_match_unit": "24"})) is None
    assert read_hashing(b"") is None
