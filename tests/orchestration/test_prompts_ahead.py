"""How early a prefill node is given its next prompt, of which keys: in virtual time."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from prometheus_client import CollectorRegistry

from pdproxy.nodes.load import Load, PlaceLoad, Work
from pdproxy.observe.metrics import Metrics
from pdproxy.orchestration.request_queue import QueuedPrompt, QueueLimits, RequestQueue
from pdproxy.planning.shares import PRESENT_SECONDS, ShareUse
from tests.fakes.timed import LoopClock, VirtualTimeLoop


class OneNode:
    """A queue before a node that computes one prompt after the other, a token in a millisecond.

    ``begun``: milliseconds after the node was known, and the name of the prompt that it was given then.
    """

    def __init__(self, reserve: float) -> None:
        self._clock = LoopClock()
        self._queue = RequestQueue(QueueLimits(reserve=reserve), self._clock, Metrics(CollectorRegistry()))
        self._book, self._place = Load(), PlaceLoad()
        self._busy = asyncio.Lock()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._since = 0.0
        self.begun: list[tuple[int, str]] = []

    async def known(self) -> None:
        """The node has computed prompts of all sizes: its speed is known."""
        for _ in range(100):
            for tokens in (10, 100, 1000, 4000):
                self._book.learn(Work.PREFILL, self._place, tokens, tokens / 1000)
        self.ask("first", "earlier", answer=0.0)
        await asyncio.sleep(2 * PRESENT_SECONDS)
        self._since = self._clock.now()
        self.begun.clear()

    def ask(self, name: str, key: str, prompt: int = 100, answer: float = 10.0) -> None:
        """A prompt of so many tokens; its answer takes so many seconds."""
        asked = QueuedPrompt(self._queue, key, 0, prompt, 1e9, prompt=prompt)
        self._tasks[name] = asyncio.create_task(self._answer(name, asked, answer))

    async def end(self) -> None:
        """Nothing runs and nothing is held."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        assert self._queue.status().running == self._queue.status().waiting == 0
        assert (self._place.prompts, self._place.queued, self._place.keys) == (0, 0, {})

    async def _answer(self, name: str, asked: QueuedPrompt, answer: float) -> None:
        place, given = self._place, list[float]()

        def start(share_use: ShareUse) -> bool:
            now = self._clock.now()
            takes = self._book.pace_at(Work.PREFILL, place).seconds(asked.prompt)
            if share_use and not self._queue.about_done(self._book.seconds_left(Work.PREFILL, place, now), takes):
                return False
            place.take_prompt(asked.key, asked.prompt, now)
            given.append(now)
            self.begun.append((round((now - self._since) * 1000), name))
            return True

        try:
            await asked.start_when_room(start, lambda: "m")
            async with self._busy:
                await asyncio.sleep(asked.prompt / 1000)
            place.drop_prompt(asked.key, asked.prompt)
            self._book.computed(Work.PREFILL, place, asked.prompt, given.pop(), self._clock.now())
            self._queue.room_changed()
            await asyncio.sleep(answer)
        finally:
            if given:
                place.drop_prompt(asked.key, asked.prompt)
            asked.end()


def begun(scene: Callable[[OneNode], Awaitable[None]], reserve: float = 0.125) -> list[tuple[int, str]]:
    """The prompts that a node was given, and when."""

    async def played() -> list[tuple[int, str]]:
        node = OneNode(reserve)
        await node.known()
        await scene(node)
        await node.end()
        return node.begun

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(played())


@pytest.mark.parametrize(("prompt", "ahead"), [(20, 10), (150, 15), (2000, 25)])
def test_the_next_prompt_of_a_key_comes_a_tenth_before_the_node_is_done(prompt: int, ahead: int) -> None:
    async def scene(node: OneNode) -> None:
        node.ask("q0", "quiet", 1, answer=0.0)
        await asyncio.sleep(0.002)
        node.ask("f0", "flood", prompt)
        node.ask("f1", "flood", prompt)
        await asyncio.sleep(5.0)

    assert begun(scene) == [(0, "q0"), (2, "f0"), (2 + prompt - ahead, "f1")]


def test_so_it_is_where_a_key_has_its_share_but_not_more() -> None:
    async def scene(node: OneNode) -> None:
        node.ask("q0", "quiet")
        await asyncio.sleep(0.1)
        node.ask("f0", "flood")
        node.ask("f1", "flood")
        await asyncio.sleep(1.0)

    assert begun(scene) == [(0, "q0"), (100, "f0"), (190, "f1")], "while the quiet key's answer is made"


def test_a_key_that_runs_nothing_passes_those_that_wait_for_that() -> None:
    async def scene(node: OneNode) -> None:
        node.ask("q0", "quiet", answer=0.0)
        await asyncio.sleep(0.1)
        for number in range(3):
            node.ask(f"f{number}", "flood")
        await asyncio.sleep(0.05)
        node.ask("q1", "quiet")
        await asyncio.sleep(0.3)

    assert begun(scene) == [(0, "q0"), (100, "f0"), (150, "q1"), (290, "f1"), (390, "f2")]


@pytest.mark.parametrize(("reserve", "others"), [(0.125, False), (0.0, True)])
def test_a_key_alone_and_all_without_a_reserve_wait_for_no_node(reserve: float, others: bool) -> None:
    async def scene(node: OneNode) -> None:
        if others:
            node.ask("q0", "quiet")
        await asyncio.sleep(0.1)
        for number in range(3):
            node.ask(f"f{number}", "flood")
        await asyncio.sleep(0.05)

    assert [each for each in begun(scene, reserve) if each[1] != "q0"] == [(100, "f0"), (100, "f1"), (100, "f2")]
