"""`python -m deploy.bench.roles`: nodes of both roles beside every fixed split of as many nodes, simulated.

A figure is the share of requests whose first token and whose mean time between tokens (vLLM's TPOT) are within bounds.
With ``--write PAGE`` the tables go into that page.
"""

import argparse
import dataclasses
import statistics
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from deploy.bench.generators import Agents, Chat, Turning, agents, chat, turning
from deploy.bench.hybrid_cache import CacheShape
from deploy.bench.outcome import Stream
from deploy.bench.recorded import rescaled
from deploy.bench.simulate import Fleet, Simulation
from deploy.bench.traces import Trace
from pdproxy.settings.types import Routing

ROOMY = CacheShape(blocks=4096)
CHUNK = 2048
"""Prompt tokens in a step: vLLM's default for a server, on most machines."""
ASSUMED = Fleet(0, 0, ROOMY, overhead=0.0, per_stream=0.0002, chunk=CHUNK)
"""The paces of the other simulations, and steps that are longer by 0.2 ms for each stream."""
MEASURED = Fleet(0, 0, ROOMY, 45_600.0, 0.0, 383_000.0, 0.0069, 0.0029, 0.00011, CHUNK)
"""``python -m deploy.bench.engines.paces --rounds 10`` on two nodes of the tiny model on CPUs. What a request takes
before it is computed, which is equal for all fleets, is left out."""
LONG, SHORT = (4000, 40), (200, 500)
"""Tokens of prompt and answer, of the two kinds of requests by turns."""
BUSY, CROWDED = 0.4, 0.28
"""The part of all nodes' time that long prompts take; and the streams of short ones, as a part of those with which a
node still keeps the bound between tokens."""
PHASE = 60.0
"""Seconds of a kind, with nodes of the assumed paces."""
TRACES = ("long prompts, short answers", "short prompts, long answers", "the two by turns", "agents", "chat")
MOST_SPLITS = 7
NEAR = 0.95


class Bounds(NamedTuple):
    """Seconds until the first token, and between two tokens on average, that are still good."""

    first_token: float
    inter_token: float

    def met(self, stream: Stream) -> bool:
        """Whether a request was served well."""
        return stream.first_token <= self.first_token and stream.inter_token <= self.inter_token


class Machine(NamedTuple):
    """Nodes of some paces. ``faster``: times that requests come faster than to nodes of the assumed ones."""

    title: str
    fleet: Fleet
    faster: float

    @property
    def bounds(self) -> Bounds:
        """Three times what a long prompt takes on an idle node, and two and a half times the shortest step."""
        fleet = self.fleet
        return Bounds(3 * LONG[0] / fleet.prefill_rate, 2.5 * fleet.step)

    def rates(self, nodes: int) -> tuple[float, float]:
        """Requests of the two kinds in a second."""
        fleet = self.fleet
        streams = CROWDED * (self.bounds.inter_token - fleet.step) / fleet.per_stream
        answer_seconds = SHORT[1] * (fleet.step + streams * fleet.per_stream)
        return BUSY * nodes * fleet.prefill_rate / LONG[0], streams * nodes / answer_seconds

    def traces(self, nodes: int, seed: int) -> Iterator[Trace]:
        """As much load for each node, however many there are."""
        (long, short), seconds = self.rates(nodes), PHASE / self.faster
        prompts, outputs = (LONG[0], SHORT[0]), (LONG[1], SHORT[1])
        names = iter(TRACES)
        yield turning(Turning((long, short), prompts, outputs, 2 * seconds, 1), seed, next(names))
        yield turning(Turning((short, long), prompts[::-1], outputs[::-1], 2 * seconds, 1), seed, next(names))
        yield turning(Turning((long, short), prompts, outputs, seconds, 4), seed, next(names))
        yield rescaled(agents(Agents(7 * nodes, kinds=2 + nodes // 8), seed, next(names)), self.faster)
        yield rescaled(chat(Chat(70 * nodes, systems=4 + nodes, within=60.0), seed, next(names)), self.faster)

    def fleets(self, nodes: int) -> Iterator[tuple[str, Fleet]]:
        """Equal nodes, and splits: every one, or `MOST_SPLITS` of them."""
        yield EQUAL, dataclasses.replace(self.fleet, boths=nodes)
        step = max(1, nodes // (MOST_SPLITS + 1))
        for prefills in range(step, nodes, step):
            decodes = nodes - prefills
            yield f"{prefills}P{decodes}D", dataclasses.replace(self.fleet, prefills=prefills, decodes=decodes)


EQUAL = "both roles"
MACHINES: Mapping[str, Machine] = {
    "assumed": Machine("Assumed paces: 8,000 tokens a second, steps of 20 ms", ASSUMED, 1.0),
    "measured": Machine("Paces of real engines: the tiny model on CPUs", MEASURED, 2.5),
}


class Row(NamedTuple):
    """A trace on fleets of so many nodes: the streams of each fleet, of all seeds."""

    trace: str
    streams: Mapping[str, Sequence[Stream]]

    def shares(self, bounds: Bounds) -> dict[str, float]:
        """The share of requests within the bounds, by fleet."""
        return {name: statistics.fmean(map(bounds.met, streams)) for name, streams in self.streams.items()}


def rows(machine: Machine, nodes: int, seeds: Sequence[int], traces: Collection[str]) -> Iterator[Row]:
    """These traces on every fleet."""
    for runs in zip(*(machine.traces(nodes, seed) for seed in seeds), strict=True):
        if runs[0].name not in traces:
            continue
        streams = dict[str, list[Stream]]()
        for name, fleet in machine.fleets(nodes):
            streams[name] = [each for trace in runs for each in Simulation(Routing.CACHE, fleet).run(trace).streams]
        yield Row(runs[0].name, streams)


def table(found: Sequence[Row], bounds: Bounds) -> str:
    """The shares within the bounds; the last column compares equal nodes with the best split of each trace."""
    names = list(found[0].streams)
    lines = [f"| | {' | '.join(names)} | both ÷ best split |", f"|---|{'---|' * (len(names) + 1)}"]
    for row in found:
        shares = row.shares(bounds)
        ratio = shares[EQUAL] / max(share for name, share in shares.items() if name != EQUAL)
        missed = "" if ratio >= NEAR else " (missed)"
        told = " | ".join(f"{shares[name]:.1%}" for name in names)
        lines.append(f"| {row.trace} | {told} | {ratio:.2f}{missed} |")
    return "\n".join(lines)


def flipped(found: Sequence[Row], bounds: Bounds) -> str:
    """The load that turns, if a controller gave each of its kinds the best split at the very moment, at no cost."""
    rows_by_name = {row.trace: row for row in found}
    met = total = 0.0
    for kind in TRACES[:2]:  # each is as long as its turns together
        row = rows_by_name[kind]
        best = max(share for name, share in row.shares(bounds).items() if name != EQUAL)
        requests = len(row.streams[EQUAL])
        met, total = met + best * requests, total + requests
    ours = rows_by_name[TRACES[2]].shares(bounds)[EQUAL]
    return (
        f"{TRACES[2].capitalize()}, with the best split of each kind from its first second on: {met / total:.1%}; "
        f"both roles: {ours:.1%}."
    )


def strict_table(found: Sequence[Row], machine: Machine) -> str:
    """Equal nodes and the best split of each bound between tokens, from the shortest step on; and a bound for the
    longest time without a token."""
    lines = ["| trace | bound | both roles | best split |", "|---|---|---|---|"]
    for row in found:
        for times in (1.5, 2.0, 2.5):
            bounds = machine.bounds._replace(inter_token=times * machine.fleet.step)
            lines.append(f"| {row.trace} | {bounds.inter_token * 1000:.3g} ms, mean | {_best(row.shares(bounds))} |")
        gaps = {
            name: statistics.fmean(each.longest <= 5 * machine.fleet.step for each in streams)
            for name, streams in row.streams.items()
        }
        lines.append(f"| {row.trace} | {5000 * machine.fleet.step:.3g} ms, longest | {_best(gaps)} |")
    return "\n".join(lines)


def _best(shares: Mapping[str, float]) -> str:
    best = max((name for name in shares if name != EQUAL), key=lambda name: shares[name])
    return f"{shares[EQUAL]:.1%} | {shares[best]:.1%} ({best})"


TABLES_BEGIN = "## Figures"


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulate what is asked for and print it; the process's exit status."""
    asked = _parser().parse_args(arguments)
    parts = list[str]()
    for name in asked.machines:
        machine = MACHINES[name]
        first, between = machine.bounds
        parts.append(
            f"### {machine.title}\n\nBounds: first token {first:.3g} s, between tokens {between * 1000:.3g} ms."
        )
        for nodes in asked.nodes:
            found = list(rows(machine, nodes, range(1, asked.seeds + 1), asked.traces))
            parts.append(f"{nodes} nodes:\n\n{table(found, machine.bounds)}")
            if set(TRACES[:3]) <= {row.trace for row in found}:
                parts[-1] += f"\n\n{flipped(found, machine.bounds)}"
            print(f"{parts[-1]}\n", flush=True)
            if nodes == asked.nodes[0]:
                parts.append(f"{nodes} nodes, by the bound between tokens:\n\n{strict_table(found, machine)}")
                print(f"{parts[-1]}\n", flush=True)
    if asked.write is not None:
        text, begin, _ = asked.write.read_text(encoding="utf-8").partition(f"\n{TABLES_BEGIN}\n")
        asked.write.write_text("\n".join([text, begin.strip("\n"), "", "\n\n".join(parts), ""]), encoding="utf-8")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m deploy.bench.roles", description=__doc__)
    parser.add_argument("--nodes", nargs="+", type=int, default=[3, 8], metavar="N", help="(default 3 8)")
    parser.add_argument("--machines", nargs="+", choices=list(MACHINES), default=list(MACHINES))
    parser.add_argument("--traces", nargs="+", choices=TRACES, default=TRACES, metavar="T", help="by their names")
    parser.add_argument("--seeds", type=int, default=2, help="of each trace (default %(default)s)")
    parser.add_argument(
        "--write", type=Path, default=None, metavar="PAGE", help=f"whose part {TABLES_BEGIN!r} is replaced"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
