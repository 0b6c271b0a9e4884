"""A decode node whose cache is too small for what is asked of it, played at random on vLLM's real scheduler.

Requests come with a ticket, with a prefix that a tier has, or with neither; many are turns of conversations, for whose
next turn the node is to keep what it has. Prefill nodes die, freeze and wake; tickets expire; tiers fail and hang;
clients leave; the engine is paused; steps have small budgets. The scheduler and the connector are real, the workers are
played: they report what real ones do (`tests/connector/harness.py`).

vLLM's `scheduler_reserve_full_isl` stays on, as by default. Without it vLLM admits a prompt as soon as its first chunk
fits, and "has room" would mean something else; every request ends then, too (400 seeds were tried).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiKVConnectorWorkerMetadata
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from connector import idle_rest, peer_paths
from connector.counters import ReadOutcome
from connector.metadata import ReadEnd, WorkerReport
from connector.tiers.rank_loads import WeightedReport
from tests.connector.harness import BLOCK, DENSE, HYBRID, PACES, Node, at_pace, make_node, prompt, take_ticket
from tests.connector.tiers.disk_tier import DiskTier
from tests.connector.tiers.harness import Several, make_several, pull, tier

BUSY_STEPS = 40
SETTLED = 8
"""Steps in a row in which nothing happens, after which nothing will."""
PATIENCE = 8
"""Steps for which a request that has room may wait behind others that cannot have any."""
SLACK = 2
"""Blocks that `needed` may be wrong by: a state's copy, a checkpoint, hits that others use."""
MOST_STEPS = 3000
GROUPS = {"hybrid": HYBRID, "dense": DENSE}
PEERS = 3
ENGINE = "engine-p"
LENGTHS = (20, 50, 100, 150, 200, 260, 330)
PROMPTS = 6
"""Different ones of each length."""


class Stuck(AssertionError):
    """A request waits, for no reason or for ever."""


@cache
def prefill_node(kind: str, unit: int | None) -> Node:
    """Gives out all tickets; nobody reads them."""
    return make_node("kv_producer", GROUPS[kind], num_blocks=4000, unit=unit)


@cache
def ticket_for(kind: str, unit: int | None, length: int, number: int) -> Mapping[str, Any]:
    """A ticket for one of the prompts; made once, for every node of the kind accepts it."""
    return take_ticket(prefill_node(kind, unit), prompt(length, number), f"p-{length}-{number}")


@contextmanager
def in_no_time() -> Iterator[None]:
    """Without pauses: those of an idle engine, and before the path to a prefill node is probed again."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("LEASES_REST", "LEFTOVERS_REST"):
            patch.setattr(idle_rest, name, 0.0)
        for name in ("FIRST_PAUSE", "LONGEST_PAUSE", "LONGEST_HOLD"):
            patch.setattr(peer_paths, name, 0.0)
        yield


@dataclass(frozen=True)
class Scenario:
    """The settings of a run, fixed from the start."""

    kind: str
    blocks: int
    tiers: int
    pace: str
    hanging: bool
    budget: int
    watermark: float
    share: float
    unit: int | None
    """The node's `--prefix-match-unit`: a hybrid's hits may then end inside a block."""

    @classmethod
    def drawn(cls, rng: Random) -> Scenario:
        kind = rng.choice(("hybrid", "hybrid", "dense"))
        return cls(
            kind=kind,
            unit=rng.choice((None, 4, 8)) if kind == "hybrid" else None,
            blocks=rng.randint(10, 30),
            tiers=rng.choice((0, 0, 1, 2)),
            pace=rng.choice(sorted(PACES)),
            hanging=rng.random() < 0.5,
            budget=rng.choice((32, 64, 128, 4096)),
            watermark=rng.choice((0.0, 0.0, 0.1)),
            share=rng.choice((0.3, 0.7, 1.0)),
        )


class KnowingTier(DiskTier):
    """Has a prefix of every second prompt, `most` blocks at most. What it loads, the test says."""

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        most = int(self._kv_transfer_config.kv_connector_extra_config["most"])
        known = request.prompt_token_ids is not None and request.prompt_token_ids[0] % 2 == 0
        end = self._found[request.request_id] = min(most, (request.num_tokens - 1) // BLOCK) * BLOCK if known else 0
        return (end - num_computed_tokens, True) if end > num_computed_tokens else (0, False)


def node_of(scenario: Scenario, folder: Path) -> Node:
    scheduling = {
        "max_num_batched_tokens": scenario.budget,
        "max_num_scheduled_tokens": scenario.budget,
        "watermark": scenario.watermark,
    }
    groups, share = GROUPS[scenario.kind], dict[str, Any](pdproxy_keep_share=scenario.share)
    if not scenario.tiers:
        return make_node(
            "kv_consumer",
            groups,
            engine_id="engine-d",
            num_blocks=scenario.blocks,
            unit=scenario.unit,
            extra=share,
            scheduling=scheduling,
        )
    tiers = [
        {**tier(folder, name, "KnowingTier", most=most), "kv_connector_module_path": __name__}
        for name, most in (("one", 9), ("two", 5))[: scenario.tiers]
    ]
    deadline = 0.00001 if scenario.hanging else 1000.0
    return make_several(
        [pull(**share), *tiers],
        groups,
        num_blocks=scenario.blocks,
        unit=scenario.unit,
        scheduling=scheduling,
        pdproxy_load_deadline=deadline,
    )


@dataclass
class Crowd:
    """One such node, and everything that happens to it. `seed` decides all; `folder`: for tiers."""

    seed: int
    folder: Path
    rng: Random = field(init=False)
    scenario: Scenario = field(init=False)
    node: Node = field(init=False)
    free: int = field(init=False)
    frozen: set[int] = field(default_factory=set)
    dead: set[int] = field(default_factory=set)
    peers: dict[str, int] = field(default_factory=dict)
    reads: dict[str, str] = field(default_factory=dict)
    """Live reads: request id → nonce."""
    ages: Counter[str] = field(default_factory=Counter)
    loads: set[str] = field(default_factory=set)
    """Live loads of tiers."""
    stalled_reads: set[str] = field(default_factory=set)
    stalled_loads: set[str] = field(default_factory=set)
    ended: set[str] = field(default_factory=set)
    notices: list[str] = field(default_factory=list)
    probes: dict[int, int] = field(default_factory=dict)
    """Probes of the paths to peers: number → peer."""
    patience: Counter[str] = field(default_factory=Counter)
    made: int = 0
    seen: str = ""

    def __post_init__(self) -> None:
        self.rng = Random(self.seed)
        self.scenario = Scenario.drawn(self.rng)
        with at_pace(PACES[self.scenario.pace]):
            self.node = node_of(self.scenario, self.folder)
        self.free = self.node.free_blocks

    @property
    def scheduler(self) -> Any:
        return self.node.scheduler

    @property
    def living(self) -> list[Request]:
        return [request for request in self.scheduler.requests.values() if not request.is_finished()]

    # ---- what happens

    def play(self) -> None:
        """The whole of it. Raises Stuck."""
        for _ in range(BUSY_STEPS):
            self.event()
            self.step()
        self.scheduler.set_pause_state(PauseState.UNPAUSED)
        self.settle()
        for request in list(self.queue()):
            growing = request.num_preemptions and self.needed(request) + SLACK > self.reachable()
            if not growing and self.would_run(request):
                raise Stuck(f"{self.seen}: {request.request_id} has room and waits")
        self.frozen.clear()
        self.settle(thaw=True)
        if self.living:
            raise Stuck(f"{self.where()}: {[request.request_id for request in self.living]} wait for ever")
        if self.node.free_blocks != self.free:
            raise Stuck(f"{self.where()}: {self.free - self.node.free_blocks} blocks are not free")
        top = self.node.connector._admission if isinstance(self.node, Several) else self.node.side.admission
        if kept := len(top) + len(self.node.side.keeps):
            raise Stuck(f"{self.where()}: {kept} requests that have ended are remembered")

    def event(self) -> None:
        rng = self.rng
        if rng.random() < 0.3:
            self.ask()
        if rng.random() < 0.06 and (living := self.living):
            self.node.abort(rng.choice(living).request_id)
        if rng.random() < 0.06:
            self.dead ^= {rng.randrange(PEERS)}
        if rng.random() < 0.06:
            self.frozen ^= {rng.randrange(PEERS)}
        if rng.random() < 0.05:
            states = [PauseState.UNPAUSED] * 3 + [PauseState.PAUSED_NEW, PauseState.PAUSED_ALL]
            self.scheduler.set_pause_state(rng.choice(states))

    def ask(self) -> None:
        """One more request, no longer than what the empty cache holds."""
        rng = self.rng
        self.made += 1
        room = (self.scenario.blocks - 4) * BLOCK
        length = rng.choice([each for each in LENGTHS if each < room])
        most = rng.choice((1, 4, min(30, room - length)))
        number, name = rng.randrange(PROMPTS), f"r{self.made}"
        self.peers[name] = rng.randrange(PEERS)
        params = None
        if rng.random() < 0.6:
            ticket = ticket_for(self.scenario.kind, self.scenario.unit, length, number)
            params = {**ticket, "remote_engine_id": f"{ENGINE}{self.peers[name]}"}
        if rng.random() < 0.6:
            keep = {"id": f"conversation-{length:04}-{number}", "seconds": rng.choice((0, 0.001, 1000))}
            params = {**(params or {}), "pdproxy_keep": keep}
        self.node.add(name, prompt(length, number), params, max_tokens=most)

    def settle(self, *, thaw: bool = False) -> None:
        """Until nothing happens any more."""
        quiet = 0
        for _ in range(MOST_STEPS):
            before = (len(self.living), len(self.reads), len(self.loads), len(self.notices))
            self.step(thaw=thaw)
            after = (len(self.living), len(self.reads), len(self.loads), len(self.notices))
            acts = before != after or self.scheduler.running or self.reads or self.loads or self.node.scheduled[-1]
            quiet = 0 if acts else quiet + 1
            if quiet == SETTLED:
                return
        raise Stuck(f"{self.where()}: it never settles: {len(self.scheduler.running)} run, {len(self.reads)} read")

    def step(self, *, thaw: bool = False) -> None:
        """One step, with what the workers report. `thaw`: transfers that hung end."""
        self.node.step(self.report(thaw=thaw))
        self.take_orders()
        self.watch()

    # ---- the workers

    def take_orders(self) -> None:
        meta = self.node.metas[-1]
        self.probes |= {at: int(peer.engine_id.removeprefix(ENGINE)) for at, peer in meta.probes.items()}
        for name, order in meta.reads.items():
            if order.pull_tokens:
                self.reads[name] = order.nonce
                self.ages[name] = 0
            else:
                self.notices.append(order.nonce)
        if isinstance(self.node, Several):
            for part in self.node.plans[-1].metadata:
                for load in getattr(part, "loads", ()):
                    if load.request_id in self.scheduler.requests:
                        self.loads.add(load.request_id)
                        self.ages[load.request_id] = 0

    def report(self, *, thaw: bool) -> KVConnectorOutput:
        ends, finished, failed, stalled = self.end_reads()
        drained = {nonce for nonce in self.stalled_reads if thaw or (not self.frozen and self.rng.random() < 0.3)}
        self.stalled_reads -= drained
        self.stalled_reads |= set(stalled)
        broken = {nonce for nonce in drained if self.rng.random() < 0.3}
        returned, self.notices = dict.fromkeys(self.notices, 1), []
        cut = {at for at, peer in self.probes.items() if peer in self.dead | self.frozen}
        passed, self.probes = self.probes.keys() - cut, {}
        ours = WorkerReport(
            reads_ended=ends,
            stalled=dict.fromkeys(stalled, 1),
            drained=dict.fromkeys(drained, 1),
            broken=dict.fromkeys(broken, 1),
            returned=returned,
            paths_passed=dict.fromkeys(passed, 1),
            paths_failed=dict.fromkeys(cut, 1),
        )
        if not isinstance(self.node, Several):
            return KVConnectorOutput(
                finished_recving=finished, failed_recving=failed, kv_connector_worker_meta=ours or None
            )
        given_up, freed = self.end_loads(finished, failed, thaw=thaw)
        parts = tuple(ours if name == "pull" else None for name in self.node.names)
        report = WeightedReport(
            MultiKVConnectorWorkerMetadata(parts), dict.fromkeys(given_up, 1), dict.fromkeys(freed, 1)
        )
        return KVConnectorOutput(finished_recving=finished, failed_recving=failed, kv_connector_worker_meta=report)

    def end_reads(self) -> tuple[dict[str, ReadEnd], set[str], set[str], list[str]]:
        """Which reads end with this step, and how; the nonces of those that are given up while they run."""
        ends: dict[str, ReadEnd] = {}
        failed: set[str] = set()
        stalled: list[str] = []
        for name, nonce in list(self.reads.items()):
            outcome = self.outcome(name)
            if outcome is None:
                continue
            del self.reads[name]
            ends[name] = ReadEnd(nonce, outcome)
            if outcome is not ReadOutcome.VERIFIED:
                failed.add(name)
            if outcome is ReadOutcome.NO_PROGRESS:
                stalled.append(nonce)
        return ends, set(ends), failed, stalled

    def outcome(self, name: str) -> ReadOutcome | None:
        peer, rng = self.peers[name], self.rng
        self.ages[name] += 1
        if peer in self.dead:
            return ReadOutcome.TRANSFER_FAILED if self.ages[name] < 3 else ReadOutcome.PEER_UNREACHABLE
        if peer in self.frozen:
            return ReadOutcome.NO_PROGRESS if self.ages[name] > 4 else None
        if rng.random() < 0.4:
            return rng.choices(
                (ReadOutcome.VERIFIED, ReadOutcome.NOT_HELD, ReadOutcome.TRANSFER_FAILED), weights=(8, 1, 1)
            )[0]
        return None

    def end_loads(self, finished: set[str], failed: set[str], *, thaw: bool) -> tuple[set[str], set[str]]:
        """Ends loads of tiers: into `finished` and `failed`. Returns those given up, and given-up ones that ended."""
        assert isinstance(self.node, Several)
        overdue = set().union(*(plan.overdue for plan in self.node.plans[-1:])) if self.node.plans else set()
        given_up = overdue & self.loads
        self.loads -= given_up
        finished |= given_up
        failed |= given_up
        freed = {name for name in self.stalled_loads if thaw}
        self.stalled_loads = (self.stalled_loads - freed) | given_up
        for name in sorted(self.loads):
            if self.rng.random() < 0.4:
                self.loads.discard(name)
                finished.add(name)
                failed |= {name} if self.rng.random() < 0.4 else set()
        return given_up, freed

    # ---- who waits

    def would_run(self, request: Request) -> bool:
        """Whether vLLM admits the request in the next step when it computes the prompt and all others stand back."""
        if request.status not in (RequestStatus.WAITING, RequestStatus.PREEMPTED):
            return False

        def answer(asked: Request, hit: int) -> tuple[int | None, bool]:
            return (0, False) if asked is request else (None, False)

        where = self.where()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.scheduler.connector, "get_num_new_matched_tokens", answer)
            self.step()
        if request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED):
            return False
        self.seen = where
        return True

    def needed(self, request: Request) -> int:
        """Blocks that vLLM asks for before it admits the request, give or take `SLACK`."""
        manager = self.scheduler.kv_cache_manager
        hits, local, _ = manager.get_computed_blocks(request)
        return int(
            manager.coordinator.get_num_blocks_to_allocate(
                request_id=request.request_id,
                num_tokens=request.num_tokens,
                new_computed_blocks=hits.blocks,
                num_encoder_tokens=0,
                total_computed_tokens=local,
                num_local_computed_tokens=local,
                num_tokens_main_model=request.num_tokens,
                apply_admission_cap=True,
                prefill_end=max(request.num_prompt_tokens, request.num_tokens - 1),
            )
        )

    def queue(self) -> Iterator[Request]:
        yield from self.scheduler.kv_holding_waiting
        yield from self.scheduler.waiting

    def watch(self) -> None:
        """Nobody who has room waits for long behind requests that can have none before a transfer has ended."""
        now: Counter[str] = Counter()
        spent = sum(self.node.scheduled[-1].values())
        if self.scheduler.pause_state is PauseState.UNPAUSED and spent + BLOCK <= self.scenario.budget:
            reachable = self.reachable()
            spare = self.node.free_blocks - self.scheduler.kv_cache_manager.watermark_blocks - self.reserved()
            for request in self.queue():
                if request.status not in (RequestStatus.WAITING, RequestStatus.PREEMPTED):
                    continue
                if request.num_computed_tokens:
                    break
                if self.needed(request) + SLACK <= spare:
                    now[request.request_id] = self.patience[request.request_id] + 1
                if self.needed(request) - SLACK <= reachable:
                    break
        self.patience = now
        for name, steps in now.items():
            if steps > PATIENCE:
                raise Stuck(f"{self.where()}: {name} has had room for {steps} steps")

    def reserved(self) -> int:
        """Blocks that vLLM rightly keeps for requests that load or compute: they come back by themselves."""
        waiting = (RequestStatus.WAITING, RequestStatus.PREEMPTED)
        under_way = [each for each in self.scheduler._inflight_prefills if each.status not in waiting]
        return sum(map(self.scheduler._request_remaining_blocks, under_way))

    def reachable(self) -> int:
        """Free blocks, were every request and every transfer over but for those that hang."""
        pool = self.scheduler.kv_cache_manager.block_pool
        held = sum(len(each.blocks) for each in self.node.side.quarantine._held.values())
        if isinstance(self.node, Several):
            held += sum(len(each.blocks) for each in self.node.connector._quarantine._held.values())
        return int(pool.num_gpu_blocks) - 1 - held

    def where(self) -> str:
        waiting = [f"{each.request_id} {each.status.name} {each.num_tokens}" for each in self.queue()]
        return (
            f"seed {self.seed}, {self.scenario}, {self.node.free_blocks} free of {self.free}, "
            f"{self.reachable()} reachable; waiting {waiting}, running {len(self.scheduler.running)}"
        )
