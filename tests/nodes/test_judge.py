"""Nodes that cannot work together are refused by the name of the setting."""

from collections.abc import Mapping

import pytest

from pdproxy.nodes.facts import Card, Facts
from pdproxy.nodes.judge import MUST_AGREE, SHOULD_AGREE, judge
from pdproxy.nodes.node import Node, Role
from tests.nodes.village import LABELS


def facts(name: str, role: Role, labels: Mapping[str, str] = LABELS, model: str = "", serves: str = "tiny") -> Facts:
    """A node with our connector; ``labels`` change the usual ones."""
    node = Node(name, f"http://{name}", role, model)
    return Facts(node, Card((serves,), "/models/tiny", 4096), "0.32.0", {**LABELS, **labels})


PREFILL = facts("p1", Role.PREFILL)


def test_equal_settings_are_fine() -> None:
    verdict = judge(facts("d1", Role.DECODE), [PREFILL])
    assert (verdict.refusals, verdict.warnings) == ((), ())


@pytest.mark.parametrize("setting", MUST_AGREE)
def test_a_setting_that_must_agree_is_refused_by_its_name(setting: str) -> None:
    verdict = judge(facts("d1", Role.DECODE, {setting: "other"}), [PREFILL, facts("p2", Role.PREFILL)])
    (finding,) = verdict.refusals
    assert str(finding).startswith(f"{setting}: other here, {LABELS[setting]} on p1")
    assert ("--model" in str(finding)) == (setting == "model")


@pytest.mark.parametrize("setting", SHOULD_AGREE)
def test_a_setting_that_should_agree_is_warned_of(setting: str) -> None:
    verdict = judge(facts("d1", Role.DECODE, {setting: "other"}), [PREFILL])
    assert verdict.refusals == ()
    assert [finding.setting for finding in verdict.warnings] == [setting]


def test_nodes_that_never_exchange_tickets_are_not_compared() -> None:
    other = {"block_size": "16"}
    assert judge(facts("d1", Role.DECODE, other), [facts("d2", Role.DECODE)]).refusals == ()
    assert judge(facts("d1", Role.DECODE, {**other, "vllm_version": "0.33.0"}), [PREFILL]).refusals == ()
    assert judge(facts("d1", Role.DECODE, other, serves="big"), [PREFILL]).refusals == ()


def test_a_model_path_is_compared_even_without_our_connector() -> None:
    plain = [Facts(Node(name, name, role), Card(("tiny",), root), "0.32.0")
             for name, role, root in (("p1", Role.PREFILL, "/a"), ("d1", Role.DECODE, "/b"))]  # fmt: skip
    assert [finding.setting for finding in judge(plain[1], [plain[0]]).refusals] == ["model"]


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
    refusals = judge(facts("n", role, {"role": kv_role}), []).refusals
    assert [finding.setting for finding in refusals] == ([] if fits else ["kv_role"])


def test_a_node_that_serves_another_model_than_configured_is_refused() -> None:
    assert [finding.setting for finding in judge(facts("d1", Role.DECODE, model="huge"), []).refusals] == ["model"]
    assert judge(facts("d1", Role.DECODE, model="tiny"), []).refusals == ()


def test_a_node_without_our_connector_is_let_in_with_a_warning() -> None:
    plain = Facts(Node("d1", "http://d1", Role.DECODE), Card(("tiny",), "/models/tiny"), "0.32.0")
    verdict = judge(plain, [PREFILL])
    assert verdict.refusals == ()
    assert [finding.setting for finding in verdict.warnings] == ["kv_connector"]


def test_weak_settings_are_warned_of() -> None:
    weak = facts("d1", Role.DECODE, {"failure_policy": "fail", "prefix_caching": "false"})
    settings = [finding.setting for finding in judge(weak, []).warnings]
    assert settings == ["kv_load_failure_policy", "enable_prefix_caching"]
    assert judge(facts("p2", Role.PREFILL, {"failure_policy": "fail"}), []).warnings == ()


def test_different_lengths_are_warned_of() -> None:
    short = Facts(Node("d1", "http://d1", Role.DECODE), Card(("tiny",), "/models/tiny", 1024), "0.32.0", LABELS)
    assert [finding.setting for finding in judge(short, [PREFILL]).warnings] == ["max_model_len"]


def test_sizes_that_follow_the_tensor_parallel_degree_are_explained() -> None:
    """Qwen3-Next's sizes at TP 2 and 8."""
    wide = facts("d1", Role.DECODE, {"tp_size": "8", "block_size": "272"})
    narrow = facts("p1", Role.PREFILL, {"tp_size": "2", "block_size": "1056"})
    (finding,) = judge(wide, [narrow]).refusals
    assert str(finding) == (
        "block_size: 272 here, 1056 on p1: a hybrid model's block size follows --tensor-parallel-size (8 here, 2 there)"
        ". Pairs that go together: equal degrees; any two degrees up to the model's number of KV heads; and any two"
        " with --block-size 1056 on both"
    )
    assert judge(facts("d1", Role.DECODE, {"tp_size": "8"}), [narrow, PREFILL]).refusals[0].setting == "block_size"
