"""The facts that a node publishes about itself, read out of its answers. Pure."""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from pdproxy.nodes.cache_settings import CacheSettings, read_cache_settings
from pdproxy.nodes.hashing import Hashing, connector_hashing, stock_hashing
from pdproxy.nodes.node import Binding, Capacity, Node
from pdproxy.request import Json, read_json

INFO_METRIC = "pdproxy_connector_info"
"""The gauge whose labels are the connector's settings."""
FINGERPRINT_METRIC = "pdproxy_connector_fingerprint"
"""The gauge with one series for each part of the fingerprint, its value as a label."""
HASHING_METRIC = "pdproxy_connector_hashing"
"""The gauge whose labels say how the connector's engine hashes prompts."""
STOCK_CACHE_METRIC = "vllm:cache_config_info"
"""vLLM's own gauge, whose labels are the settings of its cache."""
CAPACITY_METRICS = "pdproxy_connector_capacity_"
"""The beginning of the names of the capacity gauges."""
WHOLE = "all"
"""The part of a fingerprint that is a digest of all others."""
CHAT_TEMPLATE = "chat_template"
"""The part of a fingerprint that an API server may know better than its engine."""
PROMPTS_PATH = "/v1/pdproxy/prompts"
"""Where it tells."""
_LONGEST_DIGEST = 128
_MADE_ANEW = frozenset({"created", "permission"})
"""Fields that vLLM makes anew for each answer of its list of models: the second of the answer, and an id of its own."""


def _empty() -> Mapping[str, str]:
    return MappingProxyType({})


@dataclasses.dataclass(frozen=True, slots=True)
class ModelCard:
    """The answer to ``GET /v1/models``.

    Attributes:
        names: every name served here, base models before adapters.
        root: the path that the model was loaded from; "" where missing.
        max_model_len: the longest sequence in tokens; None where missing.
        cards: each model's entry by name, as the node wrote it.
    """

    names: tuple[str, ...] = ()
    root: str = ""
    max_model_len: int | None = None
    cards: Mapping[str, Json] = dataclasses.field(default_factory=dict)

    def on(self, configured: Node, node: Node) -> Node:
        """A node that serves these models now: the one that it was configured for, and all others as aliases.

        It equals ``node`` where that serves the same already, in whatever second the list was made.
        """
        model = configured.model or node.model or next(iter(self.names), "")
        aliases = dict.fromkeys((*configured.aliases, *(name for name in self.names if name != model)))
        cards = node.cards if _lasting(node.cards) == _lasting(self.cards) else self.cards
        if model == node.model and tuple(aliases) == node.aliases and cards is node.cards:
            return node
        return dataclasses.replace(node, model=model, aliases=tuple(aliases), cards=cards)


def _lasting(cards: Mapping[str, Json]) -> dict[str, dict[str, Json]]:
    """The cards without what is made anew for each answer."""
    return {
        name: {key: value for key, value in card.items() if key not in _MADE_ANEW}
        for name, card in cards.items()
        if isinstance(card, dict)
    }


@dataclasses.dataclass(frozen=True, slots=True)
class NodeInfo:
    """The result of a preflight of one node; empty or None where the node does not publish it.

    Attributes:
        node: as it was configured.
        version: of vLLM.
        labels: the settings of our connector; empty when the node runs another one or none.
        fingerprint: value by part (such as `checkpoint`), with the digest of all as the part `WHOLE`.
        hashing: how its prefix cache hashes prompts.
        cache: how its prefix cache is set up.
        chat_template: digest of the chat template that its API server was given, in the fingerprint too; "" where it
            uses the model's own, which the engine knows, or does not tell.
    """

    node: Node
    models: ModelCard = dataclasses.field(default_factory=ModelCard)
    version: str = ""
    labels: Mapping[str, str] = dataclasses.field(default_factory=_empty)
    capacity: Capacity | None = None
    ranks: int = 1
    fingerprint: Mapping[str, str] = dataclasses.field(default_factory=_empty)
    hashing: Hashing | None = None
    cache: CacheSettings | None = None
    chat_template: str = ""
    _joined: Node = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_joined", self._fill_in())  # once: each node that joins is compared with all others

    def joined(self) -> Node:
        """The node with what was found filled in. What was configured wins."""
        return self._joined

    def _fill_in(self) -> Node:
        block_size, unit = self.labels.get("block_size", ""), self.fingerprint.get("prefix_match_unit", "")
        return dataclasses.replace(
            self.models.on(self.node, self.node),
            cohort=self.cohort(),
            capacity=self.capacity,
            ranks=self.ranks,
            fingerprint=self.fingerprint,
            block_size=int(block_size) if block_size.isdecimal() else 0,
            max_model_len=self.models.max_model_len or 0,
            prefix_match_unit=int(unit) if unit.isdecimal() else 0,
            can_resume=self.labels.get("resume") == "true",
            keeps=self.labels.get("keep_share", "") not in ("", "0", "0.0"),
            hashing=self.hashing,
            cache=self.cache,
        )

    def cohort(self) -> str:
        """Nodes of one cohort can exchange tickets; "" if nothing is known.

        The NIXL handshake hashes the vLLM version, and a ticket is refused where the fingerprints differ. Where API
        servers use other chat templates, a ticket is for another prompt.
        """
        version, connector = self.labels.get("vllm_version", self.version), self.labels.get("connector_version")
        parts = (version, connector, self.fingerprint.get(WHOLE), self.chat_template or None)
        return "+".join(part for part in parts if part is not None)

    def setting(self, name: str) -> str | None:
        """A setting as the node published it; None where it did not."""
        match name:
            case "model":
                return self.labels.get("model") or self.models.root or None
            case "max_model_len":
                return None if self.models.max_model_len is None else str(self.models.max_model_len)
            case _:
                return self.labels.get(name)


def read_node_info(node: Node, models: bytes, version: bytes, metrics: bytes, prompts: bytes = b"") -> NodeInfo:
    """The bodies of a node's ``/v1/models``, ``/version``, ``/metrics`` and `PROMPTS_PATH` together."""
    labels, capacity, ranks = read_labels(metrics), read_node_capacity(metrics), read_ranks(metrics)
    fingerprint, template = read_fingerprint(metrics), read_chat_template(prompts)
    if template in ("", fingerprint.get(CHAT_TEMPLATE)) or not fingerprint:
        template = ""
    else:
        fingerprint = MappingProxyType({**fingerprint, CHAT_TEMPLATE: template})
    card, hashing = read_model_card(models), read_hashing(metrics)
    cache = read_cache_settings(labels, _labels(metrics, STOCK_CACHE_METRIC))
    found = read_version(version), labels, capacity, ranks, fingerprint, hashing, cache, template
    return NodeInfo(node, card, *found)


def read_model_card(body: bytes) -> ModelCard:
    """The models of a ``/v1/models`` answer; empty where it is unusable. Adapters have a ``parent``."""
    listed = _object(body).get("data")
    entries = [entry for entry in (listed if isinstance(listed, list) else []) if isinstance(entry, dict)]
    named = [entry for entry in entries if isinstance(entry.get("id"), str)]
    base, adapters = [[entry for entry in named if bool(entry.get("parent")) is adapter] for adapter in (False, True)]
    first = base[0] if base else {}
    root, longest = first.get("root"), first.get("max_model_len")
    return ModelCard(
        tuple(entry["id"] for entry in (*base, *adapters)),
        root if isinstance(root, str) else "",
        longest if isinstance(longest, int) else None,
        {entry["id"]: entry for entry in named},
    )


def read_version(body: bytes) -> str:
    """The version of a ``/version`` answer; "" if unusable."""
    version = _object(body).get("version")
    return version if isinstance(version, str) else ""


def read_chat_template(body: bytes) -> str:
    """The digest in an answer from `PROMPTS_PATH`; "" if unusable."""
    template = _object(body).get("chat_template")
    return template if isinstance(template, str) and len(template) <= _LONGEST_DIGEST else ""


def read_labels(body: bytes) -> Mapping[str, str]:
    """The labels of the connector's info metric in a ``/metrics`` answer; empty without one."""
    return _labels(body, INFO_METRIC)


def _labels(body: bytes, metric: str) -> Mapping[str, str]:
    """The labels of a metric's first series; empty without one."""
    samples = samples_of(body, metric + "{")
    return MappingProxyType(dict(samples[0].labels)) if samples else _empty()


def read_fingerprint(body: bytes) -> Mapping[str, str]:
    """The parts of the fingerprint in a ``/metrics`` answer, in order; empty without one.

    Data-parallel ranks are one engine's copies and agree. Should they ever not, both values are given: such a node
    pairs only with one that is divided in the same way.
    """
    values: dict[str, set[str]] = {}
    for sample in samples_of(body, FINGERPRINT_METRIC + "{"):
        if "part" in sample.labels and "value" in sample.labels:
            values.setdefault(sample.labels["part"], set()).add(sample.labels["value"])
    return MappingProxyType({part: "|".join(sorted(found)) for part, found in values.items()})


def read_hashing(body: bytes) -> Hashing | None:
    """How a node hashes prompts, by a ``/metrics`` answer; None where it does not say, or its ranks disagree."""
    ours = {connector_hashing(sample.labels) for sample in samples_of(body, HASHING_METRIC + "{")}
    found = ours or {stock_hashing(sample.labels) for sample in samples_of(body, STOCK_CACHE_METRIC + "{")}
    return found.pop() if len(found) == 1 else None


def read_ranks(body: bytes) -> int:
    """The number of ranks with our connector in a ``/metrics`` answer; 1 where there is none."""
    return max(1, len({sample.labels.get("engine") for sample in samples_of(body, INFO_METRIC + "{")}))


def read_node_capacity(body: bytes) -> Capacity | None:
    """The capacity in a ``/metrics`` answer, added up over engines.

    None where it is missing in whole or in part: an engine publishes it with its first step.
    """
    samples = [sample for sample in samples_of(body, CAPACITY_METRICS) if math.isfinite(sample.value)]
    tokens = _values(samples, "tokens")
    state, longest = _values(samples, "sequences", "state"), _values(samples, "sequences", "max_model_len")
    bindings = (sample for sample in samples if sample.name == CAPACITY_METRICS + "binding" and sample.value)
    binding = next((sample.labels.get("group") for sample in bindings), None)
    if not tokens or not longest or binding not in set(Binding):
        return None
    return Capacity(sum(tokens), sum(state) if state else None, sum(longest), Binding(binding))


def _values(samples: Iterable[Sample], gauge: str, limit: str | None = None) -> list[int]:
    name = CAPACITY_METRICS + gauge
    return [int(each.value) for each in samples if each.name == name and each.labels.get("limit") == limit]


def samples_of(body: bytes, beginning: str | tuple[str, ...]) -> list[Sample]:
    """The samples whose lines begin like this, or like one of these; none where one of them cannot be read."""
    lines = [line for line in body.decode("utf-8", "replace").splitlines() if line.startswith(beginning)]
    try:
        families = list(text_string_to_metric_families("".join(line + "\n" for line in lines)))
    except ValueError:
        return []
    return [sample for family in families for sample in family.samples]


def _object(body: bytes) -> Mapping[str, object]:
    try:
        value = read_json(body)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
