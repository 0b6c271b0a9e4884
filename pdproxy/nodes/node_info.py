"""What a node says of itself, read out of its answers: pure."""

import dataclasses
import json
from collections.abc import Mapping
from types import MappingProxyType

from prometheus_client.parser import text_string_to_metric_families

from pdproxy.nodes.node import CAPACITY_METRICS, Capacity, Node, Sample, read_capacity

INFO_METRIC = "pdproxy_connector_info"
"""The gauge whose labels tell the connector's settings."""

FINGERPRINT_METRIC = "pdproxy_connector_fingerprint"
"""The gauge with one series for each part of the fingerprint, its value as a label; see `NodeInfo.fingerprint`."""

WHOLE = "all"
"""The part that stands for all others: a digest of them."""


def _no_labels() -> Mapping[str, str]:
    return MappingProxyType({})


@dataclasses.dataclass(frozen=True, slots=True)
class ModelCard:
    """What ``GET /v1/models`` tells.

    Attributes:
        names: every name served here, base models before adapters.
        root: the path that the model was loaded from; "" where not told.
        max_model_len: the longest sequence in tokens; None where not told.
    """

    names: tuple[str, ...] = ()
    root: str = ""
    max_model_len: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class NodeInfo:
    """Everything that a preflight found out about one node.

    Attributes:
        node: as it was configured.
        models: its models.
        version: of vLLM; "" where not told.
        labels: of our connector; empty when the node runs another one or none.
        fingerprint: what the bytes of its KV cache depend on, value by part (such as `checkpoint`), and their digest
            as the part `WHOLE`. Empty for a node whose connector publishes none.
        capacity: of its cache; None where not told.
        ranks: data-parallel ranks behind its address.
    """

    node: Node
    models: ModelCard = dataclasses.field(default_factory=ModelCard)
    version: str = ""
    labels: Mapping[str, str] = dataclasses.field(default_factory=_no_labels)
    capacity: Capacity | None = None
    ranks: int = 1
    fingerprint: Mapping[str, str] = dataclasses.field(default_factory=_no_labels)

    def joined(self) -> Node:
        """The node with what was found filled in. What was configured wins."""
        model = self.node.model or next(iter(self.models.names), "")
        aliases = dict.fromkeys((*self.node.aliases, *(name for name in self.models.names if name != model)))
        return dataclasses.replace(
            self.node,
            model=model,
            aliases=tuple(aliases),
            cohort=self.cohort(),
            capacity=self.capacity,
            ranks=self.ranks,
            fingerprint=self.fingerprint,
            block_size=_number(self.labels.get("block_size")),
            max_model_len=self.models.max_model_len or 0,
        )

    def cohort(self) -> str:
        """Nodes of one cohort can exchange tickets; "" if nothing is known.

        The NIXL handshake hashes the vLLM version, and a ticket is refused where the fingerprints differ.
        """
        version, connector = self.labels.get("vllm_version", self.version), self.labels.get("connector_version")
        parts = (version, connector, self.fingerprint.get(WHOLE))
        return "+".join(part for part in parts if part is not None)

    def setting(self, name: str) -> str | None:
        """A setting as the node published it; None where it did not."""
        if name == "model":
            return self.labels.get("model") or self.models.root or None
        return self.labels.get(name)


def read_model_card(body: bytes) -> ModelCard:
    """The models of a ``/v1/models`` answer; an unusable answer tells nothing. Adapters have a ``parent``."""
    entries = [entry for entry in _list(_object(body).get("data")) if isinstance(_mapping(entry).get("id"), str)]
    base = [entry for entry in map(_mapping, entries) if not entry.get("parent")]
    adapters = [entry for entry in map(_mapping, entries) if entry.get("parent")]
    first = base[0] if base else {}
    root, longest = first.get("root"), first.get("max_model_len")
    return ModelCard(
        tuple(str(entry["id"]) for entry in (*base, *adapters)),
        root if isinstance(root, str) else "",
        longest if isinstance(longest, int) else None,
    )


def read_version(body: bytes) -> str:
    """The version of a ``/version`` answer; "" if unusable."""
    version = _object(body).get("version")
    return version if isinstance(version, str) else ""


def read_labels(body: bytes) -> Mapping[str, str]:
    """The labels of the connector's info metric in a ``/metrics`` answer; empty without one."""
    samples = _samples(body, INFO_METRIC + "{")
    return MappingProxyType(dict(samples[0][1])) if samples else _no_labels()


def read_fingerprint(body: bytes) -> Mapping[str, str]:
    """The parts of the fingerprint in a ``/metrics`` answer, in order; empty without one.

    Data-parallel ranks are one engine's copies and agree. Should they ever not, both values are given: such a node
    pairs only with one that is divided in the same way.
    """
    values: dict[str, set[str]] = {}
    for _, labels, _ in _samples(body, FINGERPRINT_METRIC + "{"):
        if "part" in labels and "value" in labels:
            values.setdefault(labels["part"], set()).add(labels["value"])
    return MappingProxyType({part: "|".join(sorted(told)) for part, told in values.items()})


def read_ranks(body: bytes) -> int:
    """How many ranks with our connector a ``/metrics`` answer speaks of; 1 where it does not say."""
    return max(1, len({labels.get("engine") for _, labels, _ in _samples(body, INFO_METRIC + "{")}))


def read_node_capacity(body: bytes) -> Capacity | None:
    """The capacity in a ``/metrics`` answer; None where it is not told, or in part."""
    return read_capacity(_samples(body, CAPACITY_METRICS))


def _samples(body: bytes, beginning: str) -> list[Sample]:
    """The samples whose lines begin like this; none where one of them cannot be read."""
    lines = [line for line in body.decode("utf-8", "replace").splitlines() if line.startswith(beginning)]
    try:
        families = list(text_string_to_metric_families("".join(line + "\n" for line in lines)))
    except ValueError:
        return []
    return [(sample.name, sample.labels, sample.value) for family in families for sample in family.samples]


def _number(text: str | None) -> int:
    return int(text) if text is not None and text.isdecimal() else 0


def _object(body: bytes) -> Mapping[str, object]:
    try:
        return _mapping(json.loads(body))
    except ValueError:
        return {}


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, dict) else {}


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []
