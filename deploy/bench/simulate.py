"""A trace on simulated nodes, in one process on a clock that is set; pool, plans and policies are the proxy's own.

The nodes are arithmetic. A node computes one prompt after the other, at a rate, from where its caches let it resume
when its turn comes: what waits before it may evict what it would have found. It reads what it has not cached of a
ticket, at a rate, and gives each stream a token in each step. A prompt that it computes stops its streams for as long;
where prompts are cut into chunks, as vLLM does, each chunk is in a step that gives each stream a token. The planner is
told what is cached by the proxy's own index, from the events of the caches, which come without delay.
"""

import dataclasses
import functools
import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry

from deploy.bench.hybrid_cache import CacheEvent, CacheShape, HashedPrompt, Kind, Removed
from deploy.bench.kv_events import ROOT
from deploy.bench.node_keeps import NodeKeeps
from deploy.bench.outcome import Outcome, Stream
from deploy.bench.traces import Prompt, Segment, Trace, hashed
from pdproxy.events.prefix_source import EXPECTED_SECONDS
from pdproxy.nodes.circuit_breaker import CircuitBreakerConfig
from pdproxy.nodes.load import Work
from pdproxy.nodes.node import BOTH, DECODE, NO_FOOTPRINT, PREFILL, Footprint, Node, Role, Roles, hash64
from pdproxy.nodes.pool import Pool
from pdproxy.nodes.pool_entry import LegLoad, Slot
from pdproxy.observe.keep_metrics import KeepMetrics
from pdproxy.orchestration.keeping import PromptKeep
from pdproxy.planning.block_hashes import HashAlgorithm, HashScheme
from pdproxy.planning.cache_aware import ITL_BUDGET
from pdproxy.planning.cache_events import BlocksRemoved, BlocksStored, GroupKind
from pdproxy.planning.conversations import Conversations
from pdproxy.planning.plan import PlanPolicy, RoutingPolicy, plan
from pdproxy.planning.plan_types import NextTurn, Plan, PlanInput
from pdproxy.planning.policies import policy_named
from pdproxy.planning.prefix import HitSource, Place, PromptHits
from pdproxy.planning.prefix_index import PrefixIndex
from pdproxy.planning.shares import LimitsByKey
from pdproxy.planning.text_chain import chain_of_completion
from pdproxy.planning.text_index import TextIndex
from pdproxy.planning.turnover import Turnover
from pdproxy.request import Json
from pdproxy.settings.types import Keep, Routing
from tests.fakes.clock import FakeClock

MODEL = "m"
LONGEST = 3600.0
"""Seconds for which a conversation may be kept."""
LEAST_WAIT = 1e-6
"""Seconds: a prompt whose turn comes at this very moment looks again a little later."""
BYTES_OF_TOKEN = 8
"""In a prompt's text: a multiple of four, so that a segment of fewer tokens is a beginning of it."""
SAME_TOKEN = 1e-6
"""Less than so much of a token is none."""
KEPT_CHUNKS = 600.0
"""Seconds; longer than any stream runs."""


@dataclasses.dataclass(frozen=True, slots=True)
class Fleet:
    """The simulated nodes: how many, their caches, and how fast they are.

    Attributes:
        prefill_rate: tokens that a node computes in a second.
        overhead: seconds that each prompt takes besides.
        transfer_rate: tokens whose attention a decode node reads in a second; ``hand_over`` seconds besides.
        step: seconds between two tokens of a stream, and ``per_stream`` more for each that runs on its node.
        chunk: prompt tokens in a step at most, as vLLM's ``--max-num-batched-tokens``; 0: a prompt is computed whole.
        keep_share: the part of a cache that is for keeps; 0: nodes with vLLM's own connector, which keep nothing.
        late: mean seconds by which a prompt comes late to the node that computes it, and its first token to its client.
    """

    prefills: int = 3
    decodes: int = 2
    shape: CacheShape = dataclasses.field(default_factory=CacheShape)
    prefill_rate: float = 8000.0
    overhead: float = 0.01
    transfer_rate: float = 200_000.0
    hand_over: float = 0.01
    step: float = 0.02
    per_stream: float = 0.0
    chunk: int = 0
    boths: int = 0
    keep_share: float = 0.3
    late: float = 0.0

    def faster(self, times: float, late: float = 0.0) -> "Fleet":
        """The same nodes, so many times as fast; ``late`` at that speed, as many times longer at the one of now."""
        return dataclasses.replace(
            self,
            prefill_rate=times * self.prefill_rate,
            transfer_rate=times * self.transfer_rate,
            overhead=self.overhead / times,
            hand_over=self.hand_over / times,
            step=self.step / times,
            per_stream=self.per_stream / times,
            late=late / times,
        )

    def roles(self) -> Mapping[str, Roles]:
        """The roles of all nodes, by name."""
        counts = (("prefill", PREFILL, self.prefills), ("decode", DECODE, self.decodes), ("node", BOTH, self.boths))
        return {f"{kind}-{index}": roles for kind, roles, count in counts for index in range(count)}


class SimulatedNode:
    """Caches, what waits to be computed, until when it computes, and the tokens that its streams got.

    Attributes:
        told: what the caches say of themselves goes there.
        queue: prompts in turn; the first is being computed.
        free_at: seconds of the clock until which it computes.
        streams: that run.
    """

    def __init__(self, fleet: Fleet, told: Callable[[CacheEvent], None], now: Callable[[], float]) -> None:
        self.keeps = NodeKeeps(fleet.shape, fleet.keep_share, now)
        self.cache = self.keeps.cache
        self.told = told
        self.queue: deque[HashedPrompt] = deque()
        self.free_at = 0.0
        self.streams = 0
        self._fleet = fleet
        self._computed = 0
        """Prompts that have left the queue."""
        self._tokens = 0.0
        """The tokens of a stream that runs since ever, as of ``_at``."""
        self._at = 0.0
        self._rate_beside = 0.0
        """Tokens in a second while it computes."""
        self._chunks: deque[tuple[float, float]] = deque()
        """The last chunks: when each ended, and how long it took."""

    @property
    def step(self) -> float:
        """Seconds between two tokens of each stream while no prompt is computed."""
        return max(LEAST_WAIT, self._fleet.step + self.streams * self._fleet.per_stream)

    def compute(
        self, prompt: HashedPrompt, clock: FakeClock, orders: Mapping[str, Any]
    ) -> Generator[float, None, tuple[int, Json]]:
        """Wait for the prompt's turn and compute it: how many of its tokens were, and what is told of a keep. Yields
        the seconds to wait. ``orders``: as in a leg's ``kv_transfer_params``."""
        self.queue.append(prompt)
        self.keeps.forget(orders.get("pdproxy_forget", ()))
        self.keeps.wait(prompt)
        turn, least = self._computed + len(self.queue) - 1, self._fleet.step if self._fleet.chunk else 0.0
        while turn > self._computed or self.free_at > clock.now():
            ahead = max(0, turn - self._computed - 1)
            yield max(LEAST_WAIT, self.free_at - clock.now() + ahead * least)
        computed, kept = self.keeps.compute(prompt, orders.get("pdproxy_keep"))
        left = computed
        fixed = self._fleet.overhead
        while left > 0:
            tokens = min(left, self._fleet.chunk or left)
            left -= tokens
            self._compute_beside(fixed + tokens / self._fleet.prefill_rate, clock.now())
            fixed = 0.0
            while self.free_at > clock.now():
                yield self.free_at - clock.now()
        self.queue.popleft()
        self._computed += 1
        self._tell()
        return computed, kept

    def pull(self, prompt: HashedPrompt, now: float) -> tuple[int, int, float]:
        """Read a ticket: tokens moved, tokens computed here, and the seconds until it is done."""
        pulled = self.cache.pull(prompt)
        self._tell()
        self._busy(pulled.computed / self._fleet.prefill_rate, 0.0, now)
        seconds = self._fleet.hand_over + pulled.moved / self._fleet.transfer_rate
        return pulled.moved, pulled.computed, seconds + self.free_at - now

    def after_prompt(self, clock: FakeClock) -> Iterator[float]:
        """Wait for the end of the prompt that is computed now: its chunks fill all steps, as vLLM's do."""
        first = self.queue[0] if self.queue and self._fleet.chunk else None
        while first is not None and self.queue and self.queue[0] is first:
            yield max(LEAST_WAIT, self.free_at - clock.now())

    def streams_are(self, change: int, now: float) -> None:
        """So many streams more run from now on."""
        self._advance(now)
        self.streams += change

    def stream(self, tokens: int, clock: FakeClock) -> Iterator[float]:
        """A stream gets so many tokens. Yields the seconds to wait: those that it takes at least, so that there are few
        waits, though other streams come and go meanwhile."""
        self._advance(clock.now())
        end = self._tokens + tokens
        while True:
            now = clock.now()
            self._advance(now)
            left = end - self._tokens
            if left < SAME_TOKEN:
                return
            beside = max(0.0, self.free_at - now)
            left = max(0.0, left - beside * self._rate_beside)
            yield max(LEAST_WAIT, beside + left * (self.step if left < 1.0 else self._fleet.step))

    def longest_chunk(self, since: float) -> float:
        """Seconds of the longest chunk that ended after then: the longest time without a token."""
        found = 0.0
        for ended, seconds in reversed(self._chunks):
            if ended <= since:
                break
            found = max(found, seconds)
        return found

    def _tell(self) -> None:
        for event in self.cache.take_events():
            self.told(event)

    def _compute_beside(self, seconds: float, now: float) -> None:
        """A chunk, in a step of its own, which gives each stream a token; or a whole prompt, which gives them none."""
        whole = seconds + self.step if self._fleet.chunk else seconds
        self._busy(whole, 1.0 / whole if self._fleet.chunk else 0.0, now)
        self._chunks.append((self.free_at, whole))
        while self._chunks[0][0] < now - KEPT_CHUNKS:
            self._chunks.popleft()

    def _busy(self, seconds: float, rate: float, now: float) -> None:
        """Compute for so long, and meanwhile give each stream so many tokens a second."""
        self._advance(now)
        if self.free_at <= now:
            self._rate_beside = rate
        self.free_at = max(now, self.free_at) + seconds

    def _advance(self, now: float) -> None:
        """Count the tokens that streams got until now."""
        beside = min(now, max(self._at, self.free_at)) - self._at
        self._tokens += beside * self._rate_beside + (now - self._at - beside) / self.step
        self._at = now


class Simulation:
    """One run of a policy; ``itl_budget`` as in `CacheAware`, for `cache`.

    ``policy``: in the place of the one that is named.
    """

    def __init__(
        self, routing: Routing, fleet: Fleet, itl_budget: float = ITL_BUDGET, policy: RoutingPolicy | None = None
    ) -> None:
        self.fleet = fleet
        self.clock = FakeClock()
        self.pool = Pool(self.clock, CircuitBreakerConfig(slow_start=0))
        self.index = PrefixIndex(_scheme(fleet.shape))
        self.nodes = {name: SimulatedNode(fleet, self._telling(Place(name)), self.clock.now) for name in fleet.roles()}
        self._policy = PlanPolicy(policy or policy_named(routing, itl_budget))
        self._turns, self._turnover = itertools.count(), Turnover()
        self._began = self.clock.now()
        ids = itertools.count()
        self._conversations = Conversations(Keep.AUTO, lambda: f"conversation-{next(ids)}", LimitsByKey(), LONGEST)
        self._texts = TextIndex()
        self._dice = random.Random(0)
        self._keep_metrics = KeepMetrics(CollectorRegistry())
        self._outcome = Outcome(routing, fleet.roles())
        for name, roles in fleet.roles().items():
            node = dataclasses.replace(Node(name, f"http://{name}", roles, MODEL), **_published(fleet))
            self.pool.add(node)
            self.pool.bring_up(node)

    def run(self, trace: Trace) -> Outcome:
        """All requests, to their ends."""
        self._began = began = self.clock.now()
        order, followers = itertools.count(), trace.followers()
        due = [
            (request.at, next(order), self._request(trace, number), number)
            for number, request in enumerate(trace.requests)
            if request.after is None
        ]
        heapq.heapify(due)
        while due:
            at, _, steps, number = heapq.heappop(due)
            self.clock.advance(began + at - self.clock.now())
            wait = next(steps, None)
            if wait is not None:
                heapq.heappush(due, (at + wait, next(order), steps, number))
                continue
            for follower in followers.get(number, ()):
                begins = at + trace.requests[follower].at
                heapq.heappush(due, (begins, next(order), self._request(trace, follower), follower))
        return self._outcome

    def hits(self, prompt: HashedPrompt) -> PromptHits:
        """The cached part of a prompt at every place, as far as it is known, with what was just sent there."""
        now, places = self.clock.now(), self.index.numbers.places
        found = [(hit, places(mask)) for hit, mask in self.index.hits(prompt.hashes, prompt.tokens, now)]
        if self._turnover.is_due(now):
            stored = [(each, self.index.stored(each), self.fleet.shape.blocks) for each in map(Place, self.nodes)]
            self._turnover.note_stored(stored, now)
        return PromptHits(prompt.tokens, HitSource.EVENTS, found, self._turnover.stays)

    def _request(self, trace: Trace, number: int) -> Iterator[float]:
        """One request from its arrival to its last token; yields the seconds until it goes on."""
        request = trace.requests[number]
        prompt, arrived = hashed(request.prompt, self.fleet.shape.step), self.clock.now()
        session = None if request.session is None else hash64(f"session {request.session}")
        keep = self._keep(request.prompt, prompt.tokens, named=session is not None)
        chosen = self._plan(prompt, session, self.hits(prompt), keep.next_turn())
        self._expect(chosen, prompt)
        with self._slot(chosen.decode, chosen, prompt, request.output) as slot:
            yield from self._late()
            yield from self._first_token(chosen, prompt, slot, keep)
            yield from self._late()
            decode, first = self.nodes[chosen.decode.name], self.clock.now()
            self._outcome.add_first_token(prompt.tokens, first - arrived)
            decode.streams_are(1, first)
            yield from decode.stream(request.output - 1, self.clock)
            decode.streams_are(-1, self.clock.now())
            seconds = self.clock.now() - first
            slot.streamed(request.output, seconds)
            self._outcome.streams.append(
                Stream(arrived - self._began, first - arrived, seconds, request.output - 1, decode.longest_chunk(first))
            )
        keep.end()

    def _late(self) -> Iterator[float]:
        """Wait for none to twice the seconds of `Fleet.late`."""
        if self.fleet.late:
            yield self._dice.uniform(0, 2 * self.fleet.late)

    def _expect(self, chosen: Plan, prompt: HashedPrompt) -> None:
        """As `EventPrefixSource.routed` does."""
        hit, until = self.index.after_prefill(prompt.tokens), self.clock.now() + EXPECTED_SECONDS
        computing = chosen.prefill or chosen.decode
        self.index.expect(Place(computing.name), prompt.hashes, hit, until)

    def _telling(self, place: Place) -> Callable[[CacheEvent], None]:
        def tell(event: CacheEvent) -> None:
            for read in _as_read(event, self.fleet.shape):
                self.index.apply(place, read)

        return tell

    def _first_token(self, chosen: Plan, prompt: HashedPrompt, slot: Slot, keep: PromptKeep) -> Iterator[float]:
        """The prompt is computed, by either node, and handed over."""
        if chosen.prefill is None:
            yield from self._compute(chosen.decode, slot, prompt, chosen, keep)
            if not self.fleet.chunk:  # the step of the last chunk has given the first token
                yield self.fleet.step
            return
        with self._slot(chosen.prefill, chosen, prompt, 0) as prefilling:
            yield from self._compute(chosen.prefill, prefilling, prompt, chosen, keep)
        began = self.clock.now()
        decode = self.nodes[chosen.decode.name]
        moved, computed, seconds = decode.pull(prompt, began)
        self._outcome.computed[chosen.decode.name] += computed
        self._outcome.moved += moved
        yield seconds
        yield from decode.after_prompt(self.clock)
        place = self.pool.view(chosen.decode.name).lightest
        seconds = place.seconds_alone(began, self.clock.now() + decode.step)
        self.pool.load.learn(Work.HAND_OVER, place, moved, seconds)
        yield decode.step

    def _keep(self, prompt: Prompt, tokens: int, *, named: bool) -> PromptKeep:
        """As `Keeping.begin_turn` does, of a completion: its conversation is found by its text."""
        now, text = self.clock.now(), b"".join(map(_text, prompt))
        chain = self._texts.refined(chain_of_completion(MODEL, "", text))
        self._texts.sent(chain, {}, now)
        conversation = self._conversations.turn("", chain.hashes, now, named=named, tokens=tokens)
        return PromptKeep(conversation, None, tokens, self._conversations, self.clock, self._keep_metrics)

    def _compute(self, node: Node, slot: Slot, prompt: HashedPrompt, chosen: Plan, keep: PromptKeep) -> Iterator[float]:
        """Until the node is done with it, what waits there before it included."""
        orders = keep.order(node, None)
        computed, kept = yield from self.nodes[node.name].compute(prompt, self.clock, orders)
        keep.told(kept or None)
        self._outcome.computed[node.name] += computed
        if chosen.reason is not None:
            self._outcome.planned += chosen.tokens - chosen.computed
            self._outcome.resumed += prompt.tokens - computed
        slot.computed(computed)

    def _slot(self, node: Node, chosen: Plan, prompt: HashedPrompt, output: int) -> Slot:
        """The leg's place in the proxy's pool, with what the plan says that it will compute there."""
        computes = node is chosen.computing
        expected = prompt.tokens if chosen.reason is None else chosen.computed
        held = Footprint(prompt.tokens + output, 1) if Role.DECODE in node.roles else NO_FOOTPRINT
        return self.pool.acquire(node.name, LegLoad(0, expected if computes else None, held))

    def _plan(self, prompt: HashedPrompt, session: int | None, hits: PromptHits, turn: NextTurn | None) -> Plan:
        needs = PlanInput(MODEL, session=session, prefix=hits, tokens=prompt.tokens, next_turn=turn)
        return plan(self.pool.state(), needs, self._policy, next(self._turns))


@functools.lru_cache(maxsize=4096)
def _text(segment: Segment) -> bytes:
    return random.Random(segment.name).randbytes(BYTES_OF_TOKEN * segment.tokens)


def _published(fleet: Fleet) -> dict[str, Any]:
    """The facts that a preflight would find out about such a node."""
    shape, keeps = fleet.shape, fleet.keep_share > 0
    sizes = {"block_size": shape.block_size, "prefix_match_unit": shape.unit}
    return {"capacity": shape.capacity, "keeps": keeps, **sizes}


def _scheme(shape: CacheShape) -> HashScheme:
    return HashScheme(HashAlgorithm.SHA256_CBOR, shape.step, shape.block_size, ROOT, states=shape.state_groups > 0)


def _as_read(event: CacheEvent, shape: CacheShape) -> Iterator[BlocksStored | BlocksRemoved]:
    """An event as the proxy reads it, of each of its groups."""
    of_state = event.kind is Kind.STATE
    kind = GroupKind.STATE if of_state else GroupKind.ATTENTION
    for group in range(1, 1 + shape.state_groups) if of_state else (0,):
        if isinstance(event, Removed):
            yield BlocksRemoved(group, (event.hash,))
        else:
            yield BlocksStored(group, kind, event.hashes, shape.step)
