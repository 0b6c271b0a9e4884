"""What it saves that the decode leg does not wait for the prefill leg: both ways in one run, in turns. Long; prints.

The nodes are the same; two proxies stand before them, one for each way. The *hand-over* is measured from the end of the
prefill's last forward pass, in the prefill node's scheduler, to the first token that the client gets through the proxy.
Both ends are on this host's monotonic clock.
"""

import asyncio
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import httpx
import pytest

from deploy.local.model.quiz import MOST_LINES, TOKENS_PER_LINE, quiz
from deploy.local.node import SERVED_NAME, NodeSpec, Role
from deploy.local.stack import Proxy, ProxySpec, logs_of, start_nodes, start_proxy
from deploy.local.supervise import Supervisor
from tests.e2e.conftest import REQUEST_TIMEOUT_S
from tests.e2e.timed_connector import Moment, noted, timed

pytestmark = [pytest.mark.e2e, pytest.mark.own_engines, pytest.mark.long, pytest.mark.timeout(1800)]

CELLS = [(600, 1), (3500, 1), (24000, 1), (600, 8), (3500, 8)]
"""Tokens of a prompt, and requests at once. The tiny model's tokenizer takes a millisecond for a thousand tokens: what
the decode node need not do after the prefill shows in a long prompt."""
LONGEST = 32768
LONG = {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}
"""Longer than its `config.json` says: what it answers to the longest prompts is not looked at."""
KNOWN = TOKENS_PER_LINE * MOST_LINES
ROUNDS = {1: 24, 8: 8}
"""Of each way, by the number of requests at once."""


class Way(StrEnum):
    """The values of the setting `policy.legs`."""

    IN_TURN = "in_turn"
    TOGETHER = "together"


@dataclass(frozen=True)
class Bench:
    """A proxy for each way, and the file in which the prefill node notes when it was done."""

    proxies: dict[Way, Proxy]
    times: Path


@dataclass
class Cell:
    """Seconds of each request of one way: hand-over; its part from the moment in which the decode node's scheduler has
    the ticket, which is the same however the ticket got there; the part of that after the read, which is a step of
    vLLM's and the way of its output; and from the request's start to its first token."""

    hand_over: list[float] = field(default_factory=list)
    with_ticket: list[float] = field(default_factory=list)
    after_read: list[float] = field(default_factory=list)
    first_token: list[float] = field(default_factory=list)

    def medians(self) -> list[float]:
        """Of the four, in this order."""
        parts = (self.hand_over, self.with_ticket, self.after_read, self.first_token)
        return [statistics.median(each) for each in parts]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """Logs lie in `.run/e2e-legs`."""
    times = tmp_path_factory.mktemp("times") / "prefill"
    with Supervisor(logs_of("e2e-legs")) as supervisor:
        specs = [
            NodeSpec("prefill", Role.PREFILL, 0, 0, max_model_len=LONGEST, more_environment=LONG),
            NodeSpec("decode", Role.DECODE, 0, 0, max_model_len=LONGEST, more_environment=LONG),
        ]
        nodes = start_nodes(supervisor, [timed(spec, times) for spec in specs], print)
        proxies = {}
        for way in Way:
            spec = ProxySpec(more_environment={"PDPROXY_POLICY_LEGS": way})
            proxies[way] = start_proxy(supervisor, spec, nodes, print)
        yield Bench(proxies, times)


@dataclass(frozen=True)
class Asked:
    """One request: when it was sent, and when its first token came."""

    name: str
    began: float
    first: float


def prompt_of(seed: int, length: int) -> tuple[str, str | None]:
    """A prompt of about so many tokens, and the answer; None for one that is longer than the model knows: two lists."""
    if length <= KNOWN:
        return quiz(seed, length).prompt(), quiz(seed, length).answer
    lists = (quiz(seed + number, min(KNOWN, length - number * KNOWN)) for number in range(1, length // KNOWN + 1))
    return "".join(each.listing for each in lists) + quiz(seed, KNOWN).prompt(), None


async def ask(client: httpx.AsyncClient, proxy: Proxy, seed: int, length: int) -> Asked:
    """One stream, read to its end; AssertionError where the answer is wrong."""
    (prompt, answer), name = prompt_of(seed, length), f"bench-{seed}-{length}"
    body = {"model": SERVED_NAME, "prompt": prompt, "max_tokens": 8, "temperature": 0, "stream": True}
    began, first, text = time.monotonic(), 0.0, ""
    async with client.stream(
        "POST", f"{proxy.url}/v1/completions", json=body, headers={"x-request-id": name}
    ) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                first = first or time.monotonic()
                text += "".join(choice["text"] for choice in httpx.Response(200, text=line[6:]).json()["choices"])
    assert answer in (None, text)
    return Asked(name, began, first)


async def measure(bench: Bench, length: int, at_once: int) -> dict[Way, Cell]:
    """Rounds of both ways in turns, with prompts that no cache has."""
    cells = {way: Cell() for way in Way}
    async with httpx.AsyncClient(timeout=REQUEST_TIMEOUT_S, trust_env=False) as client:
        for each in range(ROUNDS[at_once] + 1):
            for number, way in enumerate(Way if each % 2 else reversed(Way)):
                start = 100_000 * at_once + 1_000 * each + 500 * number
                seeds = range(start, start + at_once)
                asked = await asyncio.gather(*(ask(client, bench.proxies[way], seed, length) for seed in seeds))
                if each:  # the first round warms up
                    _note(cells[way], asked, bench.times)
    return cells


def _note(cell: Cell, asked: list[Asked], times: Path) -> None:
    ended, reads, have_read = (noted(times, moment) for moment in (Moment.ENDED, Moment.READS, Moment.HAS_READ))
    for one in asked:
        [had_ticket], [had_read] = _of(one, reads), _of(one, have_read)
        prefilled = min(_of(one, ended))  # the decode leg ends, too
        cell.hand_over.append(one.first - prefilled)
        cell.with_ticket.append(one.first - had_ticket)
        cell.after_read.append(one.first - had_read)
        cell.first_token.append(one.first - one.began)


def _of(one: Asked, moments: dict[str, float]) -> list[float]:
    return [at for request_id, at in moments.items() if f"-{one.name}-" in f"-{request_id}"]


@pytest.mark.parametrize(("length", "at_once"), CELLS)
async def test_a_hand_over_is_shorter_when_legs_go_out_together(bench: Bench, length: int, at_once: int) -> None:
    cells = await measure(bench, length, at_once)
    for way, cell in cells.items():
        told = [f"{1000 * each:.1f} ms" for each in cell.medians()]
        print(f"{length} tokens, {at_once} at once, {way}: hand-over {told[0]}, of it {told[1]} ", end="")
        print(f"with the ticket, of that {told[2]} after the read; first token {told[3]} (medians)")
    together, in_turn = cells[Way.TOGETHER].medians(), cells[Way.IN_TURN].medians()
    ratio, first = together[0] / in_turn[0], together[3] / in_turn[3]
    with_ticket, after_read = in_turn[1] / in_turn[0], in_turn[2] / in_turn[0]
    print(f"{length} tokens, {at_once} at once: hand-over {ratio:.2f} x, first token {first:.2f} x; ", end="")
    print(f"of the hand-over in turn {with_ticket:.2f} lies after the ticket, {after_read:.2f} after the read")
    assert ratio < 1
