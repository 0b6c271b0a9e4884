"""ZMTP without sockets: any bytes, cut anywhere, in bounded memory; and with libzmq at the other end."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Sequence
from contextlib import closing

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from connector.zmtp import LONGEST_COMMAND, MOST_FRAMES, Zmtp, ZmtpFault

LONGEST = 10_000
HOST = "127.0.0.1"
GREETING = b"\xff" + bytes(7) + b"\x01\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
READY = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03REQ"
OPEN = GREETING + READY


def server() -> Zmtp:
    return Zmtp(b"ROUTER", LONGEST, {b"x-challenge": b"abc"})


def read(pieces: Sequence[bytes], zmtp: Zmtp) -> list[tuple[bytes, ...]]:
    found = []
    for piece in pieces:
        zmtp.receive(piece)
        while (message := zmtp.next_message()) is not None:
            found.append(message)
    return found


def cut(data: bytes, places: Sequence[int]) -> list[bytes]:
    edges = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[start:end] for start, end in itertools.pairwise(edges)]


FRAMES = st.lists(st.binary(max_size=600), min_size=1, max_size=MOST_FRAMES)


@given(st.lists(FRAMES, max_size=5), st.lists(st.integers(0, 1 << 16), max_size=12))
def test_what_one_end_sends_the_other_reads_however_it_is_cut(messages: list[list[bytes]], places: list[int]) -> None:
    asking, answering = Zmtp(b"DEALER", LONGEST, {b"x-name": b"v"}), server()
    answering_says = b"".join(answering.pieces)
    assert read([answering_says], asking) == []
    for message in messages:
        asking.send(message)
    assert read(cut(b"".join(asking.pieces), places), answering) == [tuple(message) for message in messages]
    assert answering.fault is None
    assert answering.buffered == 0
    assert answering.peer == {b"socket-type": b"DEALER", b"identity": b"", b"x-name": b"v"}
    assert read([b"".join(answering.pieces)[len(answering_says) :]], asking) == []
    assert asking.peer == {b"socket-type": b"ROUTER", b"identity": b"", b"x-challenge": b"abc"}


ALMOST = st.sampled_from([b"", GREETING, OPEN, OPEN + b"\x01\x00", OPEN + b"\x00\x02ab"])


@given(ALMOST, st.binary(max_size=400), st.lists(st.integers(0, 1000), max_size=6))
def test_any_bytes_are_read_or_refused_and_the_same_however_they_are_cut(
    start: bytes, rest: bytes, places: list[int]
) -> None:
    whole, pieces = server(), server()
    messages = read([start + rest], whole)
    assert read(cut(start + rest, places), pieces) == messages
    assert (pieces.fault, pieces.buffered) == (whole.fault, whole.buffered)
    assert whole.buffered <= len(rest) + len(start) if whole.fault is None else whole.buffered == 0


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 3000)), max_size=40), st.integers(1, 500))
def test_memory_is_bounded_whatever_frames_come(frames: list[tuple[int, int]], chunk: int) -> None:
    data = OPEN + b"".join(bytes((flags | 2,)) + size.to_bytes(8, "big") + b"x" * size for flags, size in frames)
    zmtp = server()
    for start in range(0, len(data), chunk):
        for message in read([data[start : start + chunk]], zmtp):
            assert sum(map(len, message)) <= LONGEST
        assert zmtp.buffered <= LONGEST + chunk + MOST_FRAMES * 9
        zmtp.pieces.clear()


@pytest.mark.parametrize("at", range(0, 64, 3))
def test_a_greeting_alone_says_nothing_and_is_no_fault(at: int) -> None:
    zmtp = server()
    assert read([GREETING[:at]], zmtp) == []
    assert zmtp.fault is None


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00",
        GREETING.replace(b"\x7f\x03", b"\x7f\x01"),
        GREETING.replace(b"NULL", b"PLAI"),
        GREETING + b"\x00\x01a",
        GREETING + b"\x04\x06\x05HELLO",
        GREETING + b"\x04\x08\x05READY\x0bS",
        OPEN + READY,
        OPEN + b"\x05\x06\x04PING\x00",
        OPEN + b"\x04\x05\x04PING",
        OPEN + b"\x04\x06\x05ERROR",
        OPEN + b"\x08\x00",
    ],
)
def test_what_is_no_zmtp_is_refused(data: bytes) -> None:
    zmtp = server()
    assert read([data], zmtp) == []
    assert zmtp.fault is ZmtpFault.NOT_ZMTP
    assert read([OPEN, b"\x00\x01a"], zmtp) == []


@pytest.mark.parametrize(
    "data",
    [
        b"\x02" + (LONGEST + 1).to_bytes(8, "big"),
        b"\x02" + b"\xff" * 8,
        b"\x03"
        + (LONGEST // 2).to_bytes(8, "big")
        + b"x" * (LONGEST // 2)
        + b"\x02"
        + (LONGEST // 2).to_bytes(8, "big"),
        b"\x01\x00" * (MOST_FRAMES + 1),
        b"\x06" + (LONGEST_COMMAND + 1).to_bytes(8, "big"),
    ],
)
def test_what_is_too_long_is_refused_by_its_header(data: bytes) -> None:
    zmtp = server()
    assert read([OPEN + data], zmtp) == []
    assert zmtp.fault is ZmtpFault.TOO_LONG
    assert zmtp.buffered == 0


def test_a_ping_is_answered_with_its_context() -> None:
    zmtp = server()
    read([OPEN], zmtp)
    zmtp.pieces.clear()
    assert read([b"\x04\x0a\x04PING\x00\x05abc", b"\x04\x05\x04PONG"], zmtp) == []
    assert b"".join(zmtp.pieces) == b"\x04\x08\x04PONGabc"
    assert zmtp.fault is None


@pytest.mark.parametrize("kind", [zmq.REQ, zmq.DEALER])
@pytest.mark.parametrize("size", [0, 1, 255, 256, 9000])
def test_libzmq_understands_and_is_understood(kind: int, size: int) -> None:
    with closing(socket.create_server((HOST, 0))) as listening, zmq.Context() as context, context.socket(kind) as peer:
        peer.linger, peer.rcvtimeo, peer.heartbeat_ivl = 0, 30_000, 50
        peer.connect(f"tcp://{HOST}:{listening.getsockname()[1]}")
        body = b"x" * size
        peer.send_multipart([body] if kind == zmq.REQ else [b"", body])
        connection, _ = listening.accept()
        with closing(connection):
            zmtp = server()
            while (message := zmtp.next_message()) is None:
                connection.sendall(b"".join(zmtp.pieces))
                zmtp.pieces.clear()
                zmtp.receive(connection.recv(100))
            assert message == (b"", body)
            zmtp.send([b"", body, b"two"])
            connection.sendall(b"".join(zmtp.pieces))
            assert peer.recv_multipart() == ([body, b"two"] if kind == zmq.REQ else [b"", body, b"two"])
