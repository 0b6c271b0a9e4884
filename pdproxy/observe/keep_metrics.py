"""The metrics of conversations that nodes keep."""

from functools import partial

from prometheus_client import CollectorRegistry

from pdproxy.observe.families import Counter
from pdproxy.observe.labels import KeepForget, KeepOutcome, KeepTokens, KeepTurn
from pdproxy.reasons import KeepReason


class KeepMetrics:
    """Counts conversations that are kept; `Metrics` has one."""

    def __init__(self, registry: CollectorRegistry) -> None:
        counter = partial(Counter, registry=registry)
        self._asked = counter("pdproxy_keeps_asked_total", "Conversations that a node was asked to keep.", ["reason"])
        self._told = counter("pdproxy_keeps_total", "What became of it.", ["outcome"])
        self._turns = counter("pdproxy_keep_turns_total", "Next turns of kept conversations.", ["outcome"])
        self._tokens = counter("pdproxy_keep_tokens_total", "Tokens that nodes kept, and found kept.", ["kind"])
        self._forgotten = counter(
            "pdproxy_keeps_forgotten_total",
            "Kept conversations that a place is to forget before their time.",
            ["reason"],
        )
        for each, words in (
            (self._asked, KeepReason), (self._told, KeepOutcome), (self._turns, KeepTurn), (self._tokens, KeepTokens),
            (self._forgotten, KeepForget),
        ):  # fmt: skip
            each.export_zeros(words)

    def asked(self, reason: KeepReason) -> None:
        """Count a conversation that a node is asked to keep."""
        self._asked.labels(reason).inc()

    def told(self, outcome: KeepOutcome) -> None:
        """Count what became of it, or why no node was asked."""
        self._told.labels(outcome).inc()

    def came_back(self, turn: KeepTurn) -> None:
        """Count the next turn of a conversation that was kept."""
        self._turns.labels(turn).inc()

    def add_tokens(self, *, hit: int, kept: int) -> None:
        """Add what a node says of one turn."""
        self._tokens.labels(KeepTokens.HIT).inc(hit)
        self._tokens.labels(KeepTokens.KEPT).inc(kept)

    def forgotten(self, reason: KeepForget, conversations: int) -> None:
        """Count kept conversations that a place is to forget."""
        self._forgotten.labels(reason).inc(conversations)
