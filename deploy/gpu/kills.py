"""Kills: a node dies or freezes under streams, and every stream goes on with the same text; then nothing is held."""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from deploy.gpu.answers import compared
from deploy.gpu.asking import Known, learn, long_prompt
from deploy.gpu.bounds import run
from deploy.gpu.fleet import Fate, Fleet
from deploy.gpu.metrics import read
from deploy.gpu.options import Options
from deploy.gpu.results import Check
from deploy.gpu.streams import Load, Stream, body, running

TOKENS = 400
LINES = 48
MOST_TOKENS = 256
MIGRATIONS = "pdproxy_migrations_total"


@dataclass(frozen=True)
class Case:
    """Which node fails, how, and when; `decode` alone has streams that must move."""

    name: str
    fate: Fate
    moment: Callable[[Load], bool]

    def __str__(self) -> str:
        return f"{self.name} {self.fate.name.lower()}"


def cases(options: Options) -> list[Case]:
    """A decode node and the prefill node killed, and a decode node frozen."""
    first = options.decode_names[0]
    return [
        Case(first, Fate.KILLED, Load.under_way),
        Case("prefill", Fate.KILLED, Load.begun),
        Case(first, Fate.FROZEN, Load.under_way),
    ]


def learn_streams(url: str, options: Options) -> list[Known]:
    """Of one engine: long answers, as many as there are streams in each case. Raises httpx.HTTPError."""
    count = options.streams * len(cases(options))
    prompts = [long_prompt(50_000 + at, TOKENS, LINES) for at in range(count + count // 2)]
    return learn(url, options.served_name, prompts, count, MOST_TOKENS)


def check_kills(fleet: Fleet, known: Sequence[Known]) -> Iterator[Check]:
    """Each case, after which the nodes are made whole and have given everything back.

    Raises httpx.HTTPError, TimeoutError, and what `Fleet.heal` raises.
    """
    for at, case in enumerate(cases(fleet.options)):
        mine = known[at :: len(cases(fleet.options))]
        fleet.say(f"{case}, under {len(mine)} streams …")
        yield from _under_streams(fleet, case, mine)
        fleet.heal()
        yield nothing_held(fleet, f"after {case}")


def nothing_held(fleet: Fleet, when: str) -> Check:
    """Whether nodes and proxy have given everything back. Raises httpx.HTTPError."""
    held = fleet.held()
    advice = "blocks or requests are stranded: open an issue, with the archive"
    return Check(f"nothing is held {when}", not held, "; ".join(held) or "no block, no request", advice)


def _under_streams(fleet: Fleet, case: Case, known: Sequence[Known]) -> Iterator[Check]:
    before = read(fleet.front.admin_url).total(MIGRATIONS, outcome="done")
    streams = run(_strike(fleet, case, known))
    failures = [stream.failure for stream in streams if stream.failure]
    stall = max(stream.longest_stall for stream in streams)
    told = f"{len(streams) - len(failures)} of {len(streams)} came to their end, longest stall {stall:.1f} s"
    advice = "the proxy's log (logs/proxy.log) names the fault; docs/failures.md says what should have followed"
    yield Check(f"{case}: no stream is lost", not failures, "; ".join([told, *failures[:1]]), advice)
    answers = [(each, stream.text) for each, stream in zip(known, streams, strict=True) if not stream.failure]
    if answers:
        yield compared(f"{case}: the text stays the same", answers)
    if case.name != "prefill":
        moved = read(fleet.front.admin_url).total(MIGRATIONS, outcome="done") - before
        idle = "no stream was on the node when it failed: ask for more (--streams)"
        yield Check(f"{case}: streams moved", moved > 0, f"{moved:g} went on at another node", idle)


async def _strike(fleet: Fleet, case: Case, known: Sequence[Known]) -> list[Stream]:
    streams = [Stream(each.prompt) for each in known]
    bodies = [body(fleet.options.served_name, each.prompt, MOST_TOKENS) for each in known]
    async with running(fleet.front.url, streams, bodies) as load:
        await load.until(case.moment)
        began = time.monotonic()
        await asyncio.to_thread(fleet.strike, case.name, case.fate)
        fleet.say(f"{case} ({time.monotonic() - began:.1f} s); waiting for the streams to end …")
    return streams
