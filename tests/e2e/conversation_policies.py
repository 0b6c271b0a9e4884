"""Compare the policies `least-loaded` and `cache` on the same nodes: what conversations cost with each."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from deploy.local.model.quiz import quiz
from deploy.local.node import Node
from deploy.local.stack import Proxy, ProxySpec, logs_of, start_proxy
from deploy.local.supervise import Supervisor
from pdproxy.settings.types import Routing
from tests.e2e.asking import Way
from tests.e2e.conversations import Turn, hold_all, mean_first_token, remote_share

TURNS = range(1, 7)
COMPARED = (Routing.LEAST_LOADED, Routing.CACHE)
Asked = dict[Routing, list[Turn]]


@contextmanager
def proxies_of(run: str, nodes: Sequence[Node]) -> Iterator[dict[Routing, Proxy]]:
    """A proxy for each policy, before the same nodes. Logs: `.run/RUN-POLICY`."""
    with ExitStack() as stack:
        started = {}
        for routing in COMPARED:
            supervisor = stack.enter_context(Supervisor(logs_of(f"{run}-{routing}")))
            spec = ProxySpec(more_environment={"PDPROXY_POLICY_ROUTING": routing})
            started[routing] = start_proxy(supervisor, spec, nodes, print)
        yield started


@dataclass(frozen=True)
class Load:
    """How many rounds, how many conversations at once in each through each proxy, and their tokens."""

    tokens: int
    at_once: int
    rounds: int
    way: Way = Way.CHAT_STREAM

    def __str__(self) -> str:
        return f"{self.way}, {self.tokens} tokens, {self.at_once} at once"


async def compare(proxies: Mapping[Routing, Proxy], seed: int, load: Load) -> Asked:
    """Hold new conversations through each proxy in turn. Raises httpx.HTTPError."""
    seeds = itertools.count(seed)
    asked: Asked = {routing: [] for routing in proxies}
    for each in range(load.rounds):
        for routing in list(proxies)[:: 1 if each % 2 else -1]:
            chosen = itertools.islice(seeds, load.at_once)
            talks = {f"{routing}-{number}": quiz(number, load.tokens) for number in chosen}
            asked[routing] += await hold_all(proxies[routing], talks, TURNS, load.at_once, load.way)
    return asked


def ratios(asked: Asked) -> tuple[float, float]:
    """The share of remote turns and the mean time to first token: `cache` divided by `least-loaded`."""
    by_load, by_cache = asked[Routing.LEAST_LOADED], asked[Routing.CACHE]
    return remote_share(by_cache) / remote_share(by_load), mean_first_token(by_cache) / mean_first_token(by_load)


def tell(what: str, asked: Asked) -> None:
    """Print the figures of both policies, and the mean time of each turn in ms."""
    for routing, turns in asked.items():
        by_turn = [mean_first_token([turn for turn in turns if turn.number == number]) for number in TURNS]
        each = " ".join(f"{1000 * seconds:4.0f}" for seconds in by_turn)
        print(f"\n{what}, {routing:12}: remote {remote_share(turns):.2f}, first token ", end="")
        print(f"{1000 * mean_first_token(turns):4.0f} ms, by turn {each}; {len(turns)} turns", end="")
    remote, first_token = ratios(asked)
    print(f"\n{what}: remote {remote:.2f} x, first token {first_token:.2f} x", flush=True)
