"""`python -m deploy.bench.engines.roles`: three real engines as nodes of both roles, as 1P2D and as 2P1D, in turn.

The engines are the same: three proxies stand in front of them, which ask them for other roles. Requests come at random
moments and are not held back by slow answers; long prompts with short answers and the reverse take turns. Each round
has another fleet first. Two cores carry three engines, so a fleet that leaves a node idle leaves its time to the
others: figures say what the proxy's choice costs or saves, not what a second GPU would do.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import httpx

from deploy.bench.engines.figures import percentile
from deploy.bench.engines.loads import Question, Shape, question
from deploy.local.node import SERVED_NAME, Node, Role
from deploy.local.paths import RUNS
from deploy.local.stack import ProxySpec, equal_specs, start_nodes, start_proxy
from deploy.local.supervise import Supervisor, stop_signals
from tests.e2e.metrics_reader import read

EQUAL = "both roles"
FLEETS: Mapping[str, Sequence[Role]] = {
    EQUAL: (Role.BOTH, Role.BOTH, Role.BOTH),
    "1P2D": (Role.PREFILL, Role.DECODE, Role.DECODE),
    "2P1D": (Role.PREFILL, Role.PREFILL, Role.DECODE),
}
LONG, SHORT = Shape("long prompts, short answers", 2000, 16), Shape("short prompts, long answers", 200, 100)
PHASES = (LONG, SHORT, LONG, SHORT)
FIRST_SEED, SEEDS_PER_RUN = 5 * 10**7, 10_000
WARM_REQUESTS = 6
PATIENCE_S = 60.0
DATA = "data: {"


class Served(NamedTuple):
    """One answer: seconds to the first text and between two tokens on average, and whether the text is right."""

    shape: Shape
    first_token: float
    inter_token: float
    right: bool


async def ask(client: httpx.AsyncClient, asked: Question) -> Served:
    """One request. Raises httpx.HTTPError or ValueError where it is not answered."""
    body = {"model": SERVED_NAME, "prompt": asked.prompt, "max_tokens": asked.shape.answer, "temperature": 0}
    began, times, text = time.perf_counter(), list[float](), ""
    async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith(DATA) and (said := json.loads(line.removeprefix("data: "))["choices"]):
                times.append(time.perf_counter())
                text += said[0]["text"]
    if len(times) < 2:
        raise ValueError(f"an answer of {len(times)} events: {text!r}")
    inter_token = (times[-1] - times[0]) / (asked.shape.answer - 1)
    return Served(asked.shape, times[0] - began, inter_token, asked.answer.startswith(text))


def arrivals(rates: Mapping[Shape, float], seconds: float, seed: int) -> Iterator[tuple[float, Question]]:
    """When requests come, and what they ask."""
    dice, number = random.Random(seed), 0
    for phase, shape in enumerate(PHASES):
        at = phase * seconds
        while (at := at + dice.expovariate(rates[shape])) < (phase + 1) * seconds:
            yield at, question(shape, FIRST_SEED + seed * SEEDS_PER_RUN + number)
            number += 1


async def run(url: str, planned: Sequence[tuple[float, Question]]) -> list[Served]:
    """All requests at their times. Raises as `ask` does."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, trust_env=False, limits=limits) as client:

        async def at(seconds: float, asked: Question) -> Served:
            await asyncio.sleep(seconds)
            return await ask(client, asked)

        return await asyncio.gather(*(at(*each) for each in planned))


def table(found: Mapping[str, Sequence[Sequence[Served]]]) -> str:
    """Ratios of equal nodes to each split, made within each round: the mean, the least and the greatest."""
    lines = ["| | figure | both roles ÷ 1P2D | both roles ÷ 2P1D |", "|---|---|---|---|"]
    for shape in (LONG, SHORT):
        for name in ("first_token", "inter_token"):
            for share in (0.5, 0.9):
                told = [_ratio(found, shape, name, share, split) for split in FLEETS if split != EQUAL]
                lines.append(f"| {shape.name} | {name.replace('_', ' ')}, p{share * 100:.0f} | {' | '.join(told)} |")
    return "\n".join(lines)


def _ratio(found: Mapping[str, Sequence[Sequence[Served]]], shape: Shape, name: str, share: float, split: str) -> str:
    def figure(served: Sequence[Served]) -> float:
        return percentile([getattr(each, name) for each in served if each.shape is shape], share)

    ratios = [figure(ours) / figure(theirs) for ours, theirs in zip(found[EQUAL], found[split], strict=True)]
    return f"{statistics.fmean(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all rounds and print the ratios; the process's exit status."""
    asked = _parser().parse_args(arguments)
    rates = {LONG: asked.long, SHORT: asked.short}
    found: dict[str, list[Sequence[Served]]] = {name: [] for name in FLEETS}
    with stop_signals(), Supervisor(RUNS / "engines-roles") as supervisor:
        nodes = start_nodes(supervisor, equal_specs(3), print)
        urls = {name: _proxy(supervisor, nodes, roles) for name, roles in FLEETS.items()}
        for number, url in enumerate(urls.values()):
            warming = [(0.0, question(LONG, FIRST_SEED - 1 - number * WARM_REQUESTS - n)) for n in range(WARM_REQUESTS)]
            asyncio.run(run(url, warming))
        seeds = iter(range(1, 10**6))
        for number in range(asked.rounds):
            for place in range(len(FLEETS)):
                name = list(FLEETS)[(number + place) % len(FLEETS)]
                before = _reads(nodes)
                served = asyncio.run(run(urls[name], list(arrivals(rates, asked.seconds, next(seeds)))))
                found[name].append(served)
                supervisor.require_all_alive()
                print(f"round {number + 1}, {name}: {_told(served)}, {_reads(nodes) - before:.0f} read", flush=True)
    print(f"\n{table(found)}")
    return 0


def _proxy(supervisor: Supervisor, nodes: Sequence[Node], roles: Sequence[Role]) -> str:
    told = [Node(replace(node.spec, role=role), node.part) for node, role in zip(nodes, roles, strict=True)]
    return start_proxy(supervisor, ProxySpec(), told, print).url


def _reads(nodes: Sequence[Node]) -> float:
    return sum(read(node.url, "pdproxy_connector_reads_total", outcome="verified") for node in nodes)


def _told(served: Sequence[Served]) -> str:
    first = statistics.fmean(each.first_token for each in served)
    between = statistics.fmean(each.inter_token for each in served)
    right = sum(each.right for each in served)
    return f"{len(served)} answers, {right} right, first token {first * 1000:.0f} ms, between {between * 1000:.1f} ms"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m deploy.bench.engines.roles", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="each of every fleet (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each phase (default %(default)g)")
    parser.add_argument("--long", type=float, default=5.0, help="requests a second (default %(default)g)")
    parser.add_argument("--short", type=float, default=4.0, help="requests a second (default %(default)g)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
