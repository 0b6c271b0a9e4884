"""A fake node with a prefix cache whose KV events, and whose answers to the proxy's own questions, can be wrong."""

import collections
import dataclasses
import functools
import json
import random
from collections.abc import Mapping
from typing import Any

from tests.events.publisher import Event
from tests.fakes.fake_model import tokenize
from tests.fakes.faults import FaultKind
from tests.fakes.kv_transfer import FakeKvTransfer
from tests.fakes.node import JSON, FakeNode, Script, Seen
from tests.soak.event_cache import EventCache
from tests.soak.faulty_publisher import FaultyPublisher, Lies

MOST_BLOCKS = 600
"""Blocks of one node. All conversations together have more."""
LONG, HUGE = 20_000, 300_000
"""Token ids of a wrong answer: more than are hashed at once, and more than are looked up."""
_NEVER = Script(0, JSON, (), FaultKind.HANG)


@dataclasses.dataclass(slots=True)
class Rumours:
    """The prompts that all nodes were sent lately, as token ids."""

    prompts: collections.deque[tuple[int, ...]] = dataclasses.field(
        default_factory=lambda: collections.deque([(3,) * 9], maxlen=50)
    )


class CachingNode(FakeNode):
    """One that is restarted has an empty cache, and publishes at other ports."""

    def __init__(self, name: str, fabric: FakeKvTransfer, dice: random.Random, rumours: Rumours) -> None:
        super().__init__(name, fabric)
        self._dice = dice
        self._rumours = rumours
        self.blocks = EventCache(MOST_BLOCKS, self._tell)
        self.cache = self.blocks
        self.resumes = True
        self.kept = {}
        lies = Lies(dice, lambda: list(self.blocks.hashes(dice.choice(rumours.prompts))), self.blocks.some_block)
        self.publisher = FaultyPublisher(dice, lies)

    def die(self) -> None:
        """As of a process that takes its publisher with it."""
        super().die()
        self.blocks.clear()
        self.kept = {}
        self.publisher.close()

    def respond(self, path: str, raw: bytes, headers: tuple[tuple[str, str], ...] = ()) -> Script:
        """The script for one request."""
        self.publisher.open()
        if path not in ("/tokenize", "/kv_event_sources"):
            return super().respond(path, raw, headers)
        body = json.loads(raw) if raw else {}
        self.seen.append(Seen(path, body, headers))
        return self._rendered(body) if path == "/tokenize" else self._sources()

    def _tell(self, events: list[Event]) -> None:
        self.publisher.tell(events)

    def _rendered(self, body: Mapping[str, Any]) -> Script:
        """Token ids: late, wrong, too many or no ids at all, at times."""
        ids = tokenize(str(body["prompt"]) if "prompt" in body else json.dumps(body["messages"]))
        other = self._dice.choice(self._rumours.prompts)
        self._rumours.prompts.append(tuple(ids))
        chance = self._dice.random() if self.publisher.lies else 0.0
        if chance < 0.88:
            return _tokens(ids)
        if chance < 0.94:
            return _tokens(other)
        if chance < 0.97:
            return self._junk()
        return _NEVER if chance < 0.98 else _many(LONG if chance < 0.99 else HUGE)

    def _junk(self) -> Script:
        status, body = self._dice.choice(
            ((200, b"{"), (200, b'{"tokens": [1, -5]}'), (200, b'{"tokens": [99999999999999]}'),
             (200, b'{"tokens": ["a"]}'), (200, b'{"tokens": []}'), (200, b"[]"), (500, b"no"), (400, b'{"error": 1}'))
        )  # fmt: skip
        return Script(status, JSON, (body,))

    def _sources(self) -> Script:
        publish, replay = self.publisher.open()
        source = {"publisher": "zmq", "endpoint": f"tcp://*:{publish}", "replay_endpoint": f"tcp://*:{replay}"}
        if self.publisher.lies:
            if self._dice.random() < 0.1:
                return Script(200, JSON, (), FaultKind.RESET)
            source["endpoint"] = self._dice.choice((*[source["endpoint"]] * 9, f"tcp://*:{replay}"))
        return Script(200, JSON, (json.dumps({"0": source}).encode(),))


def _tokens(ids: list[int] | tuple[int, ...]) -> Script:
    return Script(200, JSON, (json.dumps({"count": len(ids), "tokens": ids}).encode(),))


@functools.cache
def _many(tokens: int) -> Script:
    return _tokens(list(range(tokens)))
