"""Whether nodes can work together, judged before the first request instead of in the middle of one: pure."""

import dataclasses
from collections.abc import Iterable

from pdproxy.nodes.facts import Facts
from pdproxy.nodes.node import Role

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
class Finding:
    """One thing to know about a node, by the name of the setting."""

    setting: str
    sentence: str

    def __str__(self) -> str:
        return f"{self.setting}: {self.sentence}"


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """What the preflight makes of a node: any refusal keeps it out."""

    refusals: tuple[Finding, ...] = ()
    warnings: tuple[Finding, ...] = ()


def judge(facts: Facts, others: Iterable[Facts]) -> Verdict:
    """Judge a node by itself and against the nodes that already serve.

    Nodes of another model, of another cohort or of the same role never exchange tickets: they are not compared.
    """
    partners = [other for other in others if _may_pair(facts, other)]
    refusals = [*_wrong_model(facts), *_wrong_role(facts), *_differences(facts, partners, MUST_AGREE)]
    warnings = [*_weaknesses(facts), *_differences(facts, partners, SHOULD_AGREE), *_lengths(facts, partners)]
    return Verdict(tuple(refusals), tuple(warnings))


def _may_pair(facts: Facts, other: Facts) -> bool:
    mine, theirs = facts.joined(), other.joined()
    return (
        mine.role is not theirs.role
        and mine.pairs_with(theirs.cohort)
        and "" not in (mine.model, theirs.model)
        and (theirs.serves(mine.model) or mine.serves(theirs.model))
    )


def _wrong_model(facts: Facts) -> list[Finding]:
    wanted, names = facts.node.model, facts.card.names
    if not wanted or not names or wanted in names:
        return []
    return [Finding("model", f"the node serves {', '.join(names)}, not {wanted}")]


def _wrong_role(facts: Facts) -> list[Finding]:
    role = facts.labels.get("role")
    if role != _WRONG_ROLE[facts.node.role]:
        return []
    return [Finding("kv_role", f"the node runs as {role} and cannot be a {facts.node.role} node")]


def _differences(facts: Facts, partners: Iterable[Facts], settings: Iterable[str]) -> list[Finding]:
    """At most one finding per setting: the first partner that differs."""
    found: dict[str, Finding] = {}
    for other in partners:
        for setting in settings:
            mine, theirs = facts.setting(setting), other.setting(setting)
            if mine is not None and theirs is not None and mine != theirs:
                values, advice = f"{mine} here, {theirs} on {other.node.name}", _advice(setting, facts, other)
                found.setdefault(setting, Finding(setting, f"{values}: {advice}" if advice else values))
    return list(found.values())


def _advice(setting: str, facts: Facts, other: Facts) -> str:
    """What to do about a difference, where its name does not say it all."""
    match setting:
        case "model":
            return _ONE_PATH
        case "block_size":
            return block_size_advice(facts, other)
        case _:
            return ""


def block_size_advice(facts: Facts, other: Facts) -> str:
    """Which tensor-parallel degrees and --block-size go together, where two nodes differ in both; "" elsewhere.

    vLLM (0.32 and 0.33, `Platform._align_hybrid_block_size`) makes the attention block of a hybrid model the least
    multiple of --block-size (or of the backend's own) whose page holds a rank's mamba state. The state shrinks with
    each rank, a token's attention page only until a rank has a single KV head: up to that degree all sizes are equal.
    """
    sizes = [told.labels.get("block_size", "") for told in (facts, other)]
    degrees = [told.labels.get("tp_size", "") for told in (facts, other)]
    if degrees[0] == degrees[1] or sizes[0] == sizes[1] or not all(size.isdecimal() for size in sizes):
        return ""
    return (
        f"a hybrid model's block size follows --tensor-parallel-size ({degrees[0]} here, {degrees[1]} there). Pairs"
        " that go together: equal degrees; any two degrees up to the model's number of KV heads; and any two with"
        f" --block-size {max(map(int, sizes))} on both"
    )


def _weaknesses(facts: Facts) -> list[Finding]:
    if not facts.labels:
        return [
            Finding(
                "kv_connector",
                "not pdproxy's: tickets are neither checked nor released early, and it pairs only with nodes like it",
            )
        ]
    weak = []
    if facts.node.role is Role.DECODE and facts.labels.get("failure_policy", "recompute") != "recompute":
        weak.append(Finding("kv_load_failure_policy", "a failed read ends the request; recompute would save it"))
    if facts.labels.get("prefix_caching") == "false":
        weak.append(Finding("enable_prefix_caching", "off: nothing is reused between turns"))
    return weak


def _lengths(facts: Facts, partners: Iterable[Facts]) -> list[Finding]:
    mine = facts.card.max_model_len
    for other in partners:
        theirs = other.card.max_model_len
        if mine is not None and theirs is not None and mine != theirs:
            return [Finding("max_model_len", f"{mine} here, {theirs} on {other.node.name}: the smaller one counts")]
    return []
