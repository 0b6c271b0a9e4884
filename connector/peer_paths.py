"""Which prefill engines this decode node can read from, as its own reads and probes have shown. Pure: time is passed
in, seconds on one monotonic clock.

A read can wait in vain for several things: the prefill node's metadata, a handshake, the bytes, the verdict. Each wait
has a deadline, and the first request pays it. This table keeps the next ones from paying it, too:

    open ──── a read ended as one of `PATH_FAILURES` ──► barred
    barred ── its tickets are not read but given back at once, and hold no blocks; a *probe* is ordered, the next one
              `FIRST_PAUSE` s after it fails, then twice as late each time, `LONGEST_PAUSE` at most
    barred ── all ranks' probes passed, or a read that was still under way is verified ──► open

A probe is no request: each rank fetches the engine's metadata, makes a handshake where it has none, and reads a few
KiB of the engine's cache into memory of its own (`worker_base`). A path may pass its probes and fail its reads. So an
engine that was opened, and barred again before any read was verified, stays barred for a while although its probes
pass: `2 ** n` s the n-th time in a row, `LONGEST_HOLD` at most.

The key is the whole `Peer`, addresses and parallel sizes included. An engine that restarts has a new id and is a new
peer. A ticket that was forged where there are no ticket keys bars the honest peer only if it names exactly that, and
then until one probe has passed.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from .counters import PATH_FAILURES, Counters, ProbeOutcome, ReadOutcome

log = logging.getLogger("vllm.pdproxy.scheduler")

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 2.0
LONGEST_HOLD = 60.0
PROBED_FOR = 60.0
"""Seconds after a peer's last ticket in which it is probed. A later ticket finds it barred, and has it probed again."""
MOST_PEERS = 1024

_BARRED = (
    "No hand-overs from the prefill engine %s at %s:%d for now: a read from it ended as %s. Prompts with its tickets "
    "are computed here. The path is probed until it works. Check the network between the nodes (VLLM_NIXL_SIDE_CHANNEL"
    "_HOST and _PORT for the side channel, UCX_NET_DEVICES for the reads), and that the prefill node runs."
)


@dataclass(frozen=True, slots=True)
class Peer:
    """A prefill engine as its tickets name it."""

    engine_id: str
    host: str
    port: int
    tp_size: int
    dcp_size: int
    pp_size: int

    @classmethod
    def of(cls, params: Mapping[str, Any]) -> Peer:
        """The engine that clean `kv_transfer_params` name."""
        return cls(
            params["remote_engine_id"],
            params["remote_host"],
            params["remote_port"],
            params["tp_size"],
            params.get("dcp_size", 1),
            params.get("pp_size", 1),
        )


class _State(StrEnum):
    OPEN = "open"
    """The peer was barred, and no read has been verified since."""
    BARRED = "barred"


@dataclass(slots=True)
class _Path:
    """`why`: what more is known of the read than its `reason`; `since`: when it was barred; `wanted`: when its last
    ticket came; `due`: of the next probe. `pause`: after the next probe that fails. `relapses`: how often it was barred
    again without a verified read in between. `passed`: ranks whose probe of this number has passed; `probing`: it is
    under way."""

    reason: ReadOutcome
    why: str
    since: float
    wanted: float
    due: float
    state: _State = _State.BARRED
    pause: float = FIRST_PAUSE
    relapses: int = 0
    number: int = 0
    probing: bool = False
    passed: int = 0
    failed: int = 0


class PeerPaths:
    """For the engine's thread. `ranks`: how many of this node's workers probe."""

    def __init__(self, ranks: int, counters: Counters) -> None:
        self._ranks = ranks
        self._counters = counters
        self._paths: OrderedDict[Peer, _Path] = OrderedDict()
        self._number = 0
        self._probed: dict[int, Peer] = {}
        self._shown = 0

    def __len__(self) -> int:
        """How many peers are being probed: an idle engine must step on for them."""
        return self._shown

    def on_read_ended(self, peer: Peer, outcome: ReadOutcome, now: float, why: str = "") -> None:
        """A read from the peer ended on a rank, or on all of them. `why`: what more is known of it."""
        path = self._paths.get(peer)
        if outcome is ReadOutcome.VERIFIED:
            if path is not None:
                self._open(peer, path, now)
                del self._paths[peer]
        elif outcome in PATH_FAILURES and (path is None or path.state is _State.OPEN):
            self._bar(peer, outcome, why, 0 if path is None else path.relapses + 1, now)
        self._show(now)

    def barred(self, peer: Peer, now: float) -> ReadOutcome | None:
        """Why no read from there is to be made for a ticket that is at hand now; None when it may be."""
        path = self._paths.get(peer)
        if path is None or path.state is _State.OPEN:
            return None
        path.wanted = now
        self._show(now)
        return path.reason

    def why(self, peer: Peer) -> str:
        """More about the read that barred the peer."""
        path = self._paths.get(peer)
        return "" if path is None else path.why

    def pop_probes(self, now: float) -> dict[int, Peer]:
        """The probes that every rank is to begin now, by number."""
        if not self._shown:
            return {}
        orders = {}
        for peer, path in self._paths.items():
            if self._is_probed(path, now) and not path.probing and path.due <= now:
                self._number += 1
                path.number, path.probing, path.passed, path.failed = self._number, True, 0, 0
                orders[self._number] = self._probed[self._number] = peer
        self._show(now)
        return orders

    def on_probed(self, passed: Mapping[int, int], failed: Mapping[int, int], now: float) -> None:
        """Probes ended on some ranks: how many, by the probes' numbers."""
        for number in passed.keys() | failed.keys():
            peer = self._probed.get(number)
            path = None if peer is None else self._paths.get(peer)
            if peer is not None and (path is None or path.number != number):
                del self._probed[number]
            elif peer is not None and path is not None:
                path.passed += passed.get(number, 0)
                path.failed += failed.get(number, 0)
                if path.passed + path.failed >= self._ranks:
                    del self._probed[number]
                    self._conclude(peer, path, now)
        self._show(now)

    def _conclude(self, peer: Peer, path: _Path, now: float) -> None:
        path.probing = False
        self._counters.path_probed(ProbeOutcome.FAILED if path.failed else ProbeOutcome.PASSED)
        if path.state is not _State.BARRED:
            return
        held_until = path.since + (min(LONGEST_HOLD, 2.0**path.relapses) if path.relapses else 0.0)
        if path.failed:
            path.due, path.pause = now + path.pause, min(LONGEST_PAUSE, 2 * path.pause)
        elif now < held_until:
            path.due = held_until
        else:
            self._open(peer, path, now)

    def _bar(self, peer: Peer, reason: ReadOutcome, why: str, relapses: int, now: float) -> None:
        before = self._paths.pop(peer, None)
        self._paths[peer] = _Path(reason, why, now, now, now, relapses=min(relapses, 16))
        if before is not None and before.probing:
            self._probed.pop(before.number, None)
        if len(self._paths) > MOST_PEERS:
            self._paths.popitem(last=False)
        log.warning(_BARRED, peer.engine_id, peer.host, peer.port, reason.value)

    def _open(self, peer: Peer, path: _Path, now: float) -> None:
        if path.state is _State.BARRED:
            path.state = _State.OPEN
            text = "Hand-overs from the prefill engine %s at %s:%d go on: the path works again, after %.1f s."
            log.warning(text, peer.engine_id, peer.host, peer.port, now - path.since)

    def _is_probed(self, path: _Path, now: float) -> bool:
        return path.state is _State.BARRED and now - path.wanted < PROBED_FOR

    def _show(self, now: float) -> None:
        shown = sum(self._is_probed(path, now) for path in self._paths.values()) if self._paths else 0
        if shown != self._shown:
            self._shown = shown
            self._counters.barred_peers(shown)
