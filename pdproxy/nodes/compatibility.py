"""Whether nodes can work together, judged before the first request instead of in the middle of one: pure."""

import dataclasses
from collections.abc import Iterable

from pdproxy.nodes.node import Role
from pdproxy.nodes.node_info import NodeInfo

MUST_AGREE = (
    "model",
    "block_size",
    "mamba_block_size",
    "mamba_cache_mode",
    "kv_cache_dtype",
    "dtype",
    "ssm_layout",
    "signed",
)
"""Settings in which a prefill and a decode node of one cohort may not differ: the handshake (`model` as a path,
`dtype`, `kv_cache_dtype`), the layout of what is read, or the ticket would not fit.

Nodes that publish fingerprints and differ in what these name are of two cohorts, and never compared. What is left for
them is what the handshake or the tickets need beyond equal bytes: `model`, whose path no fingerprint has, and `signed`.
"""

SHOULD_AGREE = ("tp_size", "prefix_caching", "lease_seconds")
"""Settings that may differ and mostly do so by mistake."""

_ONE_PATH = (
    "vLLM's NIXL handshake compares the text of the path, so that no hand-over would succeed: mount or link the model"
    " at one path on all nodes and give --model that path; clients' name for it is --served-model-name"
)

_WRONG_ROLE = {Role.PREFILL: "kv_consumer", Role.DECODE: "kv_producer"}


@dataclasses.dataclass(frozen=True, slots=True)
class Incompatibility:
    """One thing to know about a node, by the name of the setting."""

    setting: str
    sentence: str

    def __str__(self) -> str:
        return f"{self.setting}: {self.sentence}"


@dataclasses.dataclass(frozen=True, slots=True)
class Compatibility:
    """What the preflight makes of a node: any refusal keeps it out."""

    refusals: tuple[Incompatibility, ...] = ()
    warnings: tuple[Incompatibility, ...] = ()


def check_compatibility(info: NodeInfo, others: Iterable[NodeInfo]) -> Compatibility:
    """Judge a node by itself and against the nodes that already serve.

    Nodes of another model, of another cohort or of the same role never exchange tickets: they are not compared.
    """
    partners = [other for other in others if _may_pair(info, other)]
    refusals = [*_wrong_model(info), *_wrong_role(info), *_differences(info, partners, MUST_AGREE)]
    warnings = [*_weaknesses(info), *_differences(info, partners, SHOULD_AGREE), *_lengths(info, partners)]
    return Compatibility(tuple(refusals), tuple(warnings))


def _may_pair(info: NodeInfo, other: NodeInfo) -> bool:
    mine, theirs = info.joined(), other.joined()
    return (
        mine.role is not theirs.role
        and mine.pairs_with(theirs.cohort)
        and "" not in (mine.model, theirs.model)
        and (theirs.serves(mine.model) or mine.serves(theirs.model))
    )


def _wrong_model(info: NodeInfo) -> list[Incompatibility]:
    wanted, names = info.node.model, info.models.names
    if not wanted or not names or wanted in names:
        return []
    return [Incompatibility("model", f"the node serves {', '.join(names)}, not {wanted}")]


def _wrong_role(info: NodeInfo) -> list[Incompatibility]:
    role = info.labels.get("role")
    if role != _WRONG_ROLE[info.node.role]:
        return []
    return [Incompatibility("kv_role", f"the node runs as {role} and cannot be a {info.node.role} node")]


def _differences(info: NodeInfo, partners: Iterable[NodeInfo], settings: Iterable[str]) -> list[Incompatibility]:
    """At most one finding per setting: the first partner that differs."""
    found: dict[str, Incompatibility] = {}
    for other in partners:
        for setting in settings:
            mine, theirs = info.setting(setting), other.setting(setting)
            if mine is not None and theirs is not None and mine != theirs:
                values, advice = f"{mine} here, {theirs} on {other.node.name}", _advice(setting, info, other)
                found.setdefault(setting, Incompatibility(setting, f"{values}: {advice}" if advice else values))
    return list(found.values())


def _advice(setting: str, info: NodeInfo, other: NodeInfo) -> str:
    """What to do about a difference, where its name does not say it all."""
    match setting:
        case "model":
            return _ONE_PATH
        case "block_size":
            return block_size_advice(info, other)
        case _:
            return ""


def block_size_advice(info: NodeInfo, other: NodeInfo) -> str:
    """Which tensor-parallel degrees and --block-size go together, where two nodes differ in both; "" elsewhere.

    vLLM (0.32 and 0.33, `Platform._align_hybrid_block_size`) makes the attention block of a hybrid model the least
    multiple of --block-size (or of the backend's own) whose page holds a rank's mamba state. The state shrinks with
    each rank, a token's attention page only until a rank has a single KV head: up to that degree all sizes are equal.
    """
    sizes = [told.labels.get("block_size", "") for told in (info, other)]
    degrees = [told.labels.get("tp_size", "") for told in (info, other)]
    if degrees[0] == degrees[1] or sizes[0] == sizes[1] or not all(size.isdecimal() for size in sizes):
        return ""
    return (
        f"a hybrid model's block size follows --tensor-parallel-size ({degrees[0]} here, {degrees[1]} there). Pairs"
        " that go together: equal degrees; any two degrees up to the model's number of KV heads; and any two with"
        f" --block-size {max(map(int, sizes))} on both"
    )


def _weaknesses(info: NodeInfo) -> list[Incompatibility]:
    if not info.labels:
        return [
            Incompatibility(
                "kv_connector",
                "not pdproxy's: tickets are neither checked nor released early, and it pairs only with nodes like it",
            )
        ]
    weak = []
    if info.node.role is Role.DECODE and info.labels.get("failure_policy", "recompute") != "recompute":
        weak.append(
            Incompatibility("kv_load_failure_policy", "a failed read ends the request; recompute would save it")
        )
    if info.labels.get("prefix_caching") == "false":
        weak.append(Incompatibility("enable_prefix_caching", "off: nothing is reused between turns"))
    return weak


def _lengths(info: NodeInfo, partners: Iterable[NodeInfo]) -> list[Incompatibility]:
    mine = info.models.max_model_len
    for other in partners:
        theirs = other.models.max_model_len
        if mine is not None and theirs is not None and mine != theirs:
            return [
                Incompatibility("max_model_len", f"{mine} here, {theirs} on {other.node.name}: the smaller one counts")
            ]
    return []
