"""A look-up never blocks the caller, and a name server that is silent occupies a bounded number of threads."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from connector.peers import FRESH_FOR, MOST_THREADS, ResolvedAddress, Resolver, SocketAddress, resolve_by_system

PATIENCE = 30.0


class NameServer:
    """Answers when the test lets it."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.asked: list[str] = []
        self.broken = False

    def __call__(self, host: str, port: int) -> tuple[socket.AddressFamily, SocketAddress]:
        self.asked.append(host)
        if host.startswith("slow"):
            self.go.wait(PATIENCE)
        if self.broken:
            raise socket.gaierror("unknown name")
        return socket.AF_INET, (f"10.0.0.{len(self.asked)}", port)


@pytest.fixture
def server() -> Iterator[NameServer]:
    server = NameServer()
    yield server
    server.go.set()


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self.woken = 0

    def __call__(self) -> float:
        return self.now

    def wake(self) -> None:
        self.woken += 1


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_numbers_are_not_looked_up(server: NameServer) -> None:
    resolver = Resolver(lambda: None, time.monotonic, server)
    assert resolver.find("10.0.0.1", 7) == ResolvedAddress(socket.AF_INET, ("10.0.0.1", 7))
    found = resolver.find("::1", 7)
    assert found is not None
    assert found.family == socket.AF_INET6
    assert server.asked == []


def test_a_name_is_looked_up_in_the_background_kept_and_looked_up_anew(server: NameServer) -> None:
    clock = Clock()
    resolver = Resolver(clock.wake, clock, server)
    assert resolver.find("node", 7) is None
    until(lambda: clock.woken == 1)
    first = ResolvedAddress(socket.AF_INET, ("10.0.0.1", 7))
    assert resolver.find("node", 7) == first
    clock.now = FRESH_FOR + 1
    assert resolver.find("node", 7) == first
    until(lambda: clock.woken == 2)
    assert resolver.find("node", 7) == ResolvedAddress(socket.AF_INET, ("10.0.0.2", 7))
    assert server.asked == ["node", "node"]


def test_an_unknown_name_is_an_error_each_time(server: NameServer) -> None:
    clock = Clock()
    server.broken = True
    resolver = Resolver(clock.wake, clock, server)
    for looked_up in (1, 2):
        assert resolver.find("nowhere", 7) is None
        until(lambda: clock.woken == looked_up)  # noqa: B023 - called before the next round
        with pytest.raises(OSError, match="unknown name"):
            resolver.find("nowhere", 7)


def test_an_old_address_is_used_while_the_name_server_is_broken(server: NameServer) -> None:
    clock = Clock()
    resolver = Resolver(clock.wake, clock, server)
    resolver.find("node", 7)
    until(lambda: clock.woken == 1)
    server.broken, clock.now = True, FRESH_FOR + 1
    resolver.find("node", 7)
    until(lambda: clock.woken == 2)
    assert resolver.find("node", 7) == ResolvedAddress(socket.AF_INET, ("10.0.0.1", 7))


def test_hanging_look_ups_hold_one_thread_a_name_and_leave_room_for_others(server: NameServer) -> None:
    clock = Clock()
    resolver = Resolver(clock.wake, clock, server)
    for _ in range(3):
        for number in range(64):
            assert resolver.find(f"slow-{number}", 7) is None
    assert resolver.find("node", 7) is None
    until(lambda: clock.woken == 1)
    assert resolver.find("node", 7) is not None
    assert len(server.asked) == 65


def test_there_are_only_so_many_threads(server: NameServer) -> None:
    resolver = Resolver(lambda: None, time.monotonic, server)
    for number in range(MOST_THREADS):
        assert resolver.find(f"slow-{number}", 7) is None
    with pytest.raises(OSError, match="looked up already"):
        resolver.find("one-too-many", 7)


def test_the_systems_own_look_up() -> None:
    family, address = resolve_by_system("localhost", 7)
    assert (family, address) == (socket.AF_INET, ("127.0.0.1", 7))
