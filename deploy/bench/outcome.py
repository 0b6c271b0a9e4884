"""The outcome of a trace under one policy or proxy: pure."""

import dataclasses
import math
import statistics
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from pdproxy.nodes.node import Role, Roles


class Stream(NamedTuple):
    """One answer.

    Attributes:
        at: seconds from the trace's beginning to its request.
        first_token: seconds from its request.
        seconds, tokens: of all that came after the first token.
        longest: seconds of the longest chunk of a prompt that was computed beside it: without a token.
    """

    at: float
    first_token: float
    seconds: float
    tokens: int
    longest: float

    @property
    def inter_token(self) -> float:
        """Seconds between two tokens, the mean; vLLM's TPOT."""
        return self.seconds / self.tokens if self.tokens else 0.0


@dataclasses.dataclass(slots=True)
class Outcome:
    """The outcome of a whole run.

    Attributes:
        name: of the policy or the proxy.
        roles: of all nodes, by name.
        tokens: of all prompts that were answered.
        computed: prompt tokens that each node computed.
        moved: tokens whose attention went from a prefill node to a decode node.
        first_tokens: seconds until the first token of each request.
        streams: in the order of their ends; of a simulation alone.
        planned: prompt tokens that plans took to be cached where the prompt was computed; ``resumed``: that were.
        failed: requests that were not answered as they should be.
        late: seconds by which the latest node was late on average, for lack of a CPU; 0 on a clock that is set.
    """

    name: str
    roles: Mapping[str, Roles]
    tokens: int = 0
    computed: Counter[str] = dataclasses.field(default_factory=Counter)
    moved: int = 0
    first_tokens: list[float] = dataclasses.field(default_factory=list)
    streams: list[Stream] = dataclasses.field(default_factory=list)
    planned: int = 0
    resumed: int = 0
    failed: int = 0
    late: float = 0.0

    def add_first_token(self, tokens: int, first_token: float) -> None:
        """One more prompt has its first token."""
        self.tokens += tokens
        self.first_tokens.append(first_token)

    @property
    def share(self) -> float:
        """The share of all prompt tokens that were computed."""
        return self.computed.total() / self.tokens

    @property
    def local(self) -> float:
        """The share of all prompt tokens that a decode node computed."""
        return sum(self._of(Role.DECODE)) / self.tokens

    @property
    def spread(self) -> float:
        """The busiest prefill node's tokens, in multiples of the mean; NaN where none were computed."""
        loads = self._of(Role.PREFILL)
        return max(loads) / statistics.fmean(loads) if any(loads) else math.nan

    @property
    def mean(self) -> float:
        """Seconds until the first token."""
        return statistics.fmean(self.first_tokens)

    def percentile(self, share: float) -> float:
        """The least of the seconds until the first token that so many requests did not exceed."""
        ordered = sorted(self.first_tokens)
        return ordered[max(0, math.ceil(share * len(ordered)) - 1)]

    @property
    def kept_promise(self) -> float:
        """The share of the tokens that plans took to be cached and that were; NaN where no plan said."""
        return self.resumed / self.planned if self.planned else math.nan

    def _of(self, role: Role) -> list[int]:
        return [self.computed[name] for name, its in self.roles.items() if role in its]
