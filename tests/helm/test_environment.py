"""A container's variables: each name once, for a list with a name twice cannot be applied on the server's side."""

import re
from collections.abc import Collection, Iterator
from typing import Any

import pytest

from tests.helm.conftest import Rendered
from tests.helm.engine import KINDS, Engine, Manifest, Manifests, only_container, read_values, value_files
from tests.helm.settings import pod_of

ALL = pytest.mark.parametrize("values", value_files())
PARTS = (*KINDS, "proxy")


def containers(manifests: Manifests) -> Iterator[tuple[str, Manifest]]:
    """Every container with the part of the values that its own variables come from; of a group both."""
    yield "proxy", only_container(pod_of(manifests))
    for role in manifests.kinds():
        yield role, only_container(manifests.node(role))
    for group in manifests.of("LeaderWorkerSet"):
        role = group["metadata"]["name"].rpartition("-")[2]
        yield role, only_container(group["spec"]["leaderWorkerTemplate"]["workerTemplate"])


def variables(container: Manifest) -> dict[str, Any]:
    """By name. Raises ValueError for a name that is there twice, or that is referred to before it is there."""
    known: dict[str, Any] = {}
    for each in container["env"]:
        late = set(re.findall(r"\$\((\w+)\)", each.get("value", ""))) - known.keys()
        if each["name"] in known or late:
            raise ValueError(f"{each['name']} is there twice, or comes before {late}")
        known[each["name"]] = each.get("value", each.get("valueFrom"))
    return known


def with_variables(values: str, found: list[dict[str, str]]) -> dict[str, Any]:
    """A values file with more variables in every part."""
    said = read_values(value_files()[values])
    return {**said, **{part: {**said.get(part, {}), "extraEnv": found} for part in PARTS}}


@ALL
def test_every_name_is_there_once(rendered: Rendered, values: str) -> None:
    for _, container in containers(rendered(values)):
        assert variables(container)


def replaces(helm: Engine, values: str, names: Collection[str]) -> None:
    """One's own variables take the place of the chart's, which keeps the others as they are."""
    plain = containers(helm.manifests(with_variables(values, [])))
    own = containers(helm.manifests(with_variables(values, [{"name": name, "value": "mine"} for name in names])))
    for (_, before), (_, after) in zip(plain, own, strict=True):
        assert variables(after) == {**variables(before), **dict.fromkeys(names, "mine")}


def names_in(helm: Engine, values: str) -> list[str]:
    """The names of all the chart's variables."""
    found = containers(helm.manifests(with_variables(values, [])))
    return sorted({name for _, container in found for name in variables(container)})


REPLACED = pytest.mark.parametrize("values", ["default", "full-values"])


@REPLACED
@pytest.mark.parametrize("first", [0, 1])
def test_ones_own_replaces_the_charts_whatever_it_is(helm: Engine, values: str, first: int) -> None:
    """Every second one at once: each is replaced, and left, beside others that are left, and replaced."""
    replaces(helm, values, names_in(helm, values)[first::2])


@pytest.mark.long
@REPLACED
def test_ones_own_replaces_one_alone(helm: Engine, values: str) -> None:
    for name in names_in(helm, values):
        replaces(helm, values, [name])


def test_one_may_refer_to_the_charts_and_the_charts_to_ones_own(helm: Engine) -> None:
    """For example another interface's address for the side channel."""
    more = [{"name": "RDMA_IP", "value": "10.9.0.7"}, {"name": "POD_IP", "value": "$(RDMA_IP)"}]
    manifests = helm.manifests({"decode": {"extraEnv": [*more, {"name": "PEER", "value": "$(HF_HOME)/peer"}]}})
    known = variables(only_container(manifests.node("decode")))
    assert (known["POD_IP"], known["VLLM_NIXL_SIDE_CHANNEL_HOST"]) == ("$(RDMA_IP)", "$(POD_IP)")
    assert known["PEER"] == "$(HF_HOME)/peer"


def test_a_source_may_replace_a_value_and_the_other_way_round(helm: Engine) -> None:
    source = {"secretKeyRef": {"name": "hub", "key": "token"}}
    more = [{"name": "UCX_TLS", "valueFrom": source}, {"name": "VLLM_API_KEY", "value": "mine"}]
    known = variables(only_container(helm.manifests({"prefill": {"extraEnv": more}}).node("prefill")))
    assert (known["UCX_TLS"], known["VLLM_API_KEY"]) == (source, "mine")
