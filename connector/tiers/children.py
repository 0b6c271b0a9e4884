"""The children: what an operator configures of them in `kv_connector_extra_config`, and the connectors themselves.

    "kv_connector_extra_config": {
      "pdproxy_decide_within": 0.5, "pdproxy_load_deadline": 30.0,
      "connectors": [
        {"kv_connector": "NixlConnector", "kv_connector_module_path": "pdproxy_connector.nixl_connector",
         "kv_role": "kv_consumer", "kv_load_failure_policy": "recompute",
         "kv_connector_extra_config": {"name": "pull", "load_weight": 1.0}},
        {"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
         "kv_connector_extra_config": {"name": "memory", "load_weight": 2.0, "block_size": 512}}]}

`load_weight` is what a token that this child loads is worth; with 0 the child only saves.
"""

import inspect
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata

from ..config import ConfigError

DECIDE_WITHIN = 0.5
LONGEST_DECISION = 60.0
LOAD_DEADLINE = 30.0
LONGEST_LOAD = 3600.0
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


@dataclass(frozen=True, slots=True)
class ChildSettings:
    """One child: the operator's name for it, vLLM's for its class, its weight, and its offload unit in tokens."""

    name: str
    connector: str
    weight: float = 1.0
    unit: int | None = None


@dataclass(frozen=True, slots=True)
class MultiSettings:
    """`decide_within`: seconds that a child may take to answer whether it has something. `load_deadline`: seconds that
    a load may take before its request computes; a child that hands over keeps its own deadline instead."""

    children: tuple[ChildSettings, ...]
    decide_within: float = DECIDE_WITHIN
    load_deadline: float = LOAD_DEADLINE

    @classmethod
    def from_extra(cls, failure_policy: str, extra: Mapping[str, Any]) -> "MultiSettings":
        """Raises ConfigError, with a sentence that says what to change."""
        if failure_policy != "recompute":
            raise ConfigError(
                f"kv_load_failure_policy is {failure_policy!r}: set it to 'recompute', so that a load that fails falls "
                "back to the next best child or to computing instead of failing the request."
            )
        listed = extra.get("connectors")
        if not isinstance(listed, list) or not listed:
            raise ConfigError("kv_connector_extra_config.connectors is empty: list the connectors to choose from.")
        names = _names(listed)
        return cls(
            children=tuple(_child(name, entry) for name, entry in zip(names, listed, strict=True)),
            decide_within=_seconds(extra.get("pdproxy_decide_within", DECIDE_WITHIN)),
            load_deadline=_deadline(extra.get("pdproxy_load_deadline", LOAD_DEADLINE)),
        )


def _names(listed: Sequence[Any]) -> list[str]:
    names = [_given_name(entry) for entry in listed]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ConfigError(
            f"two connectors are called {min(twice)!r}: give each its own kv_connector_extra_config.name."
        )
    return names


def _given_name(entry: Any) -> str:
    if not isinstance(entry, dict) or not isinstance(entry.get("kv_connector"), str):
        raise ConfigError("an entry of kv_connector_extra_config.connectors has no kv_connector.")
    name = _extra(entry).get("name", entry["kv_connector"])
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(f"the connector name {name!r} is not 1 to 64 letters, digits, '_', '.' or '-'.")
    return name


def _child(name: str, entry: Mapping[str, Any]) -> ChildSettings:
    extra = _extra(entry)
    weight = extra.get("load_weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight) or weight < 0:
        raise ConfigError(f"load_weight of {name!r} is {weight!r}: use a number, 0 or larger.")
    return ChildSettings(name, entry["kv_connector"], float(weight), _unit(name, extra))


def _unit(name: str, extra: Mapping[str, Any]) -> int | None:
    for key in ("block_size", "chunk_size"):
        unit = extra.get(key)
        if unit is None:
            continue
        if isinstance(unit, bool) or not isinstance(unit, int) or unit <= 0:
            raise ConfigError(f"{key} of {name!r} is {unit!r}: use a whole number of tokens over 0.")
        return unit
    return None


def _extra(entry: Mapping[str, Any]) -> Mapping[str, Any]:
    extra = entry.get("kv_connector_extra_config", {})
    if not isinstance(extra, dict):
        raise ConfigError("kv_connector_extra_config of a connector is not an object.")
    return extra


def _seconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= LONGEST_DECISION:
        raise ConfigError(
            f"pdproxy_decide_within is {value!r}: use a number of seconds from 0 to {LONGEST_DECISION:.0f}."
        )
    return float(value)


def _deadline(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= LONGEST_LOAD:
        raise ConfigError(
            f"pdproxy_load_deadline is {value!r}: use a number of seconds over 0 and up to {LONGEST_LOAD:.0f}."
        )
    return float(value)


Source = tuple[str, str | None]
"""Where a child's class comes from: `kv_connector` and `kv_connector_module_path`."""


@dataclass(frozen=True, slots=True)
class Child:
    """One child connector. `number`: its place in the operator's list. `consumes`: its own `kv_role` accepts
    tickets."""

    number: int
    settings: ChildSettings
    connector: KVConnectorBase_V1
    consumes: bool = True
    source: Source = ("", None)

    @property
    def completes_hybrid_hits(self) -> bool:
        """Whether it can load onto a local hit of attention alone, since it brings the state. A prefill node's
        cannot."""
        return self.consumes and bool(self.connector.supports_divergent_local_hybrid_hits)

    @property
    def hands_over(self) -> bool:
        """Whether it hands requests over between nodes. A ticket is for one load."""
        return hands_over(type(self.connector))

    def preempted(self, request_ids: Sequence[str], metadata: KVConnectorMetadata | None) -> None:
        """Call its `handle_preemptions` in the signature that it has."""
        if wants_ids(type(self.connector)):
            self.connector.handle_preemptions(set(request_ids))
        elif metadata is not None:
            self.connector.handle_preemptions(metadata)


def make_children(
    settings: Sequence[ChildSettings], listed: Sequence[Mapping[str, Any]], connectors: Sequence[KVConnectorBase_V1]
) -> tuple[Child, ...]:
    """The children, from the operator's list of them and the connectors that vLLM made from it."""
    configs = [KVTransferConfig(**entry) for entry in listed]
    return tuple(
        Child(number, each, connector, config.is_kv_consumer, (config.kv_connector, config.kv_connector_module_path))
        for number, (each, connector, config) in enumerate(zip(settings, connectors, configs, strict=True))
    )


def hands_over(connector_class: type[Any]) -> bool:
    """Whether a class of connectors has a handshake with other nodes."""
    return connector_class.get_handshake_metadata is not KVConnectorBase_V1.get_handshake_metadata


def wants_ids(connector_class: type[Any]) -> bool:
    """Whether a class's `handle_preemptions` takes request ids, as it did before it took metadata."""
    _, *parameters = inspect.signature(connector_class.handle_preemptions).parameters
    return bool(parameters) and "req" in parameters[0]
