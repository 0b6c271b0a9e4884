"""Clients' losses while nodes are out, as one line for the operator. Pure."""

from collections.abc import Iterator, Sequence

from pdproxy.admin.seen import WINDOW, Seen, of_role
from pdproxy.nodes.node import SERVING, NodeView, Role, State
from pdproxy.observe.labels import Outcome
from pdproxy.settings.types import OnNoDecode, OnPrefillFailure

SLOWER = "Served, slower: decode nodes compute the prompts themselves."


def loss(seen: Seen) -> str:
    """A sentence for each model whose clients lose something, and one for requests turned away; "" where there are
    none."""
    models = sorted({view.node.model for view in seen.nodes if view.node.model})
    told: dict[str, str] = {}
    for model in models or [""]:
        for sentence in _of_model(seen, [view for view in seen.nodes if view.node.serves(model)]):
            told[sentence] = f"{told[sentence]}, {model}" if sentence in told else model
    sentences = [f"{names}: {sentence}" if len(models) > 1 else sentence for sentence, names in told.items()]
    if any(end.outcome is Outcome.REJECTED for end in seen.bad_now()):
        turned_away, all_of_them = seen.ended_badly(Outcome.REJECTED), seen.requests()
        part = "Most" if 2 * turned_away > all_of_them else "Some"
        sentences.append(
            f"{part} requests get a 429: {turned_away:,} of {all_of_them:,} in {WINDOW / 60:.0f} minutes. They may ask"
            " again."
        )
    return " ".join(sentences)


def _of_model(seen: Seen, nodes: Sequence[NodeView]) -> Iterator[str]:
    prefills, decodes = (of_role(nodes, role) for role in Role)
    prefills_left, decodes_left = ([view for view in views if view.state in SERVING] for views in (prefills, decodes))
    if not decodes_left:
        if seen.on_no_decode is OnNoDecode.PREFILL and prefills_left:
            yield "Served, slower: prefill nodes serve whole requests."
        else:
            yield "New requests get a 503: no decode node serves."
        return
    if prefills and not prefills_left:
        if seen.on_prefill_failure is OnPrefillFailure.FAIL:
            yield "New requests get a 503: no prefill node serves, and policy.on_prefill_failure is fail."
            return
        yield SLOWER
    elif seen.hand_overs.fail:
        yield SLOWER
    elif seen.hand_overs.used.mostly_in_vain:
        yield "Served, slower: decode nodes compute most of the prompts again that were handed over."
    kinds = {"": prefills} if prefills == decodes else {"prefill ": prefills, "decode ": decodes}
    for kind, views in kinds.items():
        full = sum(view.state in SERVING and view.state is not State.PROBING for view in views)
        if views and full < len(views) and any(view.state in SERVING for view in views):
            yield f"Served, with less room: {full} of {len(views)} {kind}nodes take requests as usual."
