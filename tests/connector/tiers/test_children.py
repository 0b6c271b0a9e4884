from typing import Any

import pytest

from connector.config import ConfigError
from connector.tiers.children import ChildSettings, MultiSettings

NIXL = {"kv_connector": "NixlConnector"}


def entry(**extra: Any) -> dict[str, Any]:
    return {**NIXL, "kv_connector_extra_config": extra}


def read(*children: Any, policy: str = "recompute", **extra: Any) -> MultiSettings:
    return MultiSettings.from_extra(policy, {"connectors": list(children), **extra})


def test_a_child_weighs_one_and_is_called_by_its_class_unless_configured() -> None:
    settings = read(NIXL, entry(name="disk", load_weight=2, block_size=512), pdproxy_decide_within=0)
    assert settings.children == (
        ChildSettings("NixlConnector", "NixlConnector", 1.0, None),
        ChildSettings("disk", "NixlConnector", 2.0, 512),
    )
    assert settings.decide_within == 0.0


@pytest.mark.parametrize(
    ("children", "message"),
    [
        ([], "list the connectors"),
        ([7], "no kv_connector"),
        ([{"kv_connector": None}], "no kv_connector"),
        ([{**NIXL, "kv_connector_extra_config": []}], "not an object"),
        ([NIXL, NIXL], "two connectors are called 'NixlConnector'"),
        ([entry(name="*selection*")], "letters, digits"),
        ([entry(name="")], "letters, digits"),
        ([entry(name=5)], "letters, digits"),
        ([entry(name="a", load_weight=-1)], "load_weight of 'a' is -1"),
        ([entry(load_weight=True)], "load_weight"),
        ([entry(load_weight="2")], "load_weight"),
        ([entry(load_weight=float("nan"))], "load_weight"),
        ([entry(load_weight=float("inf"))], "load_weight"),
        ([entry(name="a", block_size=0)], "block_size of 'a' is 0"),
        ([entry(chunk_size="256")], "chunk_size"),
    ],
)
def test_what_cannot_work_is_refused_in_a_sentence(children: list[Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("*", r"\*")):
        read(*children)


def test_a_node_must_recompute_what_failed_to_load() -> None:
    with pytest.raises(ConfigError, match="'recompute'"):
        read(NIXL, policy="fail")


def test_a_load_has_thirty_seconds_unless_configured() -> None:
    assert read(NIXL).load_deadline == 30.0
    assert read(NIXL, pdproxy_load_deadline=2).load_deadline == 2.0


@pytest.mark.parametrize("seconds", [0, -1, 3601, "1", True, None, float("nan")])
def test_a_load_s_deadline_is_a_number_of_seconds(seconds: Any) -> None:
    with pytest.raises(ConfigError, match="pdproxy_load_deadline"):
        read(NIXL, pdproxy_load_deadline=seconds)


@pytest.mark.parametrize("seconds", [-1, 61, "1", True, None])
def test_the_deadline_is_a_number_of_seconds(seconds: Any) -> None:
    with pytest.raises(ConfigError, match="pdproxy_decide_within"):
        read(NIXL, pdproxy_decide_within=seconds)
