"""`python -m deploy.bench.engines.paces`: how fast real engines are, as lines that the simulation takes.

Two nodes of both roles are asked directly, without a proxy. A line is ``fixed + each * size`` seconds, by least squares
over the least seconds of each size, for what else the machine does makes all others longer:

- *prompt*: seconds from a request to its first token, by the tokens of a prompt that is not cached;
- *step*: seconds between two tokens, by how many streams run;
- *hand-over*: seconds from a request with a ticket to its first token, by the tokens that are read.
"""

import argparse
import json
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from deploy.bench.engines.legs import TO_HAND_OVER, Connection
from deploy.bench.engines.loads import Shape, question
from deploy.bench.engines.results import machine
from deploy.local.node import SERVED_NAME
from deploy.local.paths import RUNS
from deploy.local.stack import equal_specs, start_nodes
from deploy.local.supervise import Supervisor, stop_signals

PROMPTS = (200, 500, 1000, 1500, 2000)
STREAMS = (1, 4, 8, 16, 32)
ANSWER = 120
"""Tokens of each stream whose steps are counted."""
FIRST_SEED = 3 * 10**7
"""Far from the seeds of other runs on these nodes."""


class Line(NamedTuple):
    """Seconds: ``fixed`` whatever the size, and ``each`` for each one."""

    fixed: float
    each: float


def fitted(points: Sequence[tuple[float, float]]) -> Line:
    """The line through the least seconds of each size. Raises statistics.StatisticsError for one size alone."""
    least = dict[float, float]()
    for size, seconds in points:
        least[size] = min(seconds, least.get(size, seconds))
    slope, intercept = statistics.linear_regression(list(least), list(least.values()))
    return Line(intercept, max(0.0, slope))


class Engines:
    """Two nodes, and prompts that neither has seen."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = urls
        self._seed = FIRST_SEED

    def prompts(self, rounds: int) -> list[tuple[float, float]]:
        """Tokens of a prompt, and seconds to the first token."""
        with closing(Connection(self._urls[0])) as node:
            return [self._first(node, tokens, {}) for _ in range(rounds) for tokens in PROMPTS]

    def hand_overs(self, rounds: int) -> list[tuple[float, float]]:
        """The same with a ticket, on the other node."""
        found = list[tuple[float, float]]()
        with closing(Connection(self._urls[0])) as prefill, closing(Connection(self._urls[1])) as decode:
            for tokens in PROMPTS * rounds:
                prompt = self._prompt(tokens)
                asked = {**_body(prompt, 1), "kv_transfer_params": TO_HAND_OVER}
                ticket = prefill.whole(asked)
                size = ticket["usage"]["prompt_tokens"]
                found.append((size, _timed(decode, prompt, {"kv_transfer_params": ticket["kv_transfer_params"]})))
        return found

    def steps(self, rounds: int) -> list[tuple[float, float]]:
        """Streams that run at once, and seconds between two tokens of one: the median."""
        found = list[tuple[float, float]]()
        for streams in STREAMS * rounds:
            gaps = list[float]()
            threads = [
                threading.Thread(target=self._stream, args=(self._prompt(PROMPTS[0]), gaps)) for _ in range(streams)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            found.append((streams, statistics.median(gaps)))
        return found

    def _stream(self, prompt: str, gaps: list[float]) -> None:
        with closing(Connection(self._urls[0])) as node:
            times = [time.perf_counter() for _ in node.pieces({**_body(prompt, ANSWER), "ignore_eos": True})]
        middle = times[len(times) // 4 : -len(times) // 4]  # while all of them run
        gaps.append((middle[-1] - middle[0]) / (len(middle) - 1))

    def _first(self, node: Connection, tokens: int, more: dict[str, object]) -> tuple[float, float]:
        prompt = self._prompt(tokens)
        began = time.perf_counter()
        size = node.whole({**_body(prompt, 1), **more})["usage"]["prompt_tokens"]
        return size, time.perf_counter() - began

    def _prompt(self, tokens: int) -> str:
        self._seed += 1
        return question(Shape("", tokens, 4), self._seed).prompt


def _timed(node: Connection, prompt: str, more: dict[str, object]) -> float:
    began = time.perf_counter()
    node.whole({**_body(prompt, 1), **more})
    return time.perf_counter() - began


def _body(prompt: str, tokens: int) -> dict[str, object]:
    return {"model": SERVED_NAME, "prompt": prompt, "max_tokens": tokens, "temperature": 0}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and keep; the process's exit status."""
    parser = argparse.ArgumentParser(prog="python -m deploy.bench.engines.paces", description=__doc__)
    parser.add_argument("--rounds", type=int, default=6, help="of each length of prompts (default %(default)s)")
    parser.add_argument("--keep", type=Path, default=None, help="a file for the lines")
    asked = parser.parse_args(arguments)
    with stop_signals(), Supervisor(RUNS / "paces") as supervisor:
        nodes = start_nodes(supervisor, equal_specs(2), print)
        engines = Engines([node.url for node in nodes])
        engines.prompts(1)
        engines.hand_overs(1)
        found = {
            "prompt": engines.prompts(asked.rounds),
            "step": engines.steps(asked.rounds // 2),
            "hand_over": engines.hand_overs(asked.rounds),
        }
    lines = {name: fitted(points) for name, points in found.items()}
    for name, line in lines.items():
        print(f"{name}: {line.fixed * 1000:.2f} ms and {line.each * 1e6:.2f} us each", found[name])
    if asked.keep is not None:
        whole = {"machine": machine(1), **{name: line._asdict() for name, line in lines.items()}}
        asked.keep.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
