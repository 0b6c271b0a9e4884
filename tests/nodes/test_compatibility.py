"""Nodes that cannot work together are refused by the name of the setting."""

import dataclasses
from collections.abc import Mapping

import pytest

from pdproxy.nodes.compatibility import MUST_AGREE, SHOULD_AGREE, block_size_advice, check_compatibility
from pdproxy.nodes.node import Node, Role
from pdproxy.nodes.node_info import ModelCard, NodeInfo
from tests.nodes.fake_pool import LABELS


def info(name: str, role: Role, labels: Mapping[str, str] = LABELS, model: str = "", serves: str = "tiny") -> NodeInfo:
    """A node with our connector; ``labels`` change the usual ones."""
    node = Node(name, f"http://{name}", (role,), model)
    return NodeInfo(node, ModelCard((serves,), "/models/tiny", 4096), "0.32.0", {**LABELS, **labels})


PREFILL = info("p1", Role.PREFILL)


def test_equal_settings_are_fine() -> None:
    found = check_compatibility(info("d1", Role.DECODE), [PREFILL])
    assert (found.refusals, found.warnings) == ((), ())


@pytest.mark.parametrize("setting", MUST_AGREE)
def test_a_setting_that_must_agree_is_refused_by_its_name(setting: str) -> None:
    found = check_compatibility(info("d1", Role.DECODE, {setting: "other"}), [PREFILL, info("p2", Role.PREFILL)])
    (finding,) = found.refusals
    assert str(finding).startswith(f"{setting}: other here, {LABELS[setting]} on p1")
    assert ("--model" in str(finding)) == (setting == "model")


@pytest.mark.parametrize("setting", SHOULD_AGREE)
def test_a_setting_that_should_agree_is_warned_of(setting: str) -> None:
    found = check_compatibility(info("d1", Role.DECODE, {setting: "other"}), [PREFILL])
    assert found.refusals == ()
    assert [finding.setting for finding in found.warnings] == [setting]


def test_nodes_that_never_exchange_tickets_are_not_compared() -> None:
    other = {"block_size": "16"}
    assert check_compatibility(info("d1", Role.DECODE, other), [info("d2", Role.DECODE)]).refusals == ()
    assert check_compatibility(info("d1", Role.DECODE, {**other, "vllm_version": "0.33.0"}), [PREFILL]).refusals == ()
    assert check_compatibility(info("d1", Role.DECODE, other, serves="big"), [PREFILL]).refusals == ()


def test_a_model_path_is_compared_even_without_our_connector() -> None:
    plain = [NodeInfo(Node(name, name, (role,)), ModelCard(("tiny",), root), "0.32.0")
             for name, role, root in (("p1", Role.PREFILL, "/a"), ("d1", Role.DECODE, "/b"))]  # fmt: skip
    assert [finding.setting for finding in check_compatibility(plain[1], [plain[0]]).refusals] == ["model"]


@pytest.mark.parametrize(
    ("role", "kv_role", "fits"),
    [
        (Role.PREFILL, "kv_producer", True),
        (Role.PREFILL, "kv_both", True),
        (Role.PREFILL, "kv_consumer", False),
        (Role.DECODE, "kv_consumer", True),
        (Role.DECODE, "kv_both", True),
        (Role.DECODE, "kv_producer", False),
    ],
)
def test_a_node_can_only_be_what_it_runs_as(role: Role, kv_role: str, fits: bool) -> None:
    refusals = check_compatibility(info("n", role, {"role": kv_role}), []).refusals
    assert [finding.setting for finding in refusals] == ([] if fits else ["kv_role"])


def test_a_node_that_serves_another_model_than_configured_is_refused() -> None:
    assert [finding.setting for finding in check_compatibility(info("d1", Role.DECODE, model="huge"), []).refusals] == [
        "model"
    ]
    assert check_compatibility(info("d1", Role.DECODE, model="tiny"), []).refusals == ()


def test_a_node_without_our_connector_is_admitted_with_a_warning() -> None:
    plain = NodeInfo(Node("d1", "http://d1", (Role.DECODE,)), ModelCard(("tiny",), "/models/tiny"), "0.32.0")
    found = check_compatibility(plain, [PREFILL])
    assert found.refusals == ()
    assert [finding.setting for finding in found.warnings] == ["kv_connector"]


def test_weak_settings_are_warned_of() -> None:
    weak = info("d1", Role.DECODE, {"failure_policy": "fail", "prefix_caching": "false"})
    settings = [finding.setting for finding in check_compatibility(weak, []).warnings]
    assert settings == ["kv_load_failure_policy", "enable_prefix_caching"]
    assert check_compatibility(info("p2", Role.PREFILL, {"failure_policy": "fail"}), []).warnings == ()


def test_different_lengths_are_warned_of() -> None:
    short = NodeInfo(
        Node("d1", "http://d1", (Role.DECODE,)), ModelCard(("tiny",), "/models/tiny", 1024), "0.32.0", LABELS
    )
    assert [finding.setting for finding in check_compatibility(short, [PREFILL]).warnings] == ["max_model_len"]


def test_sizes_that_follow_the_tensor_parallel_degree_are_explained() -> None:
    """Qwen3-Next's sizes at TP 2 and 8."""
    wide = info("d1", Role.DECODE, {"tp_size": "8", "block_size": "272"})
    narrow = info("p1", Role.PREFILL, {"tp_size": "2", "block_size": "1056"})
    (finding,) = check_compatibility(wide, [narrow]).refusals
    assert str(finding) == (
        "block_size: 272 here, 1056 on p1: a hybrid model's block size follows --tensor-parallel-size (8 here, 2 there)"
        ". Pairs that go together: equal degrees; any two degrees up to the model's number of KV heads; and any two"
        " with --block-size 1056 on both"
    )
    assert (
        check_compatibility(info("d1", Role.DECODE, {"tp_size": "8"}), [narrow, PREFILL]).refusals[0].setting
        == "block_size"
    )


def grouped(tp: int, groups: int, block: int = 16) -> NodeInfo:
    """A node of a Mamba-2 model, with so many groups over all ranks."""
    node = info(f"n{tp}", Role.DECODE, {"tp_size": str(tp), "block_size": str(block)})
    return dataclasses.replace(node, fingerprint={"state_groups": str(groups)})


def test_no_block_size_is_advised_where_groups_are_repeated() -> None:
    advice = block_size_advice(grouped(1, 1), grouped(2, 2, 32))
    assert advice.endswith("and no --block-size brings these two together: take equal degrees (see state_groups)")
    divided = block_size_advice(grouped(1, 8), grouped(2, 8, 32))
    assert "equal degrees; of degrees that divide the model's 8 groups, any two" in divided
    assert divided.endswith("any two with --block-size 32 on both")


def reached(at: str, role: Role, side_channel: str = "127.0.0.1:5600") -> NodeInfo:
    node = Node(f"{role}-0", f"http://{at}:8000", (role,))
    return NodeInfo(node, ModelCard(("tiny",), "/models/tiny", 4096), "", {**LABELS, "side_channel": side_channel})


@pytest.mark.parametrize(
    ("prefill", "decode", "side_channel", "refused"),
    [
        ("10.0.0.1", "10.0.0.2", "127.0.0.1:5600", True),
        ("10.0.0.1", "127.0.0.1", "127.0.0.1:5600", True),
        ("10.0.0.1", "decode", "0.0.0.0:5600", True),
        ("[fd00::1]", "[fd00::2]", "[::1]:5600", True),
        ("10.0.0.1", "10.0.0.2", "localhost:5600", True),
        ("10.0.0.1", "10.0.0.2", "10.0.0.1:5600", False),
        ("10.0.0.1", "10.0.0.1", "127.0.0.1:5600", False),
        ("127.0.0.1", "127.0.0.1", "127.0.0.1:5600", False),
        ("prefill", "decode", "127.0.0.1:5600", False),
        ("10.0.0.1", "10.0.0.2", "", False),
    ],
)
def test_an_address_of_one_s_own_host_is_refused_where_decode_nodes_are_elsewhere(
    prefill: str, decode: str, side_channel: str, refused: bool
) -> None:
    """Names may lead anywhere: there the known-answer test shows it. Nobody asks a decode node's side channel."""
    give, take = reached(prefill, Role.PREFILL, side_channel), reached(decode, Role.DECODE)
    everyone = [give.node, take.node]
    found = [str(each) for each in check_compatibility(give, [], everyone).refusals]
    host, at = prefill.strip("[]"), side_channel
    cannot = f"side_channel: decode-0 cannot reach prefill-0 at {at} (the proxy does at {host})"
    text = f"{cannot}: set NODE_ADDRESS on prefill-0's host"
    assert [each.startswith(text) for each in found] == ([True] if refused else [])
    assert check_compatibility(take, [], everyone).refusals == ()
    assert check_compatibility(give, [], [give.node]).refusals == ()
