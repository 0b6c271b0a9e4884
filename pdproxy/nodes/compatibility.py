"""Whether nodes can work together, by what they publish, and what to align where they cannot. Pure.

- `check_compatibility`: settings that would fail in the middle of requests keep a node out, others are warned of.
- `differences_from_partners`: a node of another cohort serves, but exchanges no tickets. That is right for the first
  node of a rolling change, and it is what a mistake looks like, so it is always logged, part by part.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType

from pdproxy.nodes.no_hand_over import SideChannel, host_of, is_elsewhere, set_address
from pdproxy.nodes.node import Node, Role
from pdproxy.nodes.node_info import WHOLE, NodeInfo

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

Nodes that publish fingerprints and differ in most of these are of two cohorts, and never compared. What is left for
them is what the handshake or the tickets need beyond equal bytes: `model`, whose path no fingerprint has, and `signed`.
"""

SHOULD_AGREE = ("tp_size", "prefix_caching", "lease_seconds")
"""Settings that may differ and mostly do so by mistake."""

ADVICE: Mapping[str, str] = MappingProxyType(
    {
        "vllm_version": "run the same vLLM release",
        "connector_version": "run the same pdproxy release",
        "vllm": "run the same vLLM release",
        "architecture": "serve the same model, with the same --model-impl",
        "model_config": "serve the same model, with the same config.json and --hf-overrides",
        "rope": "the same rope settings in config.json and --hf-overrides",
        "context": "the same --max-model-len",
        "tokenizer": "the same --tokenizer, --tokenizer-revision and --tokenizer-mode, of the same files: every prompt"
        " is computed twice otherwise",
        "chat_template": "the same --chat-template, --chat-template-content-format and --default-chat-template-kwargs"
        " (told by nodes whose VLLM_PLUGINS names pdproxy_endpoints), or the same template beside the tokenizer: every"
        " chat is computed twice otherwise",
        "media": "the same --mm-processor-kwargs and --media-io-kwargs",
        "checkpoint": "the same weights: --model, --revision, --load-format; restart a node whose files were replaced",
        "weights_label": "the same weights, and the same pdproxy_weights_label in --kv-transfer-config",
        "draft_checkpoint": "the same --speculative-config and weights of its draft model",
        "quantization": "the same --quantization",
        "dtype": "the same --dtype",
        "kv_dtype": "the same --kv-cache-dtype",
        "kv_shape": "the same model, --kv-cache-dtype and --attention-backend",
        "kv_heads": "the same --tensor-parallel-size: NIXL cannot divide this model's pages by heads",
        "kv_layout": "the same VLLM_KV_CACHE_LAYOUT",
        "kv_block_bytes": "the same --tensor-parallel-size, or VLLM_KV_CACHE_LAYOUT=LBHNC: blocks of this layout cannot"
        " be divided by heads",
        "context_parallel": "no --cp-kv-cache-interleave-size, or the same of it and --decode-context-parallel-size",
        "kernel_block_size": "the same --attention-backend and --block-size",
        "attention_backend": "the same --attention-backend",
        "cache_groups": "the same model, --speculative-config and --disable-sliding-window",
        "block_sizes": "the same --block-size",
        "cache_mode": "the same --mamba-cache-mode, and --enable-prefix-caching on both or on neither",
        "state_dtypes": "the same --mamba-ssm-cache-dtype and --mamba-cache-dtype",
        "state_groups": "the same --tensor-parallel-size: vLLM repeats the groups of a Mamba-2 model for ranks that"
        " have none of their own, and NIXL reads them as if they were divided (vllm#55208)",
        "state_shapes": "the same number of speculative tokens in --speculative-config (the second number), and the"
        " same --tensor-parallel-size where the first one differs",
        "state_layout": "the same VLLM_SSM_CONV_STATE_LAYOUT",
        "prefix_match_unit": "the same --prefix-match-unit",
        "speculative": "the same method and number of tokens in --speculative-config",
    }
)
"""Advice where a part of the fingerprint, or a version, differs. Parts that are missing here come from a newer
connector, and are named without advice."""

NO_GROUPS = "none"
"""The part `state_groups` of a model whose states have no groups."""

_ONE_PATH = (
    "vLLM's NIXL handshake compares the text of the path, so that no hand-over would succeed: mount or link the model"
    " at one path on all nodes and give --model that path; clients' name for it is --served-model-name"
)

_WRONG_ROLE = {Role.PREFILL: "kv_consumer", Role.DECODE: "kv_producer"}


@dataclasses.dataclass(frozen=True, slots=True)
class Incompatibility:
    """Something about a node that the operator should know, by the name of the setting."""

    setting: str
    sentence: str

    def __str__(self) -> str:
        return f"{self.setting}: {self.sentence}"


@dataclasses.dataclass(frozen=True, slots=True)
class Compatibility:
    """The result of a check: any refusal keeps the node out."""

    refusals: tuple[Incompatibility, ...] = ()
    warnings: tuple[Incompatibility, ...] = ()


def check_compatibility(info: NodeInfo, others: Iterable[NodeInfo], everyone: Iterable[Node] = ()) -> Compatibility:
    """Check a node by itself and against the nodes that already serve; ``everyone``: all that are configured.

    Nodes of another model, of another cohort or of the same role never exchange tickets: they are not compared.
    """
    partners = [other for other in others if _may_pair(info, other)]
    refusals = [
        *_not_as_configured(info),
        *_wrong_address(info, everyone),
        *_unequal_settings(info, partners, MUST_AGREE),
    ]
    warnings = [*_weaknesses(info), *_unequal_settings(info, partners, (*SHOULD_AGREE, "max_model_len"))]
    return Compatibility(tuple(refusals), tuple(warnings))


def differences_from_partners(info: NodeInfo, others: Iterable[NodeInfo]) -> tuple[Incompatibility, ...]:
    """Why a node exchanges no tickets though nodes of the other role serve its model; empty where it does, or where
    there are none. It is compared with the nearest of them: the one that differs in the fewest parts.
    """
    mine = info.joined()
    partners = [
        other for other in others if _of_two_roles(mine, other.node) and other.joined().model == mine.model != ""
    ]
    if not partners or any(mine.pairs_with(other.cohort()) for other in partners):
        return ()
    return min((differences(info, other) for other in partners), key=len)


def differences(info: NodeInfo, other: NodeInfo) -> tuple[Incompatibility, ...]:
    """Each version or part of the fingerprint that differs, with what to align; those with advice first."""
    mine, theirs = _parts(info), _parts(other)
    unlike = [part for part in mine.keys() | theirs.keys() if mine.get(part) != theirs.get(part)]
    order = list(ADVICE)
    unlike.sort(key=lambda part: (order.index(part) if part in ADVICE else len(order), part))
    values = [(part, mine.get(part, "not told"), theirs.get(part, "not told")) for part in unlike]
    return tuple(_difference(*each, other, _part_advice(each[0], info, other)) for each in values)


def _parts(info: NodeInfo) -> dict[str, str]:
    """The parts that make a cohort, without the digest."""
    versions = {
        "vllm_version": info.labels.get("vllm_version", info.version),
        "connector_version": info.labels.get("connector_version", "none"),
    }
    parts = {part: value for part, value in info.fingerprint.items() if part != WHOLE}
    return versions | (parts or {"fingerprint": "none"})


def _part_advice(part: str, info: NodeInfo, other: NodeInfo) -> str:
    return (block_size_advice(info, other) if part == "block_sizes" else "") or ADVICE.get(part, "")


def _difference(name: str, mine: str, theirs: str, other: NodeInfo, advice: str) -> Incompatibility:
    values = f"{mine} here, {theirs} on {other.node.name}"
    return Incompatibility(name, f"{values}: {advice}" if advice else values)


def _of_two_roles(node: Node, other: Node) -> bool:
    """Whether one of the two could compute a prompt for the other one, were they of one cohort."""
    return len({*node.roles, *other.roles}) > 1 and node.name != other.name


def _may_pair(info: NodeInfo, other: NodeInfo) -> bool:
    mine, theirs = info.joined(), other.joined()
    return (
        mine.is_partner(theirs)
        and "" not in (mine.model, theirs.model)
        and (theirs.serves(mine.model) or mine.serves(theirs.model))
    )


def _not_as_configured(info: NodeInfo) -> list[Incompatibility]:
    found, node = [], info.node
    if node.model and info.models.names and node.model not in info.models.names:
        found.append(Incompatibility("model", f"the node serves {', '.join(info.models.names)}, not {node.model}"))
    runs_as = info.labels.get("role")
    found += [
        Incompatibility("kv_role", f"the node runs as {runs_as} and cannot be a {role} node")
        for role in node.roles
        if runs_as == _WRONG_ROLE[role]
    ]
    return found


def _wrong_address(info: NodeInfo, everyone: Iterable[Node]) -> Iterator[Incompatibility]:
    """Prefill nodes whose tickets name their own host, as that host calls itself, for decode nodes elsewhere."""
    at = SideChannel.of_label(info.labels.get("side_channel", ""))
    if Role.PREFILL in info.node.roles and at.is_own_host() and is_elsewhere(info.node):
        here = host_of(info.node)
        far = next((node for node in everyone if Role.DECODE in node.roles and host_of(node) != here), None)
        if far is not None:
            cannot = f"{far.name} cannot reach {info.node.name} at {at} (the proxy does at {here})"
            yield Incompatibility("side_channel", f"{cannot}: {set_address(info.node)}")


def _unequal_settings(info: NodeInfo, partners: Iterable[NodeInfo], names: Iterable[str]) -> list[Incompatibility]:
    """At most one for each setting: the first partner that differs."""
    found: dict[str, Incompatibility] = {}
    for other in partners:
        for name in names:
            mine, theirs = info.setting(name), other.setting(name)
            if mine is not None and theirs is not None and mine != theirs:
                found.setdefault(name, _difference(name, mine, theirs, other, _setting_advice(name, info, other)))
    return list(found.values())


def _setting_advice(name: str, info: NodeInfo, other: NodeInfo) -> str:
    if name == "block_size":
        return block_size_advice(info, other)
    return {"model": _ONE_PATH, "max_model_len": "the smaller one counts"}.get(name, "")


def block_size_advice(info: NodeInfo, other: NodeInfo) -> str:
    """Which tensor-parallel degrees and --block-size go together, where two nodes differ in both; "" elsewhere.

    vLLM (0.32 and 0.33, `Platform._align_hybrid_block_size`) makes the attention block of a hybrid model the least
    multiple of --block-size (or of the backend's own) whose page holds a rank's mamba state. The state shrinks with
    each rank, a token's attention page only until a rank has a single KV head: up to that degree all sizes are equal.
    No block size helps where the groups of a Mamba-2 model are repeated (the fingerprint's part `state_groups`).
    """
    sizes = [node.labels.get("block_size", "") for node in (info, other)]
    degrees = [node.labels.get("tp_size", "") for node in (info, other)]
    if degrees[0] == degrees[1] or sizes[0] == sizes[1] or not all(size.isdecimal() for size in sizes):
        return ""
    follows = f"a hybrid model's block size follows --tensor-parallel-size ({degrees[0]} here, {degrees[1]} there)"
    groups = [node.fingerprint.get("state_groups", NO_GROUPS) for node in (info, other)]
    if groups[0] != groups[1]:
        return f"{follows}, and no --block-size brings these two together: take equal degrees (see state_groups)"
    which = "" if groups[0] == NO_GROUPS else f" of degrees that divide the model's {groups[0]} groups,"
    return (
        f"{follows}. Pairs that go together: equal degrees;{which} any two degrees up to the model's number of KV"
        f" heads; and any two with --block-size {max(map(int, sizes))} on both"
    )


def _weaknesses(info: NodeInfo) -> list[Incompatibility]:
    if not info.labels:
        text = "not pdproxy's: tickets are neither checked nor released early, and it pairs only with nodes like it"
        return [Incompatibility("kv_connector", text)]
    weak = []
    if Role.DECODE in info.node.roles and info.labels.get("failure_policy", "recompute") != "recompute":
        text = "a failed read ends the request; recompute would save it"
        weak.append(Incompatibility("kv_load_failure_policy", text))
    if info.labels.get("prefix_caching") == "false":
        weak.append(Incompatibility("enable_prefix_caching", "off: nothing is reused between turns"))
    return weak
