"""Nodes that hand prompts to each other never wait for each other, and a ticket to its own issuer costs nothing.

Schedulers and connectors are real, the workers are played: they keep leases, read from each other, verify, send
heartbeats, and give tickets back, as `connector/worker.py` does. Nodes die, and another engine takes their place. Time
passes by a second for each step.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.outputs import KVConnectorOutput

from connector import scheduler
from connector.counters import ReadOutcome
from connector.messages import Verdict
from connector.metadata import ReadEnd, WorkerReport
from tests.connector.crowded import in_no_time
from tests.connector.harness import BLOCK, DENSE, HYBRID, PACES, Node, at_pace, make_node, prompt, sent, take_ticket

LEASE = 30
EXTENSION = 20
"""Seconds by which a heartbeat extends a lease (vLLM: two thirds of it)."""
READ_STEPS = 3
MOST_STEPS = 2000
PROMPTS = 8
"""Different ones of each length."""
LENGTHS = (20, 60, 120, 180, 240)


class Unfinished(AssertionError):
    """A request waits for ever, or something is held for ever."""


@dataclass
class Lease:
    """On a worker: until when blocks are held, and by which reads they were seen."""

    until: float
    reads: set[str] = field(default_factory=set)


@dataclass
class Read:
    """On a worker: a read of another engine's blocks that is under way."""

    nonce: str
    engine: str
    alias: str
    steps: int = 0


@dataclass
class Peer:
    """One node: its scheduler, and what its worker would know."""

    name: str
    node: Node
    free: int
    aliases: dict[str, str] = field(default_factory=dict)
    leases: dict[str, Lease] = field(default_factory=dict)
    reads: dict[str, Read] = field(default_factory=dict)
    returns: dict[str, Read] = field(default_factory=dict)
    """Tickets to give back, by request."""
    released: set[str] = field(default_factory=set)
    alive: bool = True


@dataclass
class Asked:
    """One request of a client: where its prompt is computed, and where it is answered."""

    name: str
    tokens: list[int]
    most: int
    prefill: str
    decode: str
    ended: bool = False


@dataclass
class World:
    """All of them. `seed` decides everything."""

    seed: int
    rng: Random = field(init=False)
    now: float = 1000.0
    peers: dict[str, Peer] = field(default_factory=dict)
    asked: list[Asked] = field(default_factory=list)
    made: int = 0

    def __post_init__(self) -> None:
        self.rng = rng = Random(self.seed)
        self.groups = rng.choice((HYBRID, HYBRID, DENSE))
        self.unit = rng.choice((None, 4, 8)) if self.groups is HYBRID else None
        self.blocks = rng.randint(20, 44)
        self.budget = rng.choice((64, 128, 4096))
        self.pace = PACES[rng.choice(sorted(PACES))]
        self.own_tickets = rng.random() < 0.3
        for _ in range(rng.choice((2, 2, 3))):
            self.join()

    def join(self) -> Peer:
        """Another engine; none before had its name."""
        self.made += 1
        name = f"engine-{self.made}"
        scheduling = {"max_num_batched_tokens": self.budget, "max_num_scheduled_tokens": self.budget}
        with at_pace(self.pace):
            node = make_node(
                "kv_both",
                self.groups,
                engine_id=name,
                num_blocks=self.blocks,
                unit=self.unit,
                scheduling=scheduling,
            )
        self.peers[name] = Peer(name, node, node.free_blocks)
        return self.peers[name]

    # ---- clients

    def ask(self, number: int) -> None:
        rng, names = self.rng, sorted(self.peers)
        prefill, decode = rng.choice(names), rng.choice(names)
        if prefill == decode and not self.own_tickets:
            prefill, decode = rng.sample(names, 2)
        length = rng.choice([each for each in LENGTHS if each < (self.blocks - 6) * BLOCK])
        one = Asked(f"r{number}", prompt(length, rng.randrange(PROMPTS)), rng.choice((1, 4, 12)), prefill, decode)
        params = {"do_remote_decode": True}
        self.peers[prefill].node.add(f"{one.name}-p", one.tokens, params, max_tokens=1)
        self.asked.append(one)

    def outputs(self, peer: Peer, outputs: list[Any]) -> None:
        for output in outputs:
            if output.finish_reason is None:
                continue
            name, _, leg = output.request_id.partition("-")
            one = next(each for each in self.asked if each.name == name)
            if not leg:
                one.ended = True
            elif one.decode in self.peers:
                ticket = output.kv_transfer_params
                self.peers[one.decode].node.add(name, one.tokens, ticket, max_tokens=one.most)
            else:
                one.ended = True

    def die(self) -> None:
        """A node and all that it works on; its clients are gone."""
        name = self.rng.choice(sorted(self.peers))
        self.peers.pop(name).node.scheduler.shutdown()
        for one in self.asked:
            one.ended |= name in (one.prefill, one.decode) and not self.runs(one)
        self.join()

    def runs(self, one: Asked) -> bool:
        """Whether a living node works on it. A leg that has ended stays among the requests while it holds blocks."""
        found = (
            peer.node.scheduler.requests.get(name)
            for peer in self.peers.values()
            for name in (one.name, f"{one.name}-p")
        )
        return any(request is not None and not request.is_finished() for request in found)

    # ---- workers

    def report(self, peer: Peer) -> KVConnectorOutput:
        ends: dict[str, ReadEnd] = {}
        for name, read in list(peer.reads.items()):
            read.steps += 1
            if read.steps >= READ_STEPS or read.engine not in self.peers:
                del peer.reads[name]
                ends[name] = ReadEnd(read.nonce, self.outcome(read))
        returned = {}
        for name, read in list(peer.returns.items()):
            del peer.returns[name]
            returned[read.nonce] = 1
            self.notice(read)
        seen = {name: dict.fromkeys(lease.reads, 1) for name, lease in peer.leases.items() if lease.reads}
        over = {name for name, lease in peer.leases.items() if lease.reads or lease.until < self.now}
        over |= peer.released & peer.leases.keys()
        peer.released = set()
        for name in over:
            del peer.leases[name]
        failed = {name for name, end in ends.items() if end.outcome is not ReadOutcome.VERIFIED}
        report = WorkerReport(reads_seen=seen, reads_ended=ends, returned=returned)
        return KVConnectorOutput(
            finished_sending=over,
            finished_recving=set(ends),
            failed_recving=failed,
            kv_connector_worker_meta=report or None,
        )

    def outcome(self, read: Read) -> ReadOutcome:
        if read.engine not in self.peers:
            return ReadOutcome.TRANSFER_FAILED
        verdict = self.peers[read.engine].node.side.verify(read.engine, read.alias, read.nonce)
        self.notice(read)
        return ReadOutcome.VERIFIED if verdict is Verdict.HELD else ReadOutcome.NOT_HELD

    def notice(self, read: Read) -> None:
        """The prefill node's worker hears that a read has ended."""
        there = self.peers.get(read.engine)
        if there is not None and (name := there.aliases.get(read.alias)) in there.leases:
            there.leases[name].reads.add(read.nonce)

    def take_orders(self, peer: Peer) -> None:
        meta = peer.node.metas[-1]
        peer.aliases |= meta.aliases
        for name in meta.reqs_to_send:
            peer.leases[name] = Lease(self.now + LEASE)
        for name, nonces in meta.returned.items():
            if name in peer.leases:
                peer.leases[name].reads |= set(nonces)
        peer.released |= meta.releases
        for name, order in meta.reads.items():
            remote = meta.reqs_to_recv[name].remote
            read = Read(order.nonce, remote.engine_id, remote.request_id)
            (peer.reads if order.pull_tokens else peer.returns)[name] = read
        for engine, info in peer.node.side._heartbeat_by_engine.items():
            there = self.peers.get(engine)
            if there is None:
                continue
            for alias in info.req_ids:
                if (lease := there.leases.get(there.aliases.get(alias, ""))) is not None:
                    lease.until = max(lease.until, self.now + EXTENSION)

    # ---- time

    def step(self) -> None:
        self.now += 1.0
        for peer in list(self.peers.values()):
            outputs = peer.node.step(self.report(peer))
            self.take_orders(peer)
            self.outputs(peer, outputs)

    def play(self) -> int:
        """The whole of it; how many steps it took. Raises Unfinished."""
        rng = self.rng
        number = rng.choice((6, 16, 40))
        deaths = {rng.randrange(40) for _ in range(rng.choice((0, 0, 1, 3)))}
        at_once = rng.random() < 0.5
        if at_once:
            for each in range(number):
                self.ask(each)
        for at in range(40):
            if not at_once and at < number:
                self.ask(at)
            if at in deaths:
                self.die()
            self.step()
        for steps in range(MOST_STEPS):
            self.step()
            if all(one.ended for one in self.asked) and self.is_idle():
                return steps
        raise Unfinished(self.where())

    def is_idle(self) -> bool:
        return all(
            peer.node.free_blocks == peer.free and not len(peer.node.side._shared) and not len(peer.node.side._leases)
            for peer in self.peers.values()
        )

    def where(self) -> str:
        open_ = [f"{one.name} {len(one.tokens)} {one.prefill}→{one.decode}" for one in self.asked if not one.ended]
        nodes = [
            f"{peer.name}: {peer.node.free_blocks} of {peer.free} free, {len(peer.leases)} leases, "
            f"{len(peer.node.scheduler.running)} run, {len(peer.node.side._shared)} legs"
            for peer in self.peers.values()
        ]
        return f"seed {self.seed}, {self.blocks} blocks: {open_}; {nodes}"


@contextmanager
def world(seed: int) -> Iterator[World]:
    """One, with a clock of its own, and its end."""
    with in_no_time(), pytest.MonkeyPatch.context() as patch:
        made = World(seed)
        patch.setattr(scheduler, "time", SimpleNamespace(monotonic=lambda: made.now, time=lambda: 0.0))
        yield made
        for peer in made.peers.values():
            peer.node.scheduler.shutdown()


MANY = 3_000


def unfinished(seeds: range) -> Iterator[str]:
    """The faults of those of the seeds that end badly."""
    for seed in seeds:
        with world(seed) as one:
            try:
                one.play()
            except Unfinished as wrong:
                yield str(wrong)


@pytest.mark.parametrize("first", range(0, 100, 25))
def test_every_request_ends_and_every_block_comes_back(first: int) -> None:
    assert list(unfinished(range(first, first + 25))) == []


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_every_request_ends_and_every_block_comes_back_in_many_ways() -> None:
    found = list(unfinished(range(100, 100 + MANY)))
    print(f"{len(found)} of {MANY} seeds did not end")
    assert found == []


@pytest.fixture
def node() -> Node:
    return make_node("kv_both", engine_id="engine-b")


def test_a_node_takes_the_prompt_of_its_own_ticket_from_its_own_cache(node: Node) -> None:
    free = node.free_blocks
    ticket = take_ticket(node, prompt(100))
    node.add("d", prompt(100), ticket)
    node.step()
    assert node.metas[-1].returned.keys() == {"p-0"}, "the workers are told that nobody will read it"
    assert not node.metas[-1].reads
    node.step(sent("p-0"))
    assert len(node.run_out("d")) == 2
    assert node.free_blocks == free
    assert node.counts("own_tickets") == {"": 1}
    assert node.counts("prompt_tokens") == {"computed": 103, "hit": 96}


def test_its_own_ticket_twice_is_served_twice(node: Node) -> None:
    ticket = take_ticket(node, prompt(100))
    for name in ("one", "two"):
        node.add(name, prompt(100), ticket)
        node.run_out(name)
    assert node.side.verify("engine-b", ticket["remote_request_id"], "any") is Verdict.HELD, "until the workers report"
    node.step(sent("p-0"))
    node.add("late", prompt(100), ticket)
    assert len(node.run_out("late")) == 4


def test_a_ticket_of_another_node_with_the_same_engine_id_is_named(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    twin = make_node("kv_both", engine_id="engine-b")
    node.add("d", prompt(100), take_ticket(twin, prompt(100)))
    assert len(node.run_out("d")) == 4
    assert node.counts("refused") == {"own_engine": 1}
    assert "no two nodes may have the same engine_id" in caplog.text


def test_a_node_that_only_prefills_may_fill_its_cache_with_leases() -> None:
    node = make_node("kv_producer", engine_id="engine-p", num_blocks=30)
    for number in range(3):
        take_ticket(node, prompt(100, number), f"p-{number}")
    assert len(node.side._leases) == 3


def test_prefill_legs_leave_half_of_a_shared_cache_to_others() -> None:
    node = make_node("kv_both", engine_id="engine-b", num_blocks=30)
    take_ticket(node, prompt(100))
    node.add("leg", prompt(100, 1), {"do_remote_decode": True}, max_tokens=1)
    node.step()
    assert "leg" not in node.scheduled[-1]
    node.add("other", prompt(100, 2))
    assert len(node.run_out("other")) == 4
    node.step(sent("p-0"))
    assert len(node.run_out("leg")) == 1


@pytest.mark.parametrize(
    ("kv_role", "extra", "delivers"),
    [
        ("kv_consumer", {}, False),
        ("kv_consumer", {"pdproxy_roles": ["prefill", "decode"]}, True),
        ("kv_producer", {}, True),
        ("kv_both", {}, True),
    ],
)
def test_vllms_scheduler_recomputes_what_is_preempted_where_tickets_are_given(
    kv_role: str, extra: dict[str, object], delivers: bool
) -> None:
    """Else a request that ended while it was preempted would name freed blocks in its ticket."""
    assert make_node(kv_role, extra=extra).scheduler.requires_kv_delivery is delivers
