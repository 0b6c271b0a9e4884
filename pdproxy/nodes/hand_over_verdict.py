"""Whether prompts are handed over at all, in one line for the operator: /ready, the page and a metric go by it. Pure.

A proxy whose hand-overs fail still answers every request, from decode nodes alone: nothing else would show it.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from pdproxy.nodes.hand_overs import RECENT, Used
from pdproxy.nodes.no_hand_over import change_of
from pdproxy.nodes.node import SERVING, Bars, Node, NodeView, PoolState, Role, State


@dataclasses.dataclass(frozen=True, slots=True)
class HandOverVerdict:
    """The verdict on hand-overs at this moment.

    Attributes:
        why: a sentence for each thing that keeps some from happening; empty where all is well.
        fail: none happen between the nodes that serve.
        used: what became of the tickets of the last minutes.
        missing: a role of which nodes are known and none serves; None where there is none such.
        began: by sentence of ``why``, when that began, in monotonic seconds; without those of which nobody knows.
        changes: by sentence of ``why``, what to change; without those of which `pdproxy check` must tell.
    """

    why: Sequence[str] = ()
    fail: bool = False
    used: Used = dataclasses.field(default_factory=Used)
    missing: Role | None = None
    began: Mapping[str, float] = dataclasses.field(default_factory=dict)
    changes: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def line(self) -> str:
        """All of it in one line, whether something is wrong or not."""
        if self.fail:
            return f"hand-overs fail: decode nodes compute the prompts themselves; {self.why[0]}"
        if self.missing is not None:
            return f"nothing is handed over: no {self.missing} node serves. {self.useless_tickets()}"
        if self.why:
            return f"some hand-overs fail: {self.why[0]}. {self.useless_tickets()}"
        return f"nothing keeps hand-overs from happening. {self.useless_tickets()}"

    def useless_tickets(self) -> str:
        """The share of tickets that were of no use."""
        if not self.used.tickets:
            return f"No ticket was given in {RECENT} minutes"
        told = f"{self.used.in_vain:,} of {self.used.tickets:,} tickets in {RECENT} minutes ({self.used.share:.0%})"
        return f"Computed twice: the prompts of {told}"


def verdict(now: PoolState, used: Used) -> HandOverVerdict:
    """By the nodes as they stand, and what became of the last tickets."""
    prefills, decodes = ([view for view in now.nodes if _serves(view.state, view.node, role)] for role in Role)
    why = [*_refused(now), *_barred(now.bars, [*prefills, *decodes])]
    works = any(_makes_pair(prefill.node, decode.node, now.bars) for decode in decodes for prefill in prefills)
    if not works and not why:
        why += _unlike(prefills, decodes)
    if used.mostly_in_vain:
        text = (
            f"{used.in_vain:,} of the last {used.tickets:,} tickets were of no use: their prompts were computed twice"
        )
        why.append((text, -math.inf))
    began: dict[str, float] = {}
    for text, since in why:
        began[text] = min(since, began.get(text, math.inf))
    known = {text: since for text, since in began.items() if since > -math.inf}
    fail = bool(why and decodes and not works)
    changes = {text: change for text in began if text in now.bars.pairs.values() and (change := change_of(text))}
    return HandOverVerdict(tuple(began), fail, used, _missing(now), known, changes)


def _missing(now: PoolState) -> Role | None:
    known = {role for view in now.nodes for role in view.node.roles}
    return next(
        (
            role
            for role in Role
            if role in known and not any(_serves(view.state, view.node, role) for view in now.nodes)
        ),
        None,
    )


def _serves(state: State, node: Node, role: Role) -> bool:
    return state in SERVING and role in node.roles


def _makes_pair(prefill: Node, decode: Node, bars: Bars) -> bool:
    return _of_one_model(prefill, decode) and prefill.may_hand_to(decode) and bars.allow(prefill.name, decode.name)


def _of_one_model(prefill: Node, decode: Node) -> bool:
    return prefill.serves(decode.model) or decode.serves(prefill.model)


def _refused(now: PoolState) -> Iterator[tuple[str, float]]:
    """Refused prefill nodes, each with the time since which it is; so for the others below."""
    for view in now.nodes:
        if view.state is State.REFUSED and Role.PREFILL in view.node.roles:
            yield f"{view.name} is refused: {view.reason}", view.since


def _barred(bars: Bars, serving: Sequence[NodeView]) -> Iterator[tuple[str, float]]:
    """Barred pairs of nodes that serve."""
    here = {view.name for view in serving}
    for name, why in bars.nodes.items():
        if name in here:
            yield f"{name} exchanges no tickets with any node: {why}", bars.began.get(name, -math.inf)
    for pair, why in bars.pairs.items():
        if here.issuperset(pair):
            named = all(name in why for name in pair)
            text = why if named else f"{pair[0]} and {pair[1]} exchange no tickets: {why}"
            yield text, bars.began.get(pair, -math.inf)


def _unlike(prefills: Sequence[NodeView], decodes: Sequence[NodeView]) -> Iterator[tuple[str, float]]:
    """Why nodes that serve make no pair; nothing where there are no two of them, one of each role."""
    pairs = ((prefill, decode) for prefill in prefills for decode in decodes if prefill.name != decode.name)
    for one, other in itertools.islice(pairs, 1):
        prefill, decode, since = one.node, other.node, max(one.since, other.since)
        if not _of_one_model(prefill, decode):
            text = (
                f"{prefill.name} serves {prefill.model}, and {decode.name} {decode.model}: give nodes of one model one"
                " --served-model-name"
            )
            yield text, since
        else:
            parts = prefill.fingerprint.keys() | decode.fingerprint.keys()
            unlike = sorted(part for part in parts if prefill.fingerprint.get(part) != decode.fingerprint.get(part))
            what = ", ".join(part for part in unlike if part != "all") or "versions"
            yield f"{prefill.name} and {decode.name} differ in {what}: pdproxy check says what to align", since
