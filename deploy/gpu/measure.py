"""Figures: time to first token, time between tokens, throughput; and of hand-overs, bytes and seconds.

The load is closed: so many clients at once, each of which asks again when it has its answer, of fixed length. Every
prompt is new, so that no cache answers. In the mixed load every other prompt is of the greatest length: what prefills
do to running streams shows in the time between tokens.
"""

import asyncio
import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import httpx

from deploy.gpu.asking import long_prompt
from deploy.gpu.bounds import run
from deploy.gpu.fleet import Fleet
from deploy.gpu.metrics import Snapshot
from deploy.gpu.options import Options, RunError
from deploy.gpu.results import Check
from deploy.gpu.streams import PATIENCE_S, Load, Stream, body, client_of_many, follow

ROUNDS = 3
"""Requests of each client of a load; the first is not counted, for what is compiled then."""
LINES = 8
HISTOGRAMS = {
    "NIXL transfer": "vllm:nixl_xfer_time_seconds",
    "NIXL post": "vllm:nixl_post_time_seconds",
    "verify": "pdproxy_connector_verify_seconds",
}
READS = "pdproxy_connector_reads_total"
BYTES = "pdproxy_connector_bytes_total"
PHASES = ("plan", "prefill", "handover")


@dataclass(frozen=True)
class Cell:
    """One load: lengths of prompts (in turn), and streams at once."""

    lengths: tuple[int, ...]
    concurrency: int

    @property
    def name(self) -> str:
        """For a table."""
        return " and ".join(f"{length:,}" for length in self.lengths)


@dataclass(frozen=True)
class Figures:
    """Of one load on one system. Times in milliseconds; `prompt_tokens`: their mean, by the node's usage; rates are of
    all streams together."""

    system: str
    prompts: str
    concurrency: int
    requests: int
    failed: int
    prompt_tokens: float
    first_p50: float
    first_p90: float
    first_p99: float
    gap_p50: float
    gap_p99: float
    output_rate: float
    request_rate: float


@dataclass(frozen=True)
class HandOvers:
    """Of one load. `…_megabytes`: pulled for each request; `milliseconds`: means, by phase or histogram; `rate`: GB/s
    while NIXL transferred."""

    prompts: str
    concurrency: int
    verified: float
    other_ends: float
    attention_megabytes: float
    state_megabytes: float
    rate: float
    milliseconds: Mapping[str, float]


def cells(options: Options) -> Iterator[Cell]:
    """Each length at each concurrency, and the mixed load at the greatest."""
    for length in options.lengths:
        for concurrency in options.concurrencies:
            yield Cell((length,), concurrency)
    if len(options.lengths) > 1 and max(options.concurrencies) > 1:
        yield Cell((min(options.lengths), max(options.lengths)), max(options.concurrencies))


def measure(system: str, url: str, options: Options, first_seed: int, fleet: Fleet) -> dict[str, Any]:
    """Every load on one system: figures, and hand-overs where a proxy is asked.

    Raises RunError where most requests of a load fail, httpx.HTTPError, TimeoutError.
    """
    figures, handed = list[Figures](), list[HandOvers]()
    for at, cell in enumerate(cells(options)):
        fleet.say(f"{system}: prompts of {cell.name} tokens, {cell.concurrency} at once …")
        run(load(system, url, options, cell, first_seed + 10_000 * at, rounds=1))
        before = fleet.snapshots()
        found = run(load(system, url, options, cell, first_seed + 10_000 * at + 5_000, rounds=ROUNDS - 1))
        figures.append(found)
        if fleet.proxy is not None:
            handed.append(hand_overs(cell, before, fleet.snapshots()))
    return {"figures": [asdict(each) for each in figures], "hand_overs": [asdict(each) for each in handed]}


async def load(system: str, url: str, options: Options, cell: Cell, seed: int, *, rounds: int) -> Figures:
    """One load. Raises RunError where more than half of its requests failed, TimeoutError after PATIENCE_S."""
    made, began = Load([]), time.monotonic()
    async with (
        asyncio.timeout(PATIENCE_S),
        client_of_many() as client,
        asyncio.TaskGroup() as group,
    ):
        for one in range(cell.concurrency):
            length = cell.lengths[one % len(cell.lengths)]
            prompts = [long_prompt(seed + at * cell.concurrency + one, length, LINES) for at in range(rounds)]
            group.create_task(_in_turn(client, url, options, made, prompts))
    return summed(system, cell, made.streams, time.monotonic() - began)


async def _in_turn(client: httpx.AsyncClient, url: str, options: Options, made: Load, prompts: Sequence[str]) -> None:
    """What one client asks, each when it has the answer to the one before."""
    for prompt in prompts:
        stream = Stream(prompt)
        made.streams.append(stream)
        asked = body(options.served_name, prompt, options.output_tokens, ignore_eos=True)
        await follow(client, url, made, stream, asked)


def summed(system: str, cell: Cell, streams: Sequence[Stream], seconds: float) -> Figures:
    """The figures of some streams that took so long together. Raises RunError where more than half of them failed."""
    good = [stream for stream in streams if not stream.failure and stream.at]
    if 2 * len(good) <= len(streams):
        why = next((stream.failure for stream in streams if stream.failure), "no token came")
        raise RunError(f"{system}, {cell.name} tokens at {cell.concurrency}: {len(good)} of {len(streams)} came: {why}")
    firsts, gaps = [each.first for each in good], [gap for each in good for gap in each.gaps]
    return Figures(
        system=system,
        prompts=cell.name,
        concurrency=cell.concurrency,
        requests=len(good),
        failed=len(streams) - len(good),
        prompt_tokens=round(statistics.fmean(each.prompt_tokens for each in good), 1),
        first_p50=milliseconds(firsts, 0.5),
        first_p90=milliseconds(firsts, 0.9),
        first_p99=milliseconds(firsts, 0.99),
        gap_p50=milliseconds(gaps, 0.5),
        gap_p99=milliseconds(gaps, 0.99),
        output_rate=round(sum(each.output_tokens for each in good) / seconds, 2),
        request_rate=round(len(good) / seconds, 3),
    )


def milliseconds(seconds: Sequence[float], part: float) -> float:
    """A quantile by the nearest rank; 0 where there are no values."""
    ranked = sorted(seconds)
    return round(1000 * ranked[max(0, math.ceil(part * len(ranked)) - 1)], 2) if ranked else 0.0


def checked(figures: Mapping[str, Any]) -> Iterator[Check]:
    """What must hold for the figures to be worth something."""
    failed, asked = (sum(row[name] for row in figures["figures"]) for name in ("failed", "requests"))
    yield Check(
        "requests came", failed == 0, f"{failed} of {failed + asked} failed", "logs/: the proxy's names each fault"
    )
    verified, other = (sum(row[name] for row in figures["hand_overs"]) for name in ("verified", "other_ends"))
    yield Check(
        "hand-overs while measured",
        verified > 0 and other == 0,
        f"{verified:g} reads verified, {other:g} came to nothing",
        "the figures are not of hand-overs alone: docs/metrics.md, 'Reads'",
    )


def hand_overs(cell: Cell, before: Mapping[str, Snapshot], after: Mapping[str, Snapshot]) -> HandOvers:
    """What decode nodes and proxy counted between two looks."""

    def grown(metric: str, **labels: str) -> float:
        return sum(after[name].total(metric, **labels) - before[name].total(metric, **labels) for name in after)

    def mean(metric: str, **labels: str) -> float:
        count = grown(f"{metric}_count", **labels)
        return round(1000 * grown(f"{metric}_sum", **labels) / count, 3) if count else 0.0

    verified = grown(READS, outcome="verified")
    pulled = {group: grown(BYTES, group=group, kind="pulled") for group in ("attention", "state")}
    moving = grown("vllm:nixl_xfer_time_seconds_sum")
    times = {name: mean(metric) for name, metric in HISTOGRAMS.items()}
    return HandOvers(
        prompts=cell.name,
        concurrency=cell.concurrency,
        verified=verified,
        other_ends=grown(READS) - verified,
        attention_megabytes=round(pulled["attention"] / max(1.0, verified) / 1e6, 3),
        state_megabytes=round(pulled["state"] / max(1.0, verified) / 1e6, 3),
        rate=round(sum(pulled.values()) / moving / 1e9, 3) if moving else 0.0,
        milliseconds=times | {f"proxy {phase}": mean("pdproxy_phase_seconds", phase=phase) for phase in PHASES},
    )
