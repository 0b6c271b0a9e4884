"""Statistics, traces and intervals of this node for a request that began elsewhere."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

import pytest

from connector.replay import GROUPS_AT_ONCE
from tests.connector.api_server import ApiServer
from tests.connector.stream_shapes import CHAT, COMPLETIONS, Shape, ask, chat, completion, core_for, streamed

THREE = Shape(COMPLETIONS, completion(n=3), ("A long one it is.", "Ab.", "Abc, and so on."))
PLAIN = Shape(CHAT, chat(), ("A long one it is.",))


@dataclass
class Recorder:
    """In the place of vLLM's statistics loggers."""

    first_tokens: list[float] = field(default_factory=list)
    between_tokens: list[float] = field(default_factory=list)
    generated: int = 0
    finished: int = 0

    def record(self, iteration_stats: Any, **_: Any) -> None:
        if iteration_stats is not None:
            self.first_tokens += iteration_stats.time_to_first_tokens_iter
            self.between_tokens += iteration_stats.inter_token_latencies_iter
            self.generated += iteration_stats.num_generation_tokens
            self.finished += len(iteration_stats.finished_requests)


@pytest.mark.parametrize(("shape", "cut"), [(PLAIN, 5), (THREE, 6)], ids=["one choice", "three choices"])
async def test_statistics_are_of_what_this_node_did(
    plain_server: ApiServer, monkeypatch: pytest.MonkeyPatch, shape: Shape, cut: int
) -> None:
    """No time between tokens is as long as the clock is old, and no token of another node is counted."""
    records = (await streamed(plain_server, shape)).records
    recorder = Recorder()
    monkeypatch.setattr(plain_server.engine, "logger_manager", recorder)
    core = core_for(plain_server, shape)
    await streamed(plain_server, shape, records[:cut], core=core)
    live = len(core.added)
    assert recorder.generated == core.emitted > 0
    assert (len(recorder.first_tokens), recorder.finished) == (live, live)
    assert max(recorder.first_tokens + recorder.between_tokens) < 60


async def test_choices_that_end_in_the_replay_are_not_traced(
    plain_server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's tracing wants the statistics of the step in which a request ends; a replay is no step."""
    records = (await streamed(plain_server, THREE)).records
    monkeypatch.setattr(plain_server.engine.output_processor, "tracing_enabled", True)
    assert (await streamed(plain_server, THREE, records[:-1])).all_events == ["data: [DONE]"]


async def test_others_have_their_turn_while_a_long_stream_is_replayed(plain_server: ApiServer) -> None:
    shape = Shape(COMPLETIONS, completion(max_tokens=2000), ("Again and again. " * 100,))
    records = (await streamed(plain_server, shape)).records
    turns: list[float] = []

    async def other() -> None:
        while True:
            turns.append(time.monotonic())
            await asyncio.sleep(0)

    async with plain_server.on(core_for(plain_server, shape)) as client:
        task = asyncio.create_task(other())
        await ask(client, shape, records[:-2])
        task.cancel()
    assert len(records) > 1000
    assert len(turns) > 2 * len(records) / GROUPS_AT_ONCE


async def test_a_client_that_leaves_during_the_replay_leaves_nothing(
    plain_server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = (await streamed(plain_server, PLAIN)).records

    async def forever(*_: Any) -> None:
        await asyncio.Event().wait()

    core = core_for(plain_server, PLAIN)
    async with plain_server.on(core) as client:
        monkeypatch.setattr("connector.replay.replay", forever)
        request = asyncio.create_task(ask(client, PLAIN, records[:4]))
        for _ in range(1000):
            await asyncio.sleep(0.001)
            if plain_server.engine.output_processor.request_states:
                break
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
    assert core.added == []


@pytest.mark.parametrize("intervals", [(1, 4), (4, 1), (4, 4)])
async def test_a_node_with_another_stream_interval_goes_on(
    plain_server: ApiServer, monkeypatch: pytest.MonkeyPatch, intervals: tuple[int, int]
) -> None:
    """The groups are those of the node that began; after them, this node's interval counts from the last output."""
    monkeypatch.setattr(plain_server.engine.output_processor, "stream_interval", intervals[0])
    whole = await streamed(plain_server, PLAIN)
    monkeypatch.setattr(plain_server.engine.output_processor, "stream_interval", intervals[1])
    for cut in range(1, len(whole.records) - 1):
        rest = await streamed(plain_server, PLAIN, whole.records[:cut])
        assert text_of(*whole.events[:cut], *rest.events) == text_of(*whole.events)
        if intervals[0] == intervals[1]:
            assert [len(part) for part in rest.events] == [len(part) for part in whole.events[cut:]]


def text_of(*parts: list[str]) -> str:
    return "".join(event.partition('"content":"')[2].partition('"')[0] for part in parts for event in part)
