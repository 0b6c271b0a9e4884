"""Prompts are begun while the decode nodes have room for them, and wait in the proxy meanwhile."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from pdproxy.errors import ClientError
from pdproxy.nodes.node import Binding, Capacity, Footprint, Role
from pdproxy.nodes.pool_entry import LegLoad
from pdproxy.observe.labels import Leg
from pdproxy.orchestration.context import OrchestrationConfig
from pdproxy.orchestration.request_queue import QueueLimits
from pdproxy.request import Endpoint
from pdproxy.response import ResponseStream
from tests.fakes.faults import FaultKind, InjectedFault
from tests.fakes.node import FakeNode
from tests.fakes.reading import pieces_of
from tests.fakes.refused import refuse
from tests.orchestration.answers import read_answer
from tests.orchestration.cluster import MODEL, FakeCluster, read
from tests.orchestration.prompts import body_for, right

COMPLETIONS = Endpoint.COMPLETIONS
BODY = body_for(COMPLETIONS, stream=True)
FOOTPRINT = Footprint(26, 1)
"""The footprint of `BODY`: 18 tokens by its bytes, and 8 of the answer."""
TWO = Capacity(60, None, 1, Binding.ATTENTION)
"""Room for two of them."""


class Streams:
    """Streams of a cluster, by name, which run until they are read to their end."""

    def __init__(self, cluster: FakeCluster) -> None:
        self.cluster = cluster
        self.tasks: dict[str, asyncio.Task[ResponseStream]] = {}
        self.begun: list[str] = []

    async def start(self, name: str, priority: int = 0, api_key: str = "") -> None:
        request = self.cluster.request(COMPLETIONS, BODY, name=name, priority=priority, api_key=api_key)

        async def take_answer() -> ResponseStream:
            body = (await self.cluster.orchestrator.answer(request)).body
            assert not isinstance(body, bytes)
            self.begun.append(name)
            return body

        self.tasks[name] = asyncio.create_task(take_answer())
        await settled()

    async def close(self, *names: str) -> None:
        """Their clients leave."""
        for name in names:
            await (await self.tasks[name]).aclose()

    async def finish(self, *names: str) -> None:
        """Each must be right."""
        for name in names:
            stream = await self.tasks[name]
            answer = read_answer(COMPLETIONS, b"".join([piece async for piece in pieces_of(stream)]))
            assert (answer.texts[0], answer.error) == (right(COMPLETIONS), None)
            await stream.aclose()
            await settled()


async def settled() -> None:
    """Let everything run that can."""
    for _ in range(60):
        await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def streams(cluster: FakeCluster) -> AsyncIterator[Streams]:
    """Nothing is left in the end."""
    made = Streams(cluster)
    yield made
    await cluster.settle()


async def test_no_more_are_begun_than_have_room() -> None:
    async with streams(FakeCluster(decodes=1, capacity=TWO)) as made:
        cluster = made.cluster
        for name in "abcd":
            await made.start(name)
        assert made.begun == ["a", "b"]
        assert cluster.pool.view("d0").footprint == Footprint(2 * FOOTPRINT.tokens, 2)
        assert sum(len(node.legs()) for node in cluster.prefills) == 2, "no hand-over waits for the decode node"
        assert cluster.context.queue.status().by_model == {MODEL: 2}
        await made.finish("a", "b", "c", "d")
        assert made.begun == ["a", "b", "c", "d"]
        assert cluster.count("pdproxy_phase_seconds_count", phase="queue") == 2


async def test_a_prompt_goes_to_the_node_that_has_room() -> None:
    """The fewest legs are not the most room."""
    async with streams(FakeCluster(decodes=2, capacity=TWO)) as made:
        held = made.cluster.pool.acquire("d0", LegLoad(footprint=Footprint(50, 1)))
        other = [made.cluster.pool.acquire("d1") for _ in range(5)]
        await made.start("a")
        assert made.cluster.pool.view("d1").footprint == FOOTPRINT
        for slot in (held, *other):
            slot.release()
        await made.finish("a")


async def test_state_groups_bound_the_sequences() -> None:
    capacity = Capacity(10**6, 3, 1, Binding.STATE)
    async with streams(FakeCluster(decodes=1, capacity=capacity)) as made:
        for name in "abc":
            await made.start(name)
        assert made.begun == ["a", "b"], "two thirds, and a little for their tokens"
        await made.finish("a", "b", "c")


async def test_an_idle_node_takes_a_prompt_of_any_size() -> None:
    async with streams(FakeCluster(decodes=1, capacity=Capacity(5, 1, 1, Binding.ATTENTION))) as made:
        await made.start("a")
        await made.start("b")
        assert made.begun == ["a"]
        await made.finish("a", "b")


@pytest.mark.parametrize(
    ("capacity", "fill", "begun"), [(None, 1.0, 5), (TWO, 0.0, 5), (TWO, 0.5, 1), (TWO, 2.0, 4)], ids=str
)
async def test_how_much_of_it_is_filled_is_the_operators(capacity: Capacity | None, fill: float, begun: int) -> None:
    cluster = FakeCluster(decodes=1, capacity=capacity, config=OrchestrationConfig(decode_fill=fill))
    async with streams(cluster) as made:
        for name in "abcde":
            await made.start(name)
        assert len(made.begun) == begun
        await made.finish(*"abcde")


async def test_priority_decides_who_goes_next_and_keys_share() -> None:
    async with streams(FakeCluster(decodes=1, capacity=TWO)) as made:
        for name in ("r1", "r2", "f1", "f2", "f3"):
            await made.start(name, api_key="flood")
        await made.start("q", api_key="quiet")
        await made.start("urgent", priority=-1, api_key="flood")
        assert made.begun == ["r1", "r2"]
        await made.finish("r1", "r2", "urgent", "f1", "q", "f2", "f3")
        assert made.begun == ["r1", "r2", "urgent", "f1", "q", "f2", "f3"]


async def test_a_prompt_that_waited_counts_on_its_prefill_node_from_its_plan_on() -> None:
    """Others that are planned in the same turn of the loop see it."""
    async with streams(FakeCluster(prefills=1, decodes=1, capacity=TWO)) as made:
        for name in "abc":
            await made.start(name)
        prefill, decode = made.cluster.pool.view("p0"), made.cluster.pool.view("d0")
        leaving, seen = asyncio.create_task(made.close("a")), list[tuple[int, int, int]]()
        for _ in range(60):
            await asyncio.sleep(0)
            seen.append((decode.active, prefill.active, prefill.lightest.prompts))
        await leaving
        planned = seen.index((1, 0, 0)) + [decoding for decoding, _, _ in seen[seen.index((1, 0, 0)) :]].index(2)
        assert seen[planned] == (2, 1, 1)
        await made.finish("b", "c")


async def test_a_node_that_joins_brings_room() -> None:
    async with streams(FakeCluster(decodes=1, capacity=TWO)) as made:
        cluster = made.cluster
        for name in "abc":
            await made.start(name)
        d1 = FakeNode("d1", cluster.fabric)
        cluster.decodes.append(d1)
        cluster.transport.add(d1)
        cluster.join(d1, (Role.DECODE,), TWO)
        await settled()
        assert made.begun == ["a", "b", "c"]
        assert cluster.pool.view("d1").footprint == FOOTPRINT
        await made.finish("a", "b", "c")


async def test_a_node_that_comes_back_larger_brings_room() -> None:
    async with streams(FakeCluster(decodes=1, capacity=TWO)) as made:
        for name in "abc":
            await made.start(name)
        made.cluster.amend("d0", capacity=Capacity(600, None, 10, Binding.ATTENTION))
        await settled()
        assert made.begun == ["a", "b", "c"]
        await made.finish("a", "b", "c")


async def test_a_client_that_leaves_the_queue_leaves_nothing_behind() -> None:
    async with streams(FakeCluster(decodes=1, capacity=TWO)) as made:
        for name in "abcd":
            await made.start(name)
        made.tasks["c"].cancel()
        await settled()
        assert made.cluster.context.queue.status().waiting == 1
        await made.finish("a", "b", "d")
        gone = {"endpoint": COMPLETIONS, "outcome": "client_gone"}
        assert made.cluster.count("pdproxy_requests_total", **gone) == 1


async def test_a_full_queue_is_a_429_that_is_counted_as_rejected() -> None:
    config = OrchestrationConfig(queue=QueueLimits(queue=1))
    async with streams(FakeCluster(decodes=1, capacity=TWO, config=config)) as made:
        for name in "abc":
            await made.start(name)
        got = await made.cluster.ask(COMPLETIONS, BODY)
        assert (got.status, got.json()["error"]["code"]) == (429, "queue_full")
        assert int(got.headers["retry-after"]) >= 1
        assert made.cluster.count("pdproxy_requests_total", endpoint=COMPLETIONS, outcome="rejected") == 1
        assert made.cluster.count("pdproxy_requests_total", endpoint=COMPLETIONS, outcome="failed") == 0
        await made.finish("a", "b", "c")


async def test_a_stream_that_moves_goes_before_all_that_waits() -> None:
    async with streams(FakeCluster(decodes=2, capacity=TWO)) as made:
        cluster = made.cluster
        cluster.decodes[0].fault = InjectedFault(FaultKind.RESET, at=3, times=1)
        for name in "abcde":
            await made.start(name)
        assert made.begun == ["a", "b", "c", "d"]
        await made.finish("a")
        assert cluster.count("pdproxy_migrations_total", outcome="done") == 1
        await made.finish("b", "c", "d", "e")


async def test_those_that_wait_go_to_the_other_node_when_one_dies() -> None:
    async with streams(FakeCluster(decodes=2, capacity=TWO)) as made:
        cluster = made.cluster
        for name in "abcde":
            await made.start(name)
        cluster.pool.drain("d0")
        await settled()
        assert made.begun == ["a", "b", "c", "d"]
        await made.finish("b", "d")
        assert made.begun[-1] == "e"
        await made.finish("a", "c", "e")


@pytest.mark.parametrize("how", ["dies", "is removed"])
async def test_those_that_wait_are_told_when_no_node_is_left(how: str) -> None:
    async with streams(FakeCluster(decodes=1, capacity=TWO)) as made:
        for name in "abc":
            await made.start(name)
        if how == "dies":
            refuse(made.cluster.pool, "d0")
        else:
            made.cluster.pool.remove("d0")
        await settled()
        assert made.tasks["c"].done()
        with pytest.raises(ClientError, match="takes requests now") as caught:
            await made.tasks["c"]
        assert caught.value.status == 503
        await made.close("a", "b")


async def test_a_prompt_waits_for_its_hand_over_and_is_not_computed_elsewhere() -> None:
    """Another cohort has a decode node that is idle, and no prefill node."""
    async with streams(FakeCluster(prefills=1, decodes=2, capacity=TWO)) as made:
        made.cluster.amend("p0", cohort="x")
        made.cluster.amend("d0", cohort="x")
        made.cluster.amend("d1", cohort="y")
        for name in "abc":
            await made.start(name)
        assert made.begun == ["a", "b"]
        await made.finish("a", "b", "c")
        assert made.cluster.count("pdproxy_local_total", reason="no_pair") == 0


async def test_a_prompt_that_is_planned_again_goes_where_there_is_room() -> None:
    async with streams(FakeCluster(prefills=2, decodes=3, capacity=TWO)) as made:
        cluster = made.cluster
        held = [
            cluster.pool.acquire("d1", LegLoad(footprint=Footprint(50, 1))),
            *(cluster.pool.acquire("d2") for _ in range(5)),
        ]
        cluster.decodes[0].fault = InjectedFault(FaultKind.RESET, at=3, times=1)
        await made.start("a")
        await made.finish("a")
        assert [len(node.legs()) for node in cluster.decodes] == [1, 0, 1]
        for slot in held:
            slot.release()


async def test_a_failed_leg_is_tried_again_without_waiting() -> None:
    async with streams(FakeCluster(prefills=2, decodes=1, capacity=TWO)) as made:
        for node in made.cluster.prefills:
            node.fault = InjectedFault(FaultKind.RESET, at=-1, times=1)
        for name in "abc":
            await made.start(name)
        assert made.begun == ["a", "b"]
        assert made.cluster.count("pdproxy_leg_faults_total", leg=Leg.PREFILL, fault="reset") >= 1
        await made.finish("a", "b", "c")


async def test_the_prompts_of_a_list_wait_for_themselves() -> None:
    config = OrchestrationConfig(queue=QueueLimits(concurrency=2, queue=1))
    cluster = FakeCluster(decodes=1, capacity=TWO, config=config)
    got = await cluster.ask(COMPLETIONS, {"prompt": [str(n) * 60 for n in range(9)], "max_tokens": 5, "temperature": 0})
    assert [choice["index"] for choice in got.json()["choices"]] == list(range(9))
    assert max(node.running for node in cluster.nodes) == 0
    await cluster.settle()


async def test_prompts_that_are_forwarded_take_their_turn_but_no_room() -> None:
    config = OrchestrationConfig(queue=QueueLimits(concurrency=2))
    async with streams(FakeCluster(decodes=1, capacity=Capacity(5, None, 1, Binding.ATTENTION), config=config)) as made:
        await made.start("a")
        await made.start("b")
        answered = await made.cluster.forward("/tokenize")
        assert answered.status == 200
        await made.finish("a", "b")


async def test_several_choices_are_as_many_sequences() -> None:
    cluster = FakeCluster(decodes=1, capacity=TWO)
    reply = await cluster.orchestrator.answer(cluster.request(COMPLETIONS, {**BODY, "n": 3}))
    assert cluster.pool.view("d0").footprint == Footprint(3 * FOOTPRINT.tokens, 3)
    await read(reply)
    await cluster.settle()
