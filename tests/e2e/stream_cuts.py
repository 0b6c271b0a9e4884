"""Run streams of every shape at once, kill their node, and report which were cut, where, and how they went on."""

import asyncio
import json
import random
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httpx

from deploy.local.node import SERVED_NAME
from tests.e2e.fleet import Fleet
from tests.e2e.process_faults import ProcessFault, strike
from tests.e2e.proxy_log import LogTail
from tests.e2e.stream_contents import BrokenStreamError, chunks_of, contents_of, differences
from tests.e2e.stream_shapes import COMPLETIONS, Shape

PATIENCE_S = 300.0
"""Seconds for all streams of a round; a busy machine is slow without being wrong."""
SPREAD_S = 0.6
"""Seconds over which the streams of a round begin, so that the node dies at another place in each."""
MARKS = (0.1, 0.7)
"""The node dies when half of the streams have passed their marks, drawn between these fractions of each stream."""
EVENT = b"data: "


@dataclass
class FollowedStream:
    """One client's stream so far.

    `delay`: seconds before it is asked for. `asked`, `at`: monotonic seconds of the request and of each piece.
    `marked`: set when `mark` events are there, or the stream has failed.
    """

    shape: Shape
    uncut: bytes
    delay: float = 0.0
    mark: int = 1
    marked: asyncio.Event = field(default_factory=asyncio.Event)
    body: bytearray = field(default_factory=bytearray)
    asked: float = 0.0
    at: list[float] = field(default_factory=list)
    request_id: str = ""
    failure: str = ""

    @property
    def events(self) -> int:
        """How many events came so far."""
        return self.body.count(EVENT)

    @property
    def all_events(self) -> int:
        """How many events an uncut answer has, about: chunks differ."""
        return self.uncut.count(EVENT)

    def stall(self, since: float = 0.0) -> float:
        """The longest pause in seconds between two pieces, counting from the last piece before `since`."""
        return max((after - before for before, after in pairwise(self.at) if after > since), default=0.0)

    def wrong(self) -> str:
        """The difference from the uncut answer; empty where there is none."""
        if self.failure:
            return f"{self.shape.name}: {self.failure}"
        try:
            differ = differences(contents_of(self.uncut), contents_of(bytes(self.body)))
        except (BrokenStreamError, json.JSONDecodeError) as error:
            differ = [f"{error}"]
        return "".join(f"\n{self.shape.name}: {each}" for each in differ[:4])

    def same_chunks(self) -> bool:
        """Whether a right answer came in the same chunks, too."""
        return chunks_of(self.uncut) == chunks_of(bytes(self.body))


@dataclass(frozen=True)
class Cut:
    """A stream that lost its node. `place`: how many events its client had. `stall`: its longest pause from then on, in
    seconds.

    `how`, `told`: the move and the pause as the stream's log line has them; empty and 0 where it has none.
    """

    stream: FollowedStream
    place: int
    stall: float
    how: str
    told: float

    def __str__(self) -> str:
        return f"{self.stream.shape.name} after {self.place} of {self.stream.all_events} events: {self.stall:.2f} s"


@dataclass(frozen=True)
class Round:
    """The result of one kill. `needed`: seconds for the other node to compute all these prompts and tokens at once."""

    victim: str
    streams: Sequence[FollowedStream]
    cuts: Sequence[Cut]
    needed: float

    def wrong(self) -> str:
        """The errors, one line a stream; empty where there are none."""
        return "".join(stream.wrong() for stream in self.streams)

    def __str__(self) -> str:
        longest = max((cut.stall for cut in self.cuts), default=0.0)
        told = f"{self.victim}: {len(self.cuts)} of {len(self.streams)} streams cut, longest stall {longest:.2f} s"
        whole = [stream for stream in self.streams if not stream.wrong()]
        same = sum(stream.same_chunks() for stream in whole)
        told += f", the other node alone takes {self.needed:.2f} s; {same} of {len(whole)} right in the same chunks"
        return told


async def uncut(url: str, shapes: Sequence[Shape]) -> dict[str, bytes]:
    """The answers of an undisturbed proxy, by the shape's name.

    Raises AssertionError for an answer that does not show its shape.
    """
    streams = [FollowedStream(shape, b"") for shape in shapes]
    await asyncio.gather(*(follow(url, stream) for stream in streams))
    for stream in streams:
        assert not stream.failure, f"{stream.shape.name}: {stream.failure}"
        assert not (why := stream.shape.why_not(contents_of(bytes(stream.body)))), why
    return {stream.shape.name: bytes(stream.body) for stream in streams}


async def cut_short(fleet: Fleet, streams: Sequence[FollowedStream], victim: str, source: random.Random) -> Round:
    """Run these streams, and kill a decode node when half of them have passed their marks.

    Raises TimeoutError after PATIENCE_S.
    """
    log = LogTail(fleet.proxy.part.log)
    for stream in streams:
        stream.mark = round(stream.all_events * source.uniform(*MARKS))
    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as group:
        tasks = [group.create_task(follow(fleet.proxy.url, stream)) for stream in streams]
        await half_marked(streams)
        killed, places = time.monotonic(), [stream.events for stream in streams]
        await asyncio.to_thread(strike, fleet.nodes[victim].part, ProcessFault.KILLED)
        await asyncio.wait(tasks)
    await log.tells_the_end_of({stream.request_id for stream in streams})
    lost, moved = log.lost(victim), log.moved()
    cuts = [
        Cut(stream, had, stream.stall(killed), *moved.get(stream.request_id, ("", 0.0)))
        for stream, had in zip(streams, places, strict=True)
        if had and stream.request_id in lost
    ]
    other = next(node for name, node in fleet.nodes.items() if name.startswith("decode") and name != victim)
    return Round(victim, streams, cuts, await needed(other.url, cuts))


async def follow(url: str, stream: FollowedStream) -> None:
    """Send the request and read to the end; an error is kept in `failure`."""
    await asyncio.sleep(stream.delay)
    stream.asked = time.monotonic()
    try:
        async with (
            httpx.AsyncClient(trust_env=False, timeout=PATIENCE_S) as client,
            client.stream("POST", url + stream.shape.path, json=dict(stream.shape.body)) as answer,
        ):
            stream.request_id = answer.headers.get("x-pdproxy-request-id", "")
            async for piece in answer.aiter_raw():
                stream.body += piece
                stream.at.append(time.monotonic())
                if stream.events >= stream.mark:
                    stream.marked.set()
            if answer.is_error:
                stream.failure = f"{answer.status_code}: {stream.body.decode(errors='replace')}"
    except httpx.HTTPError as failure:
        stream.failure = f"{type(failure).__name__}: {failure}"
    stream.marked.set()


async def half_marked(streams: Sequence[FollowedStream]) -> None:
    """Wait until half of them have passed their marks."""
    waiting = {asyncio.create_task(stream.marked.wait()) for stream in streams}
    while 2 * len(waiting) > len(streams):
        _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    for task in waiting:
        task.cancel()


async def needed(url: str, cuts: Sequence[Cut]) -> float:
    """Seconds in which a node computes the prompts of these streams, their tokens so far, and the next token of each.

    All are requested at once, and none is cached.
    """
    began = time.monotonic()
    async with httpx.AsyncClient(trust_env=False, timeout=PATIENCE_S) as client:
        bodies = [body for cut in cuts for body in _so_far(cut)]
        answers = await asyncio.gather(*(client.post(url + COMPLETIONS, json=body) for body in bodies))
    took = time.monotonic() - began
    for answer in answers:
        answer.raise_for_status()
    return took


async def keep_asking(
    url: str, answers: Mapping[str, bytes], shapes: Sequence[Shape], source: random.Random, enough: asyncio.Event
) -> list[FollowedStream]:
    """One client that runs streams of random shapes, one after the other, until it is stopped."""
    streams = list[FollowedStream]()
    while not enough.is_set():
        shape = source.choice(shapes)
        streams.append(FollowedStream(shape, answers[shape.name]))
        await follow(url, streams[-1])
    return streams


def _so_far(cut: Cut) -> Iterator[Mapping[str, Any]]:
    body, shape = cut.stream.shape.body, cut.stream.shape
    prompt = body.get("prompt") or "".join(message["content"] for message in body.get("messages") or body["input"])
    said = contents_of(cut.stream.uncut)
    for choice in range(shape.choices):
        text = said.text(*said.kinds, choice=choice)
        text = text[: len(text) * cut.place // cut.stream.all_events]
        salt = uuid.uuid4().hex
        yield {"model": SERVED_NAME, "prompt": prompt + text, "max_tokens": 1, "temperature": 0, "cache_salt": salt}
