"""A prompt that goes on from one that was tokenized is planned without asking any node; others ask where it pays."""

import asyncio
import itertools
import json
from collections.abc import Coroutine, Iterable
from typing import Any

import pytest

from pdproxy.events.token_ids import MOST_AT_ONCE
from pdproxy.nodes.load import Work
from pdproxy.orchestration.prefix_source import CombinedSource
from pdproxy.planning.plan_types import Plan
from pdproxy.planning.prefix import Hit, HitSource, Place, PromptHits
from tests.events.publisher import removed, stored
from tests.events.test_prefix_source import ATTENTION, STATE, World, hashes, request
from tests.nodes.fake_pool import settle

FIRST, SECOND = 200, 230
"""Tokens of two turns; a word is one, and has nine bytes."""


def text(words: int, prefix: str = "word") -> str:
    return "".join(f"{prefix}{number:04d} " for number in range(words))


def at_once(coroutine: Coroutine[Any, Any, PromptHits | None]) -> PromptHits | None:
    """The value that a coroutine returns without waiting for anything."""
    with pytest.raises(StopIteration) as end:
        coroutine.send(None)
    found: PromptHits | None = end.value.value
    return found


class Talks(World):
    """With the estimate by text beside the events. A text's token ids are its words' numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = itertools.count()
        for _ in range(50):
            self.pool.load.learn(Work.PREFILL, self.pool.view("p0").lightest, FIRST, FIRST / 1000)
        self.both = CombinedSource(self.source, self.texts)
        for name in self.infos:
            self.tell(name, stored(1, group=ATTENTION), stored(1, group=STATE, kind="mamba"))

    def renders(self, ids: range) -> None:
        """Have nodes tell these ids from now on."""
        for info in self.infos.values():
            info.paths["/tokenize"] = 200, json.dumps({"tokens": [*ids]}).encode()

    def no_node_answers(self) -> None:
        for info in self.infos.values():
            info.held.clear()

    def asked(self) -> int:
        return sum(len(info.asked) for info in self.infos.values())

    def looked_up(self, by: str) -> float:
        return self.caches.count("prompt_lookups_total", by=by)

    async def turn(self, words: int, prefix: str = "word", first: int = 0, **more: Any) -> None:
        """A prompt that is answered, and whose ids, from the first one on, are known then."""
        self.renders(range(first, first + words))
        asked = request(text(words, prefix), **more)
        await self.both.look_up(asked)
        self.both.routed(asked, Plan(self.node("p1"), self.node("d0")))
        await settle()

    def computed(self, name: str, words: int) -> None:
        """A place tells that it has a prompt of so many tokens, and a state at its last boundary."""
        all_of_it = hashes(tuple(range(words)))
        last = (words - 1) // 4
        self.tell(name, stored(*all_of_it[3::4], all_of_it[last - 1], group=ATTENTION))
        self.tell(name, stored(all_of_it[last - 1], group=STATE, kind="mamba"))


async def test_a_turn_of_a_known_conversation_is_planned_exactly_and_at_once_though_no_node_tells_ids() -> None:
    world = Talks()
    await world.turn(FIRST)
    world.computed("p1", FIRST)
    world.no_node_answers()
    found = at_once(world.both.look_up(request(text(SECOND))))
    assert found is not None
    assert (found.source, found.by_place()) == (HitSource.EVENTS, {Place("p1"): Hit(196, 196)})
    assert found.tokens == pytest.approx(SECOND, rel=0.1)
    assert (world.looked_up("known"), world.looked_up("asked")) == (1, 1)


async def test_what_the_place_has_evicted_is_not_planned_with() -> None:
    world = Talks()
    await world.turn(FIRST)
    world.computed("p1", FIRST)
    world.tell("p1", removed(hashes(tuple(range(FIRST)))[48], group=STATE))
    found = at_once(world.both.look_up(request(text(SECOND))))
    assert found is not None
    assert found.by_place()[Place("p1")] == Hit(196, 0)


async def test_an_equal_prompt_is_known_to_the_last_token() -> None:
    world = Talks()
    await world.turn(FIRST)
    before = world.asked()
    again = request(text(FIRST))
    found = at_once(world.both.look_up(again))
    assert found is not None
    assert found.tokens == FIRST
    world.both.routed(again, Plan(world.node("p1"), world.node("d0")))
    await settle()
    assert world.asked() == before, "nor behind its plan"


async def test_the_rest_of_a_prompt_is_learned_behind_its_plan_and_counts_where_it_was_routed() -> None:
    world = Talks()
    await world.turn(FIRST)
    await world.turn(SECOND)
    assert (world.looked_up("known"), world.caches.count("token_ids_total", outcome="fetched")) == (1, 2)
    found = at_once(world.both.look_up(request(text(SECOND + 20))))
    assert found is not None
    assert found.by_place()[Place("p1")] == Hit(SECOND // 4 * 4, SECOND // 4 * 4), "228 of 230: a state is kept there"


async def test_until_the_ids_are_there_what_is_known_of_a_prompt_counts_where_it_was_routed() -> None:
    world = Talks()
    await world.turn(FIRST)
    world.no_node_answers()
    asked = request(text(SECOND))
    at_once(world.both.look_up(asked))
    world.both.routed(asked, Plan(world.node("p0"), world.node("d0")))
    found = at_once(world.both.look_up(request(text(FIRST) + text(30, "else"))))
    assert found is not None
    assert found.by_place()[Place("p0")] == Hit(192, 0), "in whole blocks, and without a state"
    await world.background.aclose()


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"cache_salt": "mine"}, {"cache_salt": "other"}),
        ({}, {"add_special_tokens": False}),
        ({}, {"prompt_embeds": "AAAA"}),
        ({}, {"truncate_prompt_tokens": 100}),
    ],
)
async def test_what_is_hashed_otherwise_is_not_known(first: dict[str, Any], second: dict[str, Any]) -> None:
    world = Talks()
    await world.turn(FIRST, **first)
    world.no_node_answers()
    looking = asyncio.create_task(world.source.look_up(request(text(SECOND), **second)))
    await settle()
    assert not looking.done() or looking.result() is None
    assert world.looked_up("known") == 0
    looking.cancel()


async def asked_before_plans(world: Talks, first_ids: Iterable[int]) -> float:
    """For how many prompts of new texts, whose ids begin so, nodes were asked first; they take 10 ms to tell."""
    before = world.looked_up("asked")
    for first in first_ids:
        world.no_node_answers()
        turn = asyncio.create_task(world.turn(FIRST, f"t{next(world.numbers):03d}", first))
        await settle()
        world.caches.clock.advance(0.01)
        for info in world.infos.values():
            info.held.set()
        await turn
    return world.looked_up("asked") - before


NEW = range(1000, 21_000, 1000)


async def test_no_plan_waits_for_ids_once_it_shows_that_nothing_of_new_texts_is_cached() -> None:
    """The proxy asks again as soon as one was, since another proxy sends to these nodes too; no plan waits for that."""
    world = Talks()
    assert 0 < await asked_before_plans(world, NEW) < len(NEW)
    assert await asked_before_plans(world, (30_000, 31_000)) == 0
    world.computed("p0", FIRST)
    assert await asked_before_plans(world, (0,)) == 0, "it is this one that shows it"
    assert await asked_before_plans(world, (0,)) == 1


async def test_a_text_that_was_met_and_whose_hashes_were_never_learned_is_asked_about() -> None:
    world = Talks()
    await asked_before_plans(world, NEW)
    for info in world.infos.values():
        info.paths["/tokenize"] = 500, b""
    asked = request(text(FIRST))
    assert at_once(world.source.look_up(asked)) is None
    world.both.routed(asked, Plan(world.node("p1"), world.node("d0")))
    await settle()
    world.renders(range(SECOND))
    found = await world.source.look_up(request(text(SECOND)))
    assert found is not None
    assert found.tokens == SECOND


async def test_work_behind_plans_is_bounded_and_ends_with_the_source() -> None:
    world = Talks()
    await asked_before_plans(world, NEW)
    world.no_node_answers()
    running = len(asyncio.all_tasks())
    for number in range(2 * MOST_AT_ONCE):
        asked = request(text(FIRST, f"x{number:03d}"))
        at_once(world.both.look_up(asked))
        world.both.routed(asked, Plan(world.node("p1"), world.node("d0")))
        del asked
    await settle()
    assert len(asyncio.all_tasks()) - running == MOST_AT_ONCE // 2
    await world.background.aclose()
    assert len(asyncio.all_tasks()) == running
