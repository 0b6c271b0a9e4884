"""Ticket keys that change while nodes run: what is read when, and that a rotation refuses nobody."""

import logging
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from connector import ticket_keys
from connector.config import ConfigError
from connector.counters import KeyChange
from connector.messages import MetadataQuestion, Reply, write_metadata_question
from connector.ticket import Expected, Ticket, parse, wire
from connector.ticket_fields import Refusal, RefusalReason
from connector.ticket_keys import LOOK_SECONDS, KeyFile
from tests.connector.harness import Node, make_node, prompt, take_ticket
from tests.connector.test_side_channel import Client, Side
from tests.connector.tickets import FINGERPRINT, SHAPES, good
from tests.fakes.clock import FakeClock

OLD, NEW = "old key of sixteen", "new key of sixteen"
ROTATION = ((OLD,), (OLD, NEW), (NEW, OLD), (NEW,))
"""The contents of every node's file, step by step."""


class Mounted:
    """A key file in a mounted secret, which changes by a swapped link."""

    def __init__(self, folder: Path, name: str = "node") -> None:
        self.folder, self._turn = folder / name, 0
        self.folder.mkdir()
        self.put(OLD)
        self.path = self.folder / "ticket.keys"
        self.path.symlink_to(Path("..data") / "ticket.keys")

    def put(self, *keys: str) -> None:
        self.put_bytes("\n".join(keys).encode())

    def put_bytes(self, content: bytes | None) -> None:
        self._turn += 1
        version = self.folder / f"..{self._turn}"
        version.mkdir()
        if content is not None:
            (version / "ticket.keys").write_bytes(content)
        (self.folder / "..new").symlink_to(version.name)
        (self.folder / "..new").rename(self.folder / "..data")


@pytest.fixture
def mounted(tmp_path: Path) -> Mounted:
    return Mounted(tmp_path)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def look_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every use looks."""
    monkeypatch.setattr(ticket_keys, "LOOK_SECONDS", 0.0)


def encoded(*keys: str) -> tuple[bytes, ...]:
    return tuple(key.encode() for key in keys)


def test_a_file_is_read_when_a_key_is_needed_and_not_too_often(mounted: Mounted, clock: FakeClock) -> None:
    changes: list[KeyChange] = []
    keys = KeyFile(str(mounted.path), clock.now)
    keys.report_to(changes.append)
    mounted.put(NEW, OLD)
    clock.advance(LOOK_SECONDS - 0.1)
    assert tuple(keys) == encoded(OLD)
    clock.advance(0.1)
    assert (keys[0], len(keys), keys[1:]) == (NEW.encode(), 2, encoded(OLD))
    clock.advance(LOOK_SECONDS)
    assert tuple(keys) == encoded(NEW, OLD)
    assert changes == [KeyChange.TAKEN]


@pytest.mark.parametrize(
    "wrong", [None, b"", b"# none\n", b"short", b"\xff" * 20], ids=["gone", "empty", "comment", "short", "binary"]
)
def test_what_cannot_be_used_keeps_the_keys(
    mounted: Mounted, clock: FakeClock, wrong: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    changes: list[KeyChange] = []
    keys = KeyFile(str(mounted.path), clock.now)
    keys.report_to(changes.append)
    mounted.put_bytes(wrong)
    for _ in range(3):
        clock.advance(LOOK_SECONDS)
        assert tuple(keys) == encoded(OLD)
    assert changes == [KeyChange.REFUSED] * 3
    assert len([line for line in caplog.messages if "stay in use" in line]) == 1
    mounted.put(NEW)
    clock.advance(LOOK_SECONDS)
    assert tuple(keys) == encoded(NEW)


def test_keys_are_not_logged(mounted: Mounted, clock: FakeClock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    keys = KeyFile(str(mounted.path), clock.now)
    for held in ((NEW, OLD), (NEW, "short")):
        mounted.put(*held)
        clock.advance(LOOK_SECONDS)
        assert len(keys) == 2
    assert caplog.messages
    assert not any(key in caplog.text for key in (OLD, NEW, "short\n"))


def test_at_the_start_the_file_must_be_usable(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        KeyFile(str(tmp_path / "absent"))


def orders() -> Iterator[tuple[int, int]]:
    """The steps at which the prefill node and the decode node stand: one of them always goes first."""
    for step in range(len(ROTATION) - 1):
        yield from ((step, step), (step + 1, step), (step, step + 1))


def test_a_ticket_is_good_at_every_step_of_a_rotation_whoever_goes_first() -> None:
    for issuer, reader in orders():
        raw = wire(good(), encoded(*ROTATION[issuer]))
        expected = Expected(SHAPES, encoded(*ROTATION[reader]), fingerprint=FINGERPRINT)
        assert isinstance(parse(raw, expected), Ticket), (issuer, reader)


def test_a_step_left_out_is_refused() -> None:
    """A new key that signs before the others have it; so the order in docs/security.md matters."""
    refused = parse(wire(good(), encoded(NEW)), Expected(SHAPES, encoded(OLD), fingerprint=FINGERPRINT))
    assert isinstance(refused, Refusal)
    assert refused.reason is RefusalReason.BAD_SIGNATURE


def test_a_connection_to_the_side_channel_lives_through_a_rotation(tmp_path: Path, clock: FakeClock) -> None:
    """Whichever node is a step ahead: a reply is signed by the key of its question."""
    prefill, decode = Mounted(tmp_path, "prefill"), Mounted(tmp_path, "decode")
    ours, theirs = (KeyFile(str(each.path), clock.now) for each in (decode, prefill))
    with closing(Side(keys=theirs)) as side:
        client = Client(side, keys=ours)
        for number, (one, other) in enumerate(orders(), 1):
            prefill.put(*ROTATION[one])
            decode.put(*ROTATION[other])
            clock.advance(LOOK_SECONDS)
            asked = MetadataQuestion(number, "P", 0, 1)
            assert client.ask(write_metadata_question(asked)) == Reply(number, side.listener.incarnation, b"one")
        assert side.counts() == {}


@pytest.fixture
def nodes(tmp_path: Path) -> Callable[[str], tuple[Node, Mounted]]:
    """Makes a node with a key file of its own."""

    def make(role: str) -> tuple[Node, Mounted]:
        mounted = Mounted(tmp_path, role)
        return make_node(role, engine_id=role, extra={"pdproxy_key_file": str(mounted.path)}), mounted

    return make


@pytest.mark.usefixtures("look_at_once")
def test_running_nodes_take_new_keys_and_count_what_they_refuse(
    nodes: Callable[[str], tuple[Node, Mounted]],
) -> None:
    (prefill, its_keys), (decode, keys) = nodes("kv_producer"), nodes("kv_consumer")
    for number, (one, other) in enumerate(orders()):
        its_keys.put(*ROTATION[one])
        keys.put(*ROTATION[other])
        ticket = take_ticket(prefill, prompt(40, seed=number), f"p-{number}")
        decode.add(f"d-{number}", prompt(40, seed=number), ticket)
        decode.step()
        assert f"d-{number}" in decode.metas[-1].reads
    assert decode.counts("refused") == {}
    assert decode.counts("key_file_changes").keys() == {"taken"}
    keys.put_bytes(None)
    decode.add("late", prompt(40, seed=99), take_ticket(prefill, prompt(40, seed=99), "p-late"))
    decode.step()
    assert "late" in decode.metas[-1].reads
    assert decode.counts("key_file_changes")["refused"] >= 1
