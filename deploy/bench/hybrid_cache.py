"""The prefix caches of one simulated vLLM node: attention blocks and mamba states in one pool. Pure.

It follows vLLM 0.32 with ``mamba_cache_mode=align`` and its default retention, as read in its sources and measured:

- All groups take their blocks from one pool, and what was not used for the longest time is evicted first.
- A full attention block is kept for every block of a prompt.
- A state is kept at the last block boundary before a prompt's last token, and nowhere else along it; but where the
  node has attention blocks further than a state (other prompts shared them), the first prompt that comes along also
  leaves a state at the end of those blocks. So of three prompts that share 1,300 tokens the third is the first to hit.
- With ``--prefix-match-unit`` there are hashes between block boundaries: a prompt also leaves its tail block and a
  state at the last unit before its last token.
- After a pull a decode node keeps the attention blocks, and a state only with a unit (this project's connector ends a
  hand-over there).

- Entries of a `Hold` are evicted last, when nothing else is left (`node_keeps`).

What is left out: blocks that running requests hold are evicted like others, and a decode node keeps nothing of the
tokens that it generates.
"""

import dataclasses
import enum
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence

from pdproxy.nodes.node import Binding, Capacity
from pdproxy.planning.prefix import Hit


class Kind(enum.StrEnum):
    """The kind of a cache group; vLLM's ``kv_cache_spec_kind``."""

    ATTENTION = "full_attention"
    STATE = "mamba"


@dataclasses.dataclass(frozen=True, slots=True)
class CacheShape:
    """The shape of a node's caches.

    Attributes:
        blocks: in the pool; each block of each group takes one.
        block_size: tokens in an attention block.
        unit: tokens between two hashes, a divisor of ``block_size``; 0 for ``block_size``.
        state_groups: of the model; 0 for one of plain attention. A state takes a block in each.
    """

    blocks: int = 640
    block_size: int = 256
    unit: int = 0
    state_groups: int = 3

    @property
    def step(self) -> int:
        """Tokens between two hashes."""
        return self.unit or self.block_size

    @property
    def capacity(self) -> Capacity:
        """The capacity that such a node publishes."""
        sequences = self.blocks // self.state_groups if self.state_groups else None
        return Capacity(self.blocks * self.block_size, sequences, 1, Binding.ATTENTION)


@dataclasses.dataclass(frozen=True, slots=True)
class HashedPrompt:
    """A prompt as a cache knows it: ``hashes[i]`` names its first ``(i + 1) * step`` tokens."""

    tokens: int
    hashes: Sequence[int]


@dataclasses.dataclass(frozen=True, slots=True)
class Stored:
    """Entries were cached, of the prompt's tokens from ``begins`` to ``ends``; vLLM's ``BlockStored`` of one group.

    Attributes:
        hashes: of a state group only those of the states that were kept, maybe none.
        parent: the hash of all tokens before ``begins``; None at 0.
    """

    kind: Kind
    hashes: tuple[int, ...]
    parent: int | None
    begins: int
    ends: int


@dataclasses.dataclass(frozen=True, slots=True)
class Removed:
    """One entry was evicted; vLLM's ``BlockRemoved`` of one group."""

    kind: Kind
    hash: int


CacheEvent = Stored | Removed


@dataclasses.dataclass(frozen=True, slots=True)
class Pulled:
    """A ticket's cost to a decode node: tokens whose attention was read, and prompt tokens that it computed itself."""

    moved: int
    computed: int


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Hold:
    """Entries that are evicted last: a prefix of a prompt and the state behind it; ``blocks`` of the pool.

    Attributes:
        tokens: that a prompt which goes on from them need not compute.
    """

    entries: tuple[tuple[Kind, int], ...]
    tokens: int
    blocks: int


class HybridCache:
    """One place's caches. Every method names what changed by events, which `take_events` hands over.

    ``give_up``: has to `release` one hold at least; called when an entry must go and all are held.
    """

    def __init__(self, shape: CacheShape, give_up: Callable[[], None] = lambda: None) -> None:
        self.shape = shape
        self._give_up = give_up
        self._entries: OrderedDict[tuple[Kind, int], None] = OrderedDict()
        self._held: Counter[tuple[Kind, int]] = Counter()
        self._used = 0
        self._events: list[CacheEvent] = []

    @property
    def used(self) -> int:
        """Blocks of the pool that are taken."""
        return self._used

    def take_events(self) -> list[CacheEvent]:
        """All since the last call."""
        events, self._events = self._events, []
        return events

    def hit(self, prompt: HashedPrompt) -> Hit:
        """The cached tokens of a prompt, at most all but its last one."""
        attention = self._attention(prompt)
        if not self.shape.state_groups:
            return Hit(attention, attention)
        step, entries = self.shape.step, self._entries
        for index in range(attention // step, 0, -1):
            if (Kind.STATE, prompt.hashes[index - 1]) in entries:
                return Hit(attention, index * step)
        return Hit(attention, 0)

    def compute(self, prompt: HashedPrompt) -> int:
        """The node computes a prompt from where it can resume; how many tokens that takes.

        Raises:
            ValueError: the pool is too small for it.
        """
        hit = self.hit(prompt)
        states = self._kept_states(prompt, hit)
        self._touch(prompt, Hit(hit.resume, hit.resume))
        self._store(prompt, hit.resume, states)
        return prompt.tokens - hit.resume

    def pull(self, prompt: HashedPrompt) -> Pulled:
        """The node gets a ticket for all but the last tokens, reads what it has not cached, and computes the rest.

        Raises:
            ValueError: the pool is too small for it.
        """
        unit, shape = self.shape.unit, self.shape
        handed = _floor(prompt.tokens - 1, unit) if unit and shape.state_groups else prompt.tokens - 1
        hit = self.hit(prompt)
        self._touch(prompt, Hit(hit.attention, 0))
        states = [handed] if unit and shape.state_groups and handed else []
        self._store(prompt, hit.attention, states)
        return Pulled(max(0, handed - hit.attention), prompt.tokens - handed)

    def resumable(self, prompt: HashedPrompt, *, ended: bool = False) -> Hold:
        """The entries that a prompt would resume from; or, where it has ended, one that goes on from it."""
        longer = HashedPrompt(prompt.tokens + 1, prompt.hashes) if ended else prompt
        resume = self.hit(longer).resume
        found = [(Kind.ATTENTION, self._key(longer, tokens)) for tokens in self._blocks(longer, resume)]
        if resume and self.shape.state_groups:
            found.append((Kind.STATE, self._key(longer, resume)))
        return Hold(tuple(found), resume, sum(self._cost(kind) for kind, _ in found))

    def hold(self, hold: Hold) -> None:
        """Evict these last, until they are released."""
        self._held.update(hold.entries)

    def release(self, hold: Hold) -> None:
        """Entries that no other hold has are as if they had just been used."""
        for entry in reversed(hold.entries):
            self._held[entry] -= 1
            if not self._held[entry]:
                del self._held[entry]
                self._renew(*entry)

    def held_with(self, hold: Hold, others: Iterable[Hold]) -> int:
        """Blocks of these holds together."""
        entries = {entry for each in (hold, *others) for entry in each.entries}
        return sum(self._cost(kind) for kind, _ in entries)

    def _key(self, prompt: HashedPrompt, tokens: int) -> int:
        return prompt.hashes[tokens // self.shape.step - 1]

    def _attention(self, prompt: HashedPrompt) -> int:
        """The longest run of whole blocks, and with a unit the deepest cached tail of the block after it."""
        size, found, most, entries = self.shape.block_size, 0, prompt.tokens - 1, self._entries
        steps = size // self.shape.step
        for key in prompt.hashes[steps - 1 : most // size * steps : steps]:
            if (Kind.ATTENTION, key) not in entries:
                break
            found += size
        if self.shape.unit:
            tail = _floor(min(most, found + size - 1), self.shape.unit)
            for tokens in range(tail, found, -self.shape.unit):
                if (Kind.ATTENTION, self._key(prompt, tokens)) in self._entries:
                    return tokens
        return found

    def _kept_states(self, prompt: HashedPrompt, hit: Hit) -> list[int]:
        """Where computing from ``hit.resume`` leaves states, in tokens, deepest last."""
        if not self.shape.state_groups:
            return []
        size, last = self.shape.block_size, prompt.tokens - 1
        kept = {_floor(last, size), _floor(last, self.shape.step)}
        if hit.attention > hit.resume:
            kept.add(_floor(hit.attention, size))
        return sorted(tokens for tokens in kept if tokens > hit.resume)

    def _blocks(self, prompt: HashedPrompt, until: int) -> Iterator[int]:
        """Ends of the attention entries of the first ``until`` tokens: of whole blocks, and with a unit of the tail."""
        size = self.shape.block_size
        yield from range(size, until + 1, size)
        tail = _floor(min(until, prompt.tokens - 1), self.shape.step)
        if tail % size:
            yield tail

    def _touch(self, prompt: HashedPrompt, hit: Hit) -> None:
        """Make what is used of a hit the newest: vLLM frees a request's blocks from its end to its beginning."""
        for tokens in sorted(self._blocks(prompt, hit.attention), reverse=True):
            self._renew(Kind.ATTENTION, self._key(prompt, tokens))
        if hit.resume and self.shape.state_groups:
            self._renew(Kind.STATE, self._key(prompt, hit.resume))

    def _renew(self, kind: Kind, key: int) -> None:
        if (kind, key) in self._entries:
            self._entries.move_to_end((kind, key))

    def _store(self, prompt: HashedPrompt, begins: int, states: list[int]) -> None:
        if prompt.tokens // self.shape.block_size + self.shape.state_groups * len(states) > self.shape.blocks:
            raise ValueError(f"a pool of {self.shape.blocks} blocks cannot hold a prompt of {prompt.tokens} tokens")
        ends = [tokens for tokens in self._blocks(prompt, prompt.tokens) if tokens > _floor(begins, self.shape.step)]
        for tokens in sorted(ends, reverse=True):
            self._put(Kind.ATTENTION, self._key(prompt, tokens))
        for tokens in states:
            self._put(Kind.STATE, self._key(prompt, tokens))
        self._tell(Kind.ATTENTION, prompt, begins, ends)
        self._tell(Kind.STATE, prompt, begins, states)
        self._evict()

    def _put(self, kind: Kind, key: int) -> None:
        if (kind, key) not in self._entries:
            self._used += self._cost(kind)
        self._entries[kind, key] = None
        self._entries.move_to_end((kind, key))

    def _cost(self, kind: Kind) -> int:
        return self.shape.state_groups if kind is Kind.STATE else 1

    def _tell(self, kind: Kind, prompt: HashedPrompt, begins: int, ends: list[int]) -> None:
        """As vLLM publishes it: attention blocks in one event, each state with the whole blocks since the last one.

        An entry that ends within a block has an event of its own, which begins with that block. Of the blocks after
        which no state was kept there is an event too, without a hash.
        """
        begins, size = _floor(begins, self.shape.block_size), self.shape.block_size
        whole = [tokens for tokens in ends if tokens % size == 0]
        runs = [whole] if kind is Kind.ATTENTION and whole else [[tokens] for tokens in whole]
        for run in runs:
            self._add(kind, prompt, begins, run)
            begins = run[-1]
        whole_until = _floor(prompt.tokens, size)
        if kind is Kind.STATE and self.shape.state_groups and begins < whole_until:
            parent = self._key(prompt, begins) if begins else None
            self._events.append(Stored(kind, (), parent, begins, whole_until))
        for tokens in (tokens for tokens in ends if tokens % size):
            self._add(kind, prompt, _floor(tokens, size), [tokens])

    def _add(self, kind: Kind, prompt: HashedPrompt, begins: int, ends: list[int]) -> None:
        parent = self._key(prompt, begins) if begins else None
        self._events.append(Stored(kind, tuple(self._key(prompt, each) for each in ends), parent, begins, ends[-1]))

    def _evict(self) -> None:
        while self._used > self.shape.blocks:
            oldest = next((entry for entry in self._entries if entry not in self._held), None)
            if oldest is None:
                self._give_up()
                continue
            kind, key = oldest
            del self._entries[oldest]
            self._used -= self._cost(kind)
            self._events.append(Removed(kind, key))


def _floor(tokens: int, step: int) -> int:
    return tokens // step * step
