"""The log lines of nodes: the pool announces every change here, at once, and nobody else logs one."""

import logging
import math

from pdproxy.clock import Clock
from pdproxy.nodes.node import Bars, Node, Role, State

_LOG = logging.getLogger("pdproxy.nodes")
_LEVELS = {State.DOWN: logging.WARNING, State.REFUSED: logging.ERROR}
"""Levels of a line that tells that a node is in a state; INFO for any other."""
_LOSSES = {
    Role.PREFILL: "no prefill node serves any more: decode nodes compute all prompts",
    Role.DECODE: "no decode node serves any more: requests are refused with 503",
}
_RETURNS = {Role.PREFILL: "prefill nodes serve again", Role.DECODE: "decode nodes serve again"}

Served = tuple[Role, str]
"""A role and a model."""


class NodeLog:
    """One line for each change of a node's state, of what nodes may exchange, and of which roles are served at all."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._served: set[Served] = set()
        self._unserved_since: dict[Served, float] = {}
        """Monotonic seconds since when no node serves what was served before."""

    def joined(self, node: Node) -> None:
        """A node is new in the pool."""
        _LOG.info("node %s is new", node.name, extra={**_fields(node), "url": node.url, "state": State.JOINING.value})

    def left(self, node: Node) -> None:
        """A node is not in the pool any more."""
        _LOG.info("node %s has left", node.name, extra=_fields(node))

    def roles(self, node: Node) -> None:
        """A node has other roles than before."""
        _LOG.info("node %s is asked for %s now", node.name, " and ".join(node.roles), extra=_fields(node))

    def moved(self, node: Node, before: State, after: State, reason: str, seconds: float) -> None:
        """A node is in another state than before, or in the same for another reason.

        ``seconds``: since the state before began; for one that was out, since its outage did.
        """
        change: dict[str, str | float] = {"state": after.value, "was": before.value, "after_s": round(seconds, 1)}
        if reason:
            change["reason"] = reason
        level = _LEVELS.get(after, logging.INFO)
        _LOG.log(level, "node %s is %s", node.name, after.value, extra={**_fields(node), **change})

    def serving(self, role: Role, model: str, nodes: int) -> None:
        """So many nodes of a role serve a model now."""
        served = (role, model)
        if not nodes and served in self._served:
            self._served.discard(served)
            self._unserved_since[served] = self._clock.now()
            _LOG.error("%s", _LOSSES[role], extra={"role": role.value, "model": model})
        elif nodes and served not in self._served:
            self._served.add(served)
            unserved_since = self._unserved_since.pop(served, None)
            if unserved_since is not None:
                after = {"after_s": round(self._clock.now() - unserved_since, 1)}
                _LOG.info("%s", _RETURNS[role], extra={"role": role.value, "model": model, **after})

    def unserved_since(self, role: Role) -> float:
        """When the last node of a role went, of whatever model, in monotonic seconds; -inf where none did."""
        return max((at for (of, _), at in self._unserved_since.items() if of is role), default=-math.inf)

    def barred(self, before: Bars, after: Bars) -> None:
        """Other nodes and pairs than before exchange no tickets, or for another reason."""
        for name, why in after.nodes.items():
            if before.nodes.get(name) != why:
                text = "node %s exchanges no tickets with any node: it failed where others pass: %s"
                _LOG.error(text, name, why, extra={"node": name})
        for pair, why in after.pairs.items():
            if before.pairs.get(pair) != why:
                text = "prefill node %s and decode node %s exchange no tickets: %s"
                _LOG.error(text, *pair, why, extra=_pair(*pair))
        for name in before.nodes.keys() - after.nodes.keys():
            _LOG.info("node %s exchanges tickets again", name, extra={"node": name})
        for pair in before.pairs.keys() - after.pairs.keys():
            text = "prefill node %s and decode node %s exchange tickets again"
            _LOG.info(text, *pair, extra=_pair(*pair))


def _fields(node: Node) -> dict[str, str]:
    return {"node": node.name, "role": ",".join(node.roles), "model": node.model}


def _pair(prefill: str, decode: str) -> dict[str, str]:
    return {"prefill_node": prefill, "decode_node": decode}
