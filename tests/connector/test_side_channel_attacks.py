"""Attacks on the side channel: its memory, descriptors and processor time stay bounded, and it answers.

It is a process of its own, so that what an attack costs it can be measured from outside, and it is forked from one that
has imported all that it needs: to start Python and to import costs more processor time than most attacks. It sends its
port; then what was counted for each word that it receives, until nobody is there.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from connector.counters import Counters
from connector.messages import HANDSHAKE, LONGEST_QUESTION, Verdict
from connector.side_channel import Listener
from connector.tcp_server import SHARE, ServerLimits, network_of
from connector.zmtp import MOST_FRAMES, Zmtp
from tests.connector.strangers import HOST, flooded, greet, memory_of

PAYLOAD = bytes(50_000)


@dataclass(frozen=True)
class Victim:
    """The process of the side channel and its port, for the test."""

    process: ForkServerProcess
    pipe: Connection
    port: int

    @property
    def pid(self) -> int:
        """The process's."""
        assert self.process.pid is not None
        return self.process.pid

    def memory(self) -> int:
        """Resident bytes."""
        return memory_of(self.pid)

    def cpu(self) -> float:
        """Seconds of processor time so far."""
        fields = Path(f"/proc/{self.pid}/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def descriptors(self) -> int:
        """How many are open."""
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def counts(self) -> dict[str, int]:
        """Counts since the last call, as `counter/label`."""
        return self.tell("counts")

    def tell(self, word: str) -> dict[str, int]:
        """The same, after a word to the process."""
        self.pipe.send(word)
        found: dict[str, int] = self.pipe.recv()
        return found

    def close(self) -> None:
        """End it."""
        self.pipe.close()
        self.process.join(30)
        assert self.process.exitcode == 0
        self.process.close()


def start(limits: dict[str, Any] | None = None, descriptors: int = 0, left: int = -1) -> Victim:
    """Start one and wait until it listens. It may have so many descriptors, where they are not 0; all but as many as
    are ``left``, where that is not negative, are taken until it is told to release them."""
    ours, theirs = multiprocessing.Pipe()
    process = _mother().Process(target=serve, args=(theirs, limits or {}, descriptors, left))
    process.start()
    theirs.close()
    return Victim(process, ours, ours.recv())


def _mother() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def take_descriptors(left: int) -> list[int]:
    taken: list[int] = []
    with contextlib.suppress(OSError):
        while True:
            taken.append(os.open(os.devnull, os.O_RDONLY))
    for _ in range(left):
        os.close(taken.pop())
    return taken


def serve(pipe: Connection, limits: dict[str, Any], descriptors: int, left: int) -> None:
    """Be attacked."""
    if descriptors:
        resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))
    counters = Counters()
    listener = Listener(
        "127.0.0.1", 0, {(0, 0): PAYLOAD}, lambda *_: Verdict.HELD, counters, limits=ServerLimits(**limits)
    )
    listener.start()
    taken = take_descriptors(left) if left >= 0 else []
    pipe.send(listener.port)
    with contextlib.suppress(EOFError):
        while True:
            if pipe.recv() == "release":
                while taken:
                    os.close(taken.pop())
            pipe.send({"/".join((name, *labels)): n for name, labels, n in counters.drain().counts})
    listener.stop()


ANOTHER = "127.0.0.2"
PATIENCE = 60.0
MIB = 1024 * 1024
MOST_GROWTH = 64 * MIB
ATTACK_S = 1.0
WATCHED_S = 1.0


@pytest.fixture
def victim() -> Iterator[Victim]:
    with closing(start()) as victim:
        yield victim


def dial(victim: Victim, source: str = HOST) -> socket.socket:
    return socket.create_connection((HOST, victim.port), PATIENCE, source_address=(source, 0))


def answers(victim: Victim, source: str = HOST) -> float:
    """Seconds until a newcomer has the handshake's answer."""
    begun = time.monotonic()
    with closing(dial(victim, source)) as connection:
        zmtp = greet(connection)
        zmtp.send([b"", msgspec.msgpack.encode((HANDSHAKE, 0, 0))])
        connection.sendall(b"".join(zmtp.pieces))
        while (message := zmtp.next_message()) is None:
            data = connection.recv(65536)
            assert data, "the connection was closed without an answer"
            zmtp.receive(data)
        assert message[1] == PAYLOAD
    return time.monotonic() - begun


def flood(victim: Victim, bytes_of: Callable[[Zmtp], bytes], seconds: float = ATTACK_S) -> None:
    """Send without end for a while."""
    with flooded(victim.port, bytes_of):
        time.sleep(seconds)


def assert_idle(victim: Victim) -> None:
    spent = victim.cpu()
    time.sleep(WATCHED_S)
    assert victim.cpu() - spent < WATCHED_S / 10


def eventually(condition: Callable[[], bool], what: str) -> None:
    limit = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < limit, what
        time.sleep(0.02)


HALF = LONGEST_QUESTION // 2
STREAMS = {
    "an endless multipart of small frames": b"\x01\x40" + b"x" * 64,
    "an endless multipart of large frames": b"\x03" + HALF.to_bytes(8, "big") + bytes(HALF),
    "frames of 2**63 bytes": b"\x02\x7f" + b"\xff" * 7 + bytes(65536),
    "pings": b"\x04\x17\x04PING\x00\x00" + b"c" * 16,
    "junk messages": b"\x00\x10" + b"j" * 16,
}


@pytest.mark.parametrize("seconds", [0.4, pytest.param(5.0, marks=pytest.mark.long)])
@pytest.mark.parametrize("frame", STREAMS.values(), ids=STREAMS.keys())
def test_an_endless_stream_takes_no_memory(victim: Victim, frame: bytes, seconds: float) -> None:
    """And a bounded share of the processor: what opening and closing connections costs comes on top."""
    answers(victim)
    before, spent, begun = victim.memory(), victim.cpu(), time.monotonic()
    flood(victim, lambda _: frame * max(1, 65536 // len(frame)), seconds)
    share = (victim.cpu() - spent) / (time.monotonic() - begun)
    print(f"grown by {(victim.memory() - before) / MIB:.1f} MiB, {share:.0%} of a core")
    assert victim.memory() - before < MOST_GROWTH / 4
    assert share < 2 * SHARE
    assert answers(victim, ANOTHER) < 1


def test_answers_that_are_not_received_take_no_memory(victim: Victim) -> None:
    answers(victim)
    before = victim.memory()

    def ask_for_ever(zmtp: Zmtp) -> bytes:
        zmtp.send([b"", msgspec.msgpack.encode((HANDSHAKE, 0, 0))])
        return b"".join(zmtp.pieces) * 1000

    flood(victim, ask_for_ever)
    assert victim.memory() - before < MOST_GROWTH / 4
    answers(victim)


def test_unfinished_messages_on_many_connections_are_bounded_in_all(victim: Victim) -> None:
    answers(victim)
    before = victim.memory()
    almost = b"\x02" + (LONGEST_QUESTION - 64).to_bytes(8, "big") + bytes(LONGEST_QUESTION - 100)
    with ExitStack() as stack:
        for _ in range(300):
            connection = stack.enter_context(closing(dial(victim)))
            with contextlib.suppress(OSError):
                greet(connection)
                connection.sendall(almost)
        assert victim.memory() - before < MOST_GROWTH
        answers(victim, ANOTHER)
    assert victim.counts()["side_channel_closed/memory"] > 100


def test_260_idle_connections_and_200_descriptors() -> None:
    with closing(start(descriptors=200)) as victim, ExitStack() as stack:
        for _ in range(260):
            stack.enter_context(closing(dial(victim)))
        assert answers(victim, ANOTHER) < PATIENCE
        assert victim.descriptors() < 150
        assert victim.counts()["side_channel_closed/crowded"] > 150
        assert_idle(victim)


def test_with_few_descriptors_left_newcomers_still_get_in() -> None:
    with closing(start(descriptors=64, left=3)) as victim, ExitStack() as stack:
        for _ in range(10):
            stack.enter_context(closing(dial(victim)))
        answers(victim, ANOTHER)
        assert victim.counts()["side_channel_closed/no_descriptors"] >= 8
        assert_idle(victim)


def test_with_no_descriptor_left_it_waits_without_spinning_and_goes_on() -> None:
    with closing(start(descriptors=64, left=0)) as victim, closing(dial(victim)):
        assert_idle(victim)
        assert 1 <= victim.counts()["side_channel_closed/no_descriptors"] <= 20
        victim.tell("release")
        answers(victim, ANOTHER)


def test_an_honest_peer_keeps_its_connection_while_an_attacker_takes_all_others() -> None:
    with closing(start({"connections": 32, "peer_connections": 31})) as victim, ExitStack() as stack:
        honest = stack.enter_context(closing(dial(victim, ANOTHER)))
        zmtp = greet(honest)
        for _ in range(100):
            stack.enter_context(closing(dial(victim)))
        answers(victim, "127.0.0.3")
        zmtp.send([b"", msgspec.msgpack.encode((HANDSHAKE, 0, 0))])
        honest.sendall(b"".join(zmtp.pieces))
        assert honest.recv(4096)
        assert victim.counts()["side_channel_closed/crowded"] >= 69


def test_many_ranks_behind_one_address_fit() -> None:
    """Eight nodes of 8 x 8 ranks: none of their connections is closed."""
    with closing(start()) as victim, ExitStack() as stack:
        connections = [stack.enter_context(closing(dial(victim))) for _ in range(8 * 64)]
        for connection in connections:
            greet(connection)
        assert victim.counts() == {}


@pytest.mark.parametrize(
    ("drip", "counted"),
    [(b"", "slow"), (b"\xff\x00", "slow"), (b"G", "not_zmtp")],
    ids=["silent", "slow greeting", "another protocol"],
)
def test_a_peer_that_does_not_greet_in_time_is_closed(drip: bytes, counted: str) -> None:
    with closing(start({"opening": 0.5})) as victim, closing(dial(victim)) as connection:
        connection.sendall(drip)
        connection.settimeout(PATIENCE)
        while connection.recv(4096):
            pass
        assert victim.counts() == {f"side_channel_closed/{counted}": 1}


def test_a_slowloris_is_closed_and_an_idle_peer_is_not() -> None:
    with closing(start({"message": 0.5})) as victim, closing(dial(victim)) as slow, closing(dial(victim)) as idle:
        greet(slow)
        greet(idle)
        slow.settimeout(0.05)
        ended = False
        limit = time.monotonic() + PATIENCE
        while not ended:
            assert time.monotonic() < limit
            with contextlib.suppress(TimeoutError):
                try:
                    slow.sendall(b"\x01")
                    ended = not slow.recv(10)
                except ConnectionError:
                    ended = True
        idle.settimeout(0.5)
        with pytest.raises(TimeoutError):
            idle.recv(10)
        assert victim.counts().keys() <= {"side_channel_closed/slow", "side_channel_closed/not_zmtp"}


def test_a_peer_that_vanishes_in_mid_message_leaves_nothing(victim: Victim) -> None:
    before = victim.descriptors()
    for _ in range(50):
        with closing(dial(victim)) as connection:
            greet(connection)
            connection.sendall(b"\x02" + (1000).to_bytes(8, "big") + b"x")
    eventually(lambda: victim.descriptors() <= before, "connections are still open")
    answers(victim)


def test_an_idle_side_channel_costs_nothing(victim: Victim) -> None:
    with closing(dial(victim)) as connection:
        greet(connection)
        assert_idle(victim)


def test_libzmq_comes_through_an_attack(victim: Victim) -> None:
    attack = threading.Thread(target=flood, args=(victim, lambda _: b"\x01\x40" + b"x" * 64))
    attack.start()
    with zmq.Context() as context, context.socket(zmq.REQ) as asking:
        asking.linger, asking.rcvtimeo = 0, 30_000
        asking.connect(f"tcp://{HOST}:{victim.port}")
        for _ in range(20):
            asking.send(msgspec.msgpack.encode((HANDSHAKE, 0, 0)))
            assert asking.recv_multipart()[0] == PAYLOAD
    attack.join(PATIENCE)


def test_half_of_the_descriptors_are_left_to_others() -> None:
    limits = ServerLimits(connections=1 << 30, peer_connections=1 << 30).within_descriptors()
    assert limits.peer_connections == limits.connections < 1 << 30


@pytest.mark.parametrize(
    ("address", "network"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("2001:db8::1", "2001:db8::/64"),
        ("fe80::1%eth0", "fe80::/64"),
    ],
)
def test_a_peer_is_an_address_or_a_network(address: str, network: str) -> None:
    assert network_of(address) == network


def test_the_longest_message_has_room_for_its_frames() -> None:
    assert MOST_FRAMES * 9 < LONGEST_QUESTION
