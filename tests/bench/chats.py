"""What the policies make of conversations, by simulation: ``python -m tests.bench.chats``.

The pool, the plans and the policies are the proxy's own. The nodes are arithmetic, on a clock that is set: a prefill
node computes one prompt after the other, from where it can resume. That is the end of the conversation's last prompt
that it computed, as far as its cache still holds that one; else the end of the system prompt, from the third prompt on
that begins with it there (a hybrid model's state is kept where a prompt ends, and at a branch point the second time).
`prefix` and `hybrid` get no session keys, but what the proxy's own index knows of what was sent where.
"""

import collections
import dataclasses
import heapq
import itertools
import random
import statistics
from collections.abc import Iterator

from pdproxy.nodes.circuit_breaker import CircuitBreakerConfig
from pdproxy.nodes.node import Node, Role, hash64
from pdproxy.nodes.pool import Pool
from pdproxy.nodes.pool_entry import LegLoad
from pdproxy.observe.labels import Affinity
from pdproxy.planning.plan import PlanPolicy, plan
from pdproxy.planning.plan_types import Plan, PlanInput
from pdproxy.planning.policies import policy_named
from pdproxy.planning.prefix import HitSource, Place, PromptHits
from pdproxy.planning.rates import Rates, Work
from pdproxy.planning.text_index import Chain, Keeps, TextIndex, chain_of_text
from pdproxy.settings.types import BY_CACHE, Routing
from tests.fakes.clock import FakeClock

PREFILL_RATE, DECODE_SECONDS = 8000.0, 1.5
"""Tokens in a second; a whole answer."""


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Conversations that begin within a time, each with its pauses; lengths in tokens, times in seconds."""

    conversations: int = 36
    turns: int = 6
    systems: int = 4
    system: int = 1300
    question: int = 300
    answer: int = 150
    within: float = 20.0
    pause: float = 3.0


@dataclasses.dataclass
class Cache:
    """A prefill node: what it can resume from, and until when it is busy."""

    tokens: int
    prompts: "collections.OrderedDict[int, int]" = dataclasses.field(default_factory=collections.OrderedDict)
    met: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)
    free_at: float = 0.0

    def compute(self, conversation: int, system: int, begins: int, prompt: int) -> int:
        """Compute a prompt whose first ``begins`` tokens are the system prompt; how many tokens that took."""
        resumed = self.prompts.pop(conversation, begins if self.met[system] >= 2 else 0)
        self.met[system] += 1
        self.prompts[conversation] = prompt
        while sum(self.prompts.values()) > self.tokens:
            self.prompts.popitem(last=False)
        return prompt - resumed


@dataclasses.dataclass
class Result:
    """What came of it.

    Attributes:
        prompts: by prefill node.
        affinity: of the prefill legs.
    """

    prompt_tokens: int = 0
    computed: int = 0
    waits: list[float] = dataclasses.field(default_factory=list)
    prompts: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    affinity: collections.Counter[Affinity | None] = dataclasses.field(default_factory=collections.Counter)

    def add(self, chosen: Plan, prompt: int, computed: int, wait: float) -> None:
        """A prompt was computed: of so many tokens so many, and it was done after so many seconds."""
        assert chosen.prefill is not None
        self.prompt_tokens += prompt
        self.computed += computed
        self.waits.append(wait)
        self.prompts[chosen.prefill.name] += 1
        self.affinity[chosen.prefill_affinity] += 1

    @property
    def share(self) -> float:
        """Of all prompt tokens, how many were computed."""
        return self.computed / self.prompt_tokens

    @property
    def mean_wait(self) -> float:
        """Until a prompt was computed, in seconds."""
        return statistics.fmean(self.waits)


class Simulation:
    """One run of a policy. ``tokens``: what a prefill node's cache holds."""

    def __init__(self, routing: Routing, prefills: int, decodes: int, tokens: int = 1_000_000) -> None:
        self.clock = FakeClock()
        self.pool = Pool(self.clock, CircuitBreakerConfig(slow_start=0))
        self.result = Result()
        self._policy = PlanPolicy(routing=policy_named(routing))
        self._caches = collections.defaultdict[str, Cache](lambda: Cache(tokens))
        self._turns = itertools.count()
        self._index = TextIndex() if routing in BY_CACHE else None
        self._rates = Rates()
        for role, count in ((Role.PREFILL, prefills), (Role.DECODE, decodes)):
            for index in range(count):
                self.join(f"{role}-{index}", role)

    def join(self, name: str, role: Role) -> None:
        """A node that serves from now on."""
        node = Node(name, f"http://{name}", role, "m")
        self.pool.add(node)
        self.pool.admit(node)

    def run(self, traffic: Traffic, seed: int = 1) -> Result:
        """All conversations, to their ends."""
        dice, began = random.Random(seed), self.clock.now()
        events = [
            (began + dice.uniform(0, traffic.within), number, self._conversation(number, traffic, dice))
            for number in range(traffic.conversations)
        ]
        heapq.heapify(events)
        while events:
            at, number, conversation = heapq.heappop(events)
            self.clock.advance(at - self.clock.now())
            pause = next(conversation, None)
            if pause is not None:
                heapq.heappush(events, (at + pause, number, conversation))
        return self.result

    def _conversation(self, number: int, traffic: Traffic, dice: random.Random) -> Iterator[float]:
        """One turn after the other; yields the seconds until it goes on."""
        prompt = traffic.system
        for _ in range(traffic.turns):
            prompt += traffic.question
            yield from self._turn(number, prompt, traffic)
            prompt += traffic.answer
            yield dice.expovariate(1 / traffic.pause)

    def _turn(self, number: int, prompt: int, traffic: Traffic) -> Iterator[float]:
        chain = _chain(number, prompt, traffic)
        chosen = plan(self.pool.snapshot(), self._needs(number, chain), self._policy, next(self._turns))
        assert chosen.prefill is not None
        self._sent(chain, chosen)
        queued = 0 if chosen.decision is None else chosen.decision.computed
        with self.pool.acquire(chosen.decode.name, LegLoad(held=prompt)):
            with self.pool.acquire(chosen.prefill.name, LegLoad(queued=queued)):
                cache, now = self._caches[chosen.prefill.name], self.clock.now()
                computed = cache.compute(number, number % traffic.systems, traffic.system, prompt)
                cache.free_at = max(now, cache.free_at) + computed / PREFILL_RATE
                self.result.add(chosen, prompt, computed, cache.free_at - now)
                yield cache.free_at - now
            self._rates.computed(Work.PREFILL, Place(chosen.prefill.name), computed, now, self.clock.now())
            if self._index is not None:
                self._index.counted(chain, prompt)
            yield DECODE_SECONDS

    def _needs(self, number: int, chain: Chain) -> PlanInput:
        if self._index is None:
            return PlanInput("m", session=hash64(f"conversation {number}"))
        hits = self._index.look_up(chain, self.clock.now())
        prefix = PromptHits(self._index.tokens(chain), HitSource.APPROXIMATION, hits)
        return PlanInput("m", prefix=prefix, rates=self._rates)

    def _sent(self, chain: Chain, chosen: Plan) -> None:
        if self._index is not None and chosen.prefill is not None:
            self._index.sent(chain, Place(chosen.prefill.name), Keeps.ALL, self.clock.now())
            self._index.sent(chain, Place(chosen.decode.name), Keeps.NONE, self.clock.now())


def _chain(number: int, prompt: int, traffic: Traffic) -> Chain:
    """Of a prompt of a conversation: its system prompt, and messages of its own; a byte for each token."""
    parts, left = [b"%d" % (number % traffic.systems) * traffic.system], prompt - traffic.system
    for turn in itertools.count():
        parts.append((b"%d %d " % (number, turn) * traffic.question)[: traffic.question])
        left -= traffic.question
        if left <= 0:
            return chain_of_text("m", "", parts)
        parts.append((b"%d %d answer " % (number, turn) * traffic.answer)[: traffic.answer])
        left -= traffic.answer
    raise AssertionError("a prompt ends with a question")


def main() -> None:
    """Print a line for each policy and size."""
    for prefills, decodes, conversations in ((3, 2, 36), (3, 2, 300), (16, 16, 1000)):
        for routing in Routing:
            made = Simulation(routing, prefills, decodes).run(Traffic(conversations))
            own = made.affinity[Affinity.OWN] / made.affinity.total()
            mean = made.prompts.total() / prefills
            print(
                f"{prefills} + {decodes} nodes, {conversations:4} conversations, {routing:13}:"
                f" computed {made.share:4.0%}, mean wait for the prefill {made.mean_wait:6.3f} s,"
                f" own prefill node {own:4.0%}, busiest {max(made.prompts.values()) / mean:4.2f} of the mean"
            )


if __name__ == "__main__":
    main()
