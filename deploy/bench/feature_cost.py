"""The cost of each feature: ``python -m deploy.bench.feature_cost``; needs valgrind, and takes a quarter of an hour.

Each row is a proxy with one feature beside one that has none of them; instructions of one request, one request after
another (`lockstep`). The first row is a proxy without any settings.
"""

import argparse
import asyncio
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from deploy.bench.lockstep import counted
from deploy.bench.peers import PDPROXY, Peer, Ports
from deploy.bench.rounds import BenchError
from deploy.bench.script import KEY, Line
from deploy.local.paths import RUNS
from deploy.local.supervise import PartEndedError, Stopped, stop_signals
from tests.fakes.otlp_collector import otlp_collector

REQUESTS = 100
OFF = ("--policy-migrations", "0", "--policy-routing", "least-loaded", "--log-level", "warning")
LIMITS = "weight=2 concurrency=100000 requests_per_minute=1M input_tokens_per_minute=999M output_tokens_per_minute=999M"


class Feature(NamedTuple):
    """A feature, and the flags that turn it on; the last of two equal flags counts."""

    name: str
    flags: tuple[str, ...] = ()


def features(keys: Path, collector: str) -> list[Feature]:
    """All of them; ``keys``: a file of API keys; ``collector``: where spans go."""
    traces = ("--otel-export", "otlp", "--otel-endpoint", collector)
    return [
        Feature("a log line for each request", (*OFF, "--log-level", "info")),
        Feature("streams that can go on by a journal", (*OFF, "--policy-migrations", "3")),
        Feature("accounts and limits of API keys", (*OFF, "--keys-file", str(keys))),
        Feature("traces, a request that is not sampled", (*OFF, *traces, "--otel-sample", "0")),
        Feature("traces, a sampled request", (*OFF, *traces, "--otel-sample", "1")),
        Feature("plans by what is cached", (*OFF, "--policy-routing", "cache")),
    ]


async def costs(feature: Feature, lines: Sequence[Line]) -> list[float]:
    """Instructions of one request of each line; what the proxy does in the same time without requests is left out.

    Raises:
        BenchError: the proxy was not ready, or an answer was wrong.
    """
    peer, found = Peer(PDPROXY.name, _with_flags(PDPROXY.command, feature.flags)), []
    for line in lines:
        busy = await counted(peer, line, REQUESTS)
        idle = await counted(peer, line, 0, busy.seconds)
        found.append((busy.instructions - idle.instructions) / REQUESTS)
    return found


def _with_flags(command: Callable[[Ports], list[str]], flags: tuple[str, ...]) -> Callable[[Ports], list[str]]:
    return lambda ports: [*command(ports), *flags]


@contextmanager
def _surroundings() -> Iterator[list[Feature]]:
    """The features, while the file of keys and the collector that they need are there."""
    with TemporaryDirectory(dir=RUNS) as folder, otlp_collector() as collector:
        keys = Path(folder) / "keys"
        keys.write_text(f"{KEY} bench {LIMITS}\n", encoding="utf-8")
        yield features(keys, collector.url)


async def table(lines: Sequence[Line], words: Sequence[str]) -> None:
    """Print it, row by row, of features with one of these words in their names; raises as `costs`."""
    with _surroundings() as rows:
        print(f"| thousand instructions a request | {' | '.join(lines)} |\n|---|{'---|' * len(lines)}")
        print(_row("as it is without settings", _alone(await costs(Feature(""), lines))), flush=True)
        none = await costs(Feature("", OFF), lines)
        print(_row("none of what follows", _alone(none)), flush=True)
        for feature in rows:
            if any(word in feature.name for word in words):
                more = zip(await costs(feature, lines), none, strict=True)
                cells = [f"{(cost - least) / 1000:+,.0f} ({cost / least - 1:+.0%})" for cost, least in more]
                print(_row(feature.name, cells), flush=True)


def _alone(found: list[float]) -> list[str]:
    return [f"{cost / 1000:,.0f}" for cost in found]


def main() -> int:
    """Print the table; the process's exit status."""
    if shutil.which("valgrind") is None:
        print("error: valgrind is not installed", file=sys.stderr)
        return 1
    asked = _parser().parse_args()
    RUNS.mkdir(exist_ok=True)
    try:
        with stop_signals():
            asyncio.run(table(asked.lines, asked.features))
    except (BenchError, PartEndedError, Stopped) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m deploy.bench.feature_cost", description=__doc__)
    parser.add_argument("--lines", type=Line, nargs="+", choices=list(Line), default=list(Line), metavar="LINE")
    parser.add_argument("--features", nargs="+", default=[""], metavar="WORD", help="only those with such a word")
    return parser


def _row(name: str, cells: list[str]) -> str:
    return f"| {name} | {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
