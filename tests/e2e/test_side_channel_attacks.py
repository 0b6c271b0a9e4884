"""Attacks on and through the side channel of real nodes: no engine dies, no memory grows, no honest read waits."""

import json
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import pytest

from connector.side_channel import NEEDS_KEY
from deploy.local.model.quiz import Quiz, quiz
from deploy.local.node import Node, NodeSpec, Role, kv_transfer_config, on_free_ports, start_node
from deploy.local.stack import await_nodes, logs_of, start_nodes
from deploy.local.supervise import Supervisor
from tests.connector.strangers import flooded, memory_of
from tests.e2e.conftest import Pair
from tests.e2e.legs import Params, complete, hand_over, prefill
from tests.e2e.metrics_reader import PATIENCE_S, read, watch
from tests.e2e.strangers import black_holes, idle, owner_of, seconds, shake_hands
from tests.e2e.wrong_params import altered

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

MIB = 1024 * 1024
MOST_GROWTH = 64 * MIB
AT_ONCE_S = 1.0
MULTIPART = b"\x01\x40" + b"x" * 64
STREAMS = {
    "endless multipart": MULTIPART * 1000,
    "large frames": b"\x03" + (100_000).to_bytes(8, "big") + bytes(100_000),
    "huge frame": b"\x02" + b"\x7f" * 8 + bytes(60_000),
    "pings": b"\x04\x07\x04PING\x00\x00" * 8000,
    "junk": b"\x00\x10" + b"j" * 16,
    "not ZMTP": b"GET / HTTP/1.1\r\n\r\n" * 1000,
}
KEYED = {"PDPROXY_TICKET_KEYS": "the key of these two nodes"}


def black_holed(ticket: Params, number: int, port: int) -> Params:
    """A ticket of an unknown engine, at a port that accepts and never answers."""
    return altered(ticket, {"remote_engine_id": f"nobody-{number}", "remote_port": port})


@contextmanager
def beside_black_holes(pair: Pair, count: int, seed: int) -> Iterator[None]:
    """While inside, so many tickets lead nowhere. Each prompt is computed, and right, in the end."""
    question = quiz(seed, 60)
    ticket = prefill(pair.prefill.url, question.prompt())
    refused = watch(pair.decode.url, "refused")

    def send(number: int, port: int) -> str:
        return complete(pair.decode.url, question.prompt(), params=black_holed(ticket, number, port)).text

    with ExitStack() as stack:
        ports = stack.enter_context(black_holes(count))
        pool = stack.enter_context(ThreadPoolExecutor(max(1, count)))
        ends = [pool.submit(send, number, port) for number, port in enumerate(ports)]
        await_running(pair.decode, count)
        yield
        assert not any(end.done() for end in ends), "the black holes were not waited for"
        assert {end.result() for end in ends} <= {question.answer}
    assert not refused.grown()


def await_running(node: Node, count: int) -> None:
    """Wait until the node runs so many requests."""
    limit = time.monotonic() + PATIENCE_S
    while read(node.url, "vllm:num_requests_running") + read(node.url, "vllm:num_requests_waiting") < count:
        assert time.monotonic() < limit
        time.sleep(0.02)


def reads_at_once(pair: Pair, question: Quiz) -> float:
    """Seconds of an honest decode leg, whose read is verified within a second."""
    verified = watch(pair.decode.url, "reads", outcome="verified")
    ticket = prefill(pair.prefill.url, question.prompt())
    took = seconds(lambda: complete(pair.decode.url, question.prompt(), 1, params=ticket))
    verified.reaches(1)
    assert took < AT_ONCE_S
    return took


def test_a_flood_and_black_holes_change_nothing(pair: Pair) -> None:
    """The quick one: an endless multipart message to the prefill node, eight tickets that lead nowhere to the other."""
    hand_over(pair.prefill.url, pair.decode.url, quiz(7000, 300))
    listener = owner_of(pair.prefill)
    before = memory_of(listener)
    closed = watch(pair.prefill.url, "side_channel_closed", reason="too_long")
    with flooded(pair.prefill.spec.side_channel_port, lambda _: STREAMS["endless multipart"], 1):
        hand_over(pair.prefill.url, pair.decode.url, quiz(7001, 300))
    closed.reaches(1)
    with idle(pair.prefill.spec.side_channel_port, 260), beside_black_holes(pair, 8, 7002):
        print(f"beside eight black holes: {reads_at_once(pair, quiz(7003, 300)):.3f} s")
    grown = memory_of(listener) - before
    print(f"the listener's process grew by {grown / MIB:.1f} MiB")
    assert grown < MOST_GROWTH


@dataclass
class Scene:
    """A pair of its own, whose prefill node keeps its engine id."""

    supervisor: Supervisor
    pair: Pair

    def restart_prefill(self, **environment: str) -> None:
        """Start the prefill node again under the same addresses."""
        self.pair = Pair(self._again(self.pair.prefill, environment), self.pair.decode)
        self._await()

    def restart_decode(self, **environment: str) -> None:
        """Start the decode node again; it then knows no prefill node."""
        self.pair = Pair(self.pair.prefill, self._again(self.pair.decode, environment))
        self._await()

    def _again(self, node: Node, environment: Mapping[str, str]) -> Node:
        self.supervisor.stop(node.part)
        return start_node(self.supervisor, replace(node.spec, more_environment=environment))

    def _await(self) -> None:
        await_nodes(self.supervisor, [self.pair.prefill, self.pair.decode], print)


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    """Logs: `.run/e2e-attacked`. Forged tickets lead nowhere for longer than it takes to start them all."""
    slow = {"pdproxy_probe_timeout": 15.0}
    prefill_spec, decode_spec = on_free_ports(
        NodeSpec("prefill", Role.PREFILL, 0, 0), NodeSpec("decode", Role.DECODE, 0, 0, connector_config=slow)
    )
    config = {**kv_transfer_config(prefill_spec), "engine_id": "fixed"}
    prefill_spec = replace(prefill_spec, more_arguments=("--kv-transfer-config", json.dumps(config)))
    with Supervisor(logs_of("e2e-attacked")) as supervisor:
        yield Scene(supervisor, Pair(*start_nodes(supervisor, [prefill_spec, decode_spec], print)))


@pytest.mark.long
@pytest.mark.own_engines
@pytest.mark.parametrize("stream", STREAMS.values(), ids=STREAMS.keys())
def test_every_flood(scene: Scene, stream: bytes) -> None:
    pair, port = scene.pair, scene.pair.prefill.spec.side_channel_port
    hand_over(pair.prefill.url, pair.decode.url, quiz(7100, 300))
    listener = owner_of(pair.prefill)
    before = memory_of(listener)
    with flooded(port, lambda _: stream), idle(port, 100):
        for seed in range(3):
            hand_over(pair.prefill.url, pair.decode.url, quiz(7110 + seed, 300))
        grown = memory_of(listener) - before
    print(f"the listener's process grew by {grown / MIB:.1f} MiB")
    assert grown < MOST_GROWTH


@pytest.mark.long
@pytest.mark.own_engines
@pytest.mark.parametrize("holes", [0, 8, 64])
def test_an_honest_first_read_beside_black_holes(scene: Scene, holes: int) -> None:
    scene.restart_decode()
    complete(scene.pair.decode.url, quiz(7300, 300).prompt())  # the cost of every first request of a node
    with beside_black_holes(scene.pair, holes, 7310 + holes):
        print(f"first read beside {holes} black holes: {reads_at_once(scene.pair, quiz(7320 + holes, 300)):.3f} s")


@pytest.mark.long
@pytest.mark.own_engines
def test_an_engine_that_restarts_with_its_id_is_read_by_its_next_ticket(scene: Scene) -> None:
    hand_over(scene.pair.prefill.url, scene.pair.decode.url, quiz(7200, 300))
    for seed in (7201, 7202):
        scene.restart_prefill()
        hand_over(scene.pair.prefill.url, scene.pair.decode.url, quiz(seed, 300))


@pytest.mark.long
@pytest.mark.own_engines
def test_with_keys_a_stranger_gets_nothing_and_a_node_that_has_one_reads(scene: Scene) -> None:
    scene.restart_prefill(**KEYED)
    refused = watch(scene.pair.prefill.url, "side_channel_refused", reason="unsigned")
    unreachable = watch(scene.pair.decode.url, "reads", outcome="peer_unreachable")
    question = quiz(7400, 300)
    ticket = prefill(scene.pair.prefill.url, question.prompt())
    assert complete(scene.pair.decode.url, question.prompt(), params=ticket).text == question.answer
    unreachable.reaches(1)
    payload = shake_hands(scene.pair.prefill.spec.side_channel_port)
    assert payload == {"compatibility_hash": NEEDS_KEY, "agent_metadata_bytes": b""}
    complete(scene.pair.prefill.url, quiz(7401, 300).prompt())
    refused.reaches(2)
    scene.restart_decode(**KEYED)
    for seed in (7402, 7403):
        hand_over(scene.pair.prefill.url, scene.pair.decode.url, quiz(seed, 300))
