"""How much of a prompt a prefill leg computes, and so where the prefill node keeps a state. Pure."""

from pdproxy.nodes.node import Node
from pdproxy.planning.cost import may_keep_states


def covered_tokens(node: Node, tokens: int) -> int:
    """How many of a prompt's tokens a prefill leg computes on a node: as far as a hand-over of it goes.

    That is up to the last boundary of `--prefix-match-unit` before the prompt's last token, a unit less with EAGLE and
    MTP (the connector's `resume_boundary`); without a unit all but the last one. Of a model of attention alone it is
    the whole prompt (vLLM 0.32, `_prefill_backoff` of the NIXL connector's scheduler).
    """
    if not may_keep_states(node):
        return tokens
    unit = node.prefix_match_unit
    drop = unit if node.hashing is not None and node.hashing.drops_unit else 0
    boundary = (tokens - 1) // unit * unit - drop if unit else 0
    return boundary if boundary > 0 else tokens - 1
