"""Prefill/decode disaggregation on a laptop: `python -m deploy.local.demo [--once] [--port PORT]`."""

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from enum import Enum

import httpx

from deploy.local.cache_hits import Counts, await_change, describe, read
from deploy.local.client import Answer, AnswerError, ask, curl_line
from deploy.local.model.quiz import Quiz, quiz
from deploy.local.paths import MODEL
from deploy.local.ports import PortTakenError
from deploy.local.readiness import NotReadyError
from deploy.local.stack import ProxySpec, Stack, equal_specs, logs_of, pair_specs, start_stack
from deploy.local.supervise import PartEndedError, Stopped, Supervisor, stop_signals
from deploy.local.wait_joined import NodeRefusedError

SEED = 2026
TOKENS = 800
TOKENS_TO_TRY = 62
TURNS = (1, 2)
REQUEST_TIMEOUT_S = 120.0
LOOK_EVERY_S = 0.5


class Afterwards(Enum):
    """The demo's end, once the answers were shown."""

    END = "end"
    STAY = "stay"


class DemoError(Exception):
    """The demonstration did not show what it is to show."""


def say(line: str) -> None:
    print(f"  {line}", flush=True)


def show_turn(client: httpx.Client, stack: Stack, story: Quiz, turn: int) -> None:
    """Ask one question of the conversation and tell how the answer came about. Raises DemoError on a wrong answer."""
    told = story.at_turn(turn)
    before = read_all(client, stack)
    print(f"\nTurn {turn}: a list of {len(story.lines)} names and numbers, then: {told.asked[-1]}", flush=True)
    print("  answer:", end="", flush=True)
    answer = ask(client, stack.proxy.url, story.conversation(turn))
    show_way(answer)
    what = "decode node" if stack.prefill else "node"
    for line in describe(await_change(before, lambda: read_all(client, stack))):
        say(f"{what}, {line}")
    if answer.text.strip() != told.answer.strip():
        raise DemoError(f"the answer should have been {told.answer.strip()!r}")


def read_all(client: httpx.Client, stack: Stack) -> Counts:
    """The counters of all nodes that decode together. Raises httpx.HTTPError."""
    return sum((read(client, node.url) for node in stack.decode), Counts())


def show_way(answer: Answer) -> None:
    say(f"first token after {answer.first_token * 1000:.0f} ms, all of it after {answer.whole * 1000:.0f} ms")
    for line in answer.told():
        say(line)


def show(stack: Stack) -> None:
    """Hold a short conversation: the first turn is handed over, and the decode node goes on from it by itself."""
    story = quiz(SEED, TOKENS)
    with httpx.Client(timeout=REQUEST_TIMEOUT_S, trust_env=False) as client:
        for turn in TURNS:
            show_turn(client, stack, story, turn)
    print(f"\nTry it yourself:\n{curl_line(stack.proxy.url, quiz(SEED, TOKENS_TO_TRY).messages())}", flush=True)
    print(f"\nNodes, requests on the way and cache hits, live: {stack.proxy.admin_url}/ui", flush=True)


def stay(supervisor: Supervisor) -> None:
    """Stay up until told to stop, or until a part ends."""
    print("\nUp until Ctrl-C.", flush=True)
    while True:
        supervisor.require_all_alive()
        time.sleep(LOOK_EVERY_S)


def run(port: int, afterwards: Afterwards, nodes: int = 0) -> None:
    """``nodes``: how many of both roles; 0 for a prefill and a decode node."""
    if not (MODEL / "config.json").exists():
        raise DemoError(f"there is no model in {MODEL}")
    logs = logs_of("demo")
    with stop_signals(), Supervisor(logs) as supervisor:
        specs = equal_specs(nodes) if nodes else pair_specs()
        count = "one vLLM node" if len(specs) == 1 else f"{len(specs)} vLLM nodes"
        print(f"Starting {count} and the proxy on this machine (logs: {logs}):", flush=True)
        stack = start_stack(supervisor, specs, ProxySpec(port), say)
        try:
            show(stack)
        except (AnswerError, httpx.HTTPError):
            supervisor.require_all_alive()  # a part that ended is the better explanation
            raise
        if afterwards is Afterwards.STAY:
            stay(supervisor)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m deploy.local.demo", description="Try pdproxy on this machine.")
    parser.add_argument(
        "--once", dest="afterwards", action="store_const", const=Afterwards.END, default=Afterwards.STAY,
        help="end after the answers",
    )  # fmt: skip
    parser.add_argument("--port", type=int, default=0, help="the proxy's port (default: a free one)")
    parser.add_argument(
        "--nodes",
        type=int,
        default=0,
        choices=range(5),
        help="nodes that do both (default: a prefill and a decode node)",
    )
    asked = parser.parse_args(arguments)
    try:
        run(asked.port, asked.afterwards, asked.nodes)
    except Stopped as stopped:
        print("\nStopped; nothing is left running.", flush=True)
        wanted = stopped.number == signal.SIGINT and asked.afterwards is Afterwards.STAY
        return 0 if wanted else 128 + stopped.number
    except (
        DemoError,
        AnswerError,
        PortTakenError,
        PartEndedError,
        NotReadyError,
        NodeRefusedError,
        httpx.HTTPError,
    ) as error:
        print(f"\nerror: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
