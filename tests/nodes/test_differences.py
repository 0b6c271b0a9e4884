"""Why nodes exchange no tickets, part by part, and what the operator should align."""

from collections.abc import Mapping

import pytest

from pdproxy.nodes.compatibility import ADVICE, differences, differences_from_partners
from pdproxy.nodes.node import Node, Role
from pdproxy.nodes.node_info import ModelCard, NodeInfo
from tests.nodes.fake_pool import LABELS

PARTS = {"checkpoint": "c1", "state_dtypes": "float32", "rope": "theta=1e4", "all": "feed"}


def info(
    name: str,
    parts: Mapping[str, str] = PARTS,
    labels: Mapping[str, str] | None = None,
    model: str = "tiny",
    version: str = "0.32.0",
) -> NodeInfo:
    """A node whose role is its first letter; ``parts`` None for one whose connector has no fingerprint."""
    node = Node(name, f"http://{name}", (Role.PREFILL if name[0] == "p" else Role.DECODE,))
    labels = {**LABELS, "vllm_version": version} if labels is None else labels
    return NodeInfo(node, ModelCard((model,), "/models/tiny"), version, labels, fingerprint=parts)


def but(**parts: str) -> Mapping[str, str]:
    return {**PARTS, "all": "-".join(parts.values()), **parts}


def test_a_node_with_a_partner_has_no_differences() -> None:
    assert differences_from_partners(info("d1"), [info("p1"), info("p2", but(checkpoint="c2"))]) == ()
    assert differences_from_partners(info("d1"), []) == ()
    assert differences_from_partners(info("d1"), [info("d2", but(checkpoint="c2"))]) == (), "of the same role"
    assert differences_from_partners(info("d1"), [info("p1", but(checkpoint="c2"), model="big")]) == ()


def test_each_part_is_named_with_what_to_align() -> None:
    (found,) = differences_from_partners(info("d1", but(state_dtypes="bfloat16")), [info("p1")])
    assert str(found) == (
        "state_dtypes: bfloat16 here, float32 on p1: the same --mamba-ssm-cache-dtype and --mamba-cache-dtype"
    )


def test_it_is_compared_with_the_nearest() -> None:
    others = [info("p1", but(checkpoint="c2", rope="theta=1e6")), info("p2", but(rope="theta=1e6"))]
    assert [found.setting for found in differences_from_partners(info("d1"), others)] == ["rope"]
    assert "p2" in str(differences_from_partners(info("d1"), others)[0])


def test_other_versions_are_named_too() -> None:
    found = differences_from_partners(info("d1", version="0.33.0"), [info("p1")])
    assert [str(each) for each in found] == ["vllm_version: 0.33.0 here, 0.32.0 on p1: run the same vLLM release"]


@pytest.mark.parametrize("labels", [LABELS, {}])
def test_a_node_without_a_fingerprint_lacks_one(labels: Mapping[str, str]) -> None:
    found = {each.setting for each in differences(info("d1", {}, labels=labels), info("p1"))}
    assert "fingerprint" in found
    assert ("connector_version" in found) == (labels == {})


def test_a_part_that_we_do_not_know_is_named_as_it_is() -> None:
    (found,) = differences(info("d1", but(zebra="yes")), info("p1"))
    assert str(found) == "zebra: yes here, not told on p1"


def test_known_parts_come_first() -> None:
    other = info("d1", but(zebra="yes", rope="theta=1e6", checkpoint="c2"))
    assert [found.setting for found in differences(other, info("p1"))] == ["rope", "checkpoint", "zebra"]


def test_block_sizes_are_explained_by_the_tensor_parallel_degree() -> None:
    wide = info("d1", but(block_sizes="272"), {**LABELS, "tp_size": "8", "block_size": "272"})
    narrow = info("p1", but(block_sizes="1056"), {**LABELS, "tp_size": "2", "block_size": "1056"})
    (found,) = differences(wide, narrow)
    assert "--block-size 1056 on both" in str(found)
    same = info("p1", but(block_sizes="1056"), {**LABELS, "tp_size": "8", "block_size": "1056"})
    assert str(differences(wide, same)[0]).endswith("on p1: the same --block-size")


def test_every_part_of_the_connectors_fingerprint_has_advice() -> None:
    """The two share no code: the proxy must have advice for every part that the connector names."""
    fingerprint = pytest.importorskip("connector.fingerprint")
    assert set(fingerprint.ADVICE) <= set(ADVICE)
