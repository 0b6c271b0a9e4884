"""The connector's counters, and the table of its metrics. Pure but for a lock; imports no vLLM.

Every metric is named in `COUNTERS`, `HISTOGRAMS` or `GAUGES`, with its labels. `Counters` collects in the scheduler's
process and on each worker rank; `stats` drains it into vLLM's pipeline to `/metrics`.
"""

from __future__ import annotations

import threading
from collections import Counter as Totals
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from .leases import LeaseEnd
from .messages import QuestionRefusal
from .tcp_server import CloseReason
from .ticket_fields import RefusalReason

if TYPE_CHECKING:
    from .kv_groups import Capacity, Group


class ReadOutcome(StrEnum):
    """How a read ended on a rank. Where ranks differ the worst counts, in this order, last is worst."""

    VERIFIED = "verified"
    TRANSFER_FAILED = "transfer_failed"
    UNVERIFIED = "unverified"
    PEER_UNREACHABLE = "peer_unreachable"
    INCOMPATIBLE = "incompatible"
    NO_PROGRESS = "no_progress"
    NOT_HELD = "not_held"

    @property
    def leaves_lease(self) -> bool:
        """Whether the prefill node may still hold the blocks for this reader, so that the ticket must be returned."""
        return self not in (ReadOutcome.VERIFIED, ReadOutcome.NOT_HELD)


PATH_FAILURES = (
    ReadOutcome.TRANSFER_FAILED,
    ReadOutcome.UNVERIFIED,
    ReadOutcome.PEER_UNREACHABLE,
    ReadOutcome.NO_PROGRESS,
)
"""Ends of a read that the path to the prefill node, or that node's silence, may have caused. Not INCOMPATIBLE, which
the handshake remembers by itself (`peer_engines`), nor NOT_HELD, which says that the other node answers."""


class ProbeOutcome(StrEnum):
    """How a probe of the path to a barred prefill engine ended, on all ranks together."""

    PASSED = "passed"
    FAILED = "failed"


class KeyChange(StrEnum):
    """The result of a look into the file of ticket keys that did not find the same ones."""

    TAKEN = "taken"
    REFUSED = "refused"
    """The file cannot be used: the node keeps the keys that it has. Counted at each look."""


class KeepEnd(StrEnum):
    """How a keep for a conversation's next turn ended (`keeps`)."""

    HIT = "hit"
    """The next turn's prompt was resumed at its end."""
    MISSED = "missed"
    """The next turn came, and its prompt goes on from less than what was kept."""
    REPLACED = "replaced"
    """By another one of the same conversation, without a turn between them."""
    EXPIRED = "expired"
    FORGOTTEN = "forgotten"
    """A client or an operator ended it."""
    NEED = "need"
    """A request needed a block, and all others were in use or kept."""
    SHARE = "share"
    """Overdue, and another keep needed its blocks of the share of the cache that is for keeps."""


class NotKept(StrEnum):
    """Why nothing is kept after a turn."""

    NOTHING_CACHED = "nothing_cached"
    TOO_LARGE = "too_large"
    """More than what is left of the share of the cache that is for keeps."""
    NOT_ASKED = "not_asked"
    """The order was for no time. Not counted."""
    OFF = "off"
    """The share is 0. Not counted."""


class WaitEnd(StrEnum):
    """How it ended that a waiting prompt kept what it will resume from."""

    ADMITTED = "admitted"
    GONE = "gone"
    NEED = "need"


_GROUPS = ("attention", "state")
_RESUME_REFUSALS = (
    RefusalReason.NOT_AN_OBJECT,
    RefusalReason.BAD_FIELD,
    RefusalReason.BAD_SIGNATURE,
    RefusalReason.UNSUITABLE_REQUEST,
    RefusalReason.NUMBER,
    "grammar",
)
_UNSIGNED = (QuestionRefusal.UNSIGNED, QuestionRefusal.BAD_SIGNATURE, QuestionRefusal.REPLAYED)

COUNTERS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "prompt_tokens": {"source": ("hit", "pulled", "loaded", "computed")},
    "blocks": {"group": _GROUPS, "kind": ("hit", "pulled")},
    "bytes": {"group": _GROUPS, "kind": ("pulled", "spared")},
    "refused": {"reason": tuple(RefusalReason)},
    "reads": {"outcome": (*ReadOutcome,)},
    "leases_ended": {"how": tuple(LeaseEnd)},
    "unused_tickets": {},
    "own_tickets": {},
    "barred_tickets": {"reason": PATH_FAILURES},
    "path_probes": {"outcome": tuple(ProbeOutcome)},
    "tickets_returned": {"outcome": ("sent", "not_held", "unreachable")},
    "resumed_requests": {},
    "resumed_tokens": {},
    "resumes_refused": {"reason": _RESUME_REFUSALS},
    "duplicate_requests": {},
    "junk": {"where": ("side_channel", "notice")},
    "side_channel_closed": {"reason": tuple(CloseReason)},
    "side_channel_refused": {"reason": _UNSIGNED},
    "key_file_changes": {"outcome": tuple(KeyChange)},
    "keeps_begun": {},
    "keeps_ended": {"reason": tuple(KeepEnd)},
    "keeps_refused": {"reason": (NotKept.NOTHING_CACHED, NotKept.TOO_LARGE)},
    "keep_tokens": {"kind": ("kept", "hit")},
    "waiting_holds_ended": {"reason": tuple(WaitEnd)},
}
"""Every counter: its labels, and every value that a label may have. All series stand at 0 from the start: `rate()` does
not see the first event of a series that begins with it."""

HISTOGRAMS: Mapping[str, tuple[float, ...]] = {
    "verify_seconds": (0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5),
    "lease_age_seconds": (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120),
}
"""Every histogram with its buckets, in seconds."""

GAUGES: Mapping[str, tuple[str, ...]] = {
    "capacity_tokens": (),
    "capacity_sequences": ("limit",),
    "capacity_binding": ("group",),
    "fingerprint": ("part", "value"),
    "hashing": ("algorithm", "unit", "block_size", "drops_unit", "states", "root"),
    "barred_peers": (),
    "keeps": (),
    "keep_blocks": (),
}
"""Every gauge with the names of its labels."""

MAX_OBSERVATIONS = 10_000
"""Observations kept between two drains; further ones are dropped, so that memory is bounded if draining stops."""


@dataclass(frozen=True)
class CounterSnapshot:
    """Everything recorded since the last drain, in lists, since it travels as msgpack to the API server.

    `counts` holds `[counter, label values, increment > 0]`, `seconds` holds `[histogram, seconds]`, `gauges` holds
    `[gauge, label values, value]`.
    """

    counts: list[tuple[str, list[str], int]]
    seconds: list[tuple[str, float]]
    gauges: list[tuple[str, list[str], int]]


class Counters:
    """Counts what one process (scheduler, or one worker rank) did since the last drain. Safe from any thread.

    An increment of zero or less is left out: a Prometheus counter must never go back, whatever the caller subtracted.
    Label values come from the closed lists of `COUNTERS`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Totals[tuple[str, tuple[str, ...]]] = Totals()
        self._seconds: list[tuple[str, float]] = []
        self._gauges: dict[tuple[str, tuple[str, ...]], int] = {}

    def prompt_tokens(self, *, hit: int = 0, pulled: int = 0, loaded: int = 0, computed: int = 0) -> None:
        """Where a prompt's tokens came from; the four add up to the prompt's length.

        `loaded`: by another connector, where several share the node.
        """
        for source, tokens in (("hit", hit), ("pulled", pulled), ("loaded", loaded), ("computed", computed)):
            self._add("prompt_tokens", (source,), tokens)

    def blocks(self, group: Group, *, hit: int = 0, pulled: int = 0) -> None:
        """Logical blocks of one kind of group that were found locally, and that were pulled."""
        self._add("blocks", (group, "hit"), hit)
        self._add("blocks", (group, "pulled"), pulled)

    def bytes(self, group: Group, *, pulled: int = 0, spared: int = 0) -> None:
        """Bytes that were pulled, and bytes that a local hit spared."""
        self._add("bytes", (group, "pulled"), pulled)
        self._add("bytes", (group, "spared"), spared)

    def refused(self, reason: str) -> None:
        """Refused `kv_transfer_params`."""
        self._add("refused", (reason,), 1)

    def read(self, outcome: str) -> None:
        """One rank's read of one request ended."""
        self._add("reads", (outcome,), 1)

    def lease_ended(self, how: str, age: float) -> None:
        """A lease of this prefill node ended, `age` seconds after it was opened."""
        self._add("leases_ended", (how,), 1)
        self._observe("lease_age_seconds", age)

    def ticket_unused(self) -> None:
        """A valid ticket was not read: the local cache held everything that it covers, or there was no room to read."""
        self._add("unused_tickets", (), 1)

    def ticket_own(self) -> None:
        """A node was given a ticket that it had issued itself: the prompt is taken from its own prefix cache."""
        self._add("own_tickets", (), 1)

    def ticket_barred(self, reason: ReadOutcome) -> None:
        """A valid ticket was not read: an earlier read from its engine ended so, and no probe has passed since."""
        self._add("barred_tickets", (reason,), 1)

    def path_probed(self, outcome: ProbeOutcome) -> None:
        """The path to a barred prefill engine was probed."""
        self._add("path_probes", (outcome,), 1)

    def barred_peers(self, number: int) -> None:
        """Note how many prefill engines are barred now and have sent tickets within the last minute."""
        with self._lock:
            self._gauges["barred_peers", ()] = number

    def ticket_returned(self, outcome: str) -> None:
        """One rank gave a ticket back without a read, or failed to."""
        self._add("tickets_returned", (outcome,), 1)

    def duplicate_request(self) -> None:
        """A request was dropped because its id was that of another running request."""
        self._add("duplicate_requests", (), 1)

    def resumed(self, tokens: int) -> None:
        """A request goes on after so many output tokens of another node."""
        self._add("resumed_requests", (), 1)
        self._add("resumed_tokens", (), tokens)

    def resume_refused(self, reason: str) -> None:
        """A request ended with an error because its resume order was refused, or its grammar refused the tokens."""
        self._add("resumes_refused", (reason,), 1)

    def junk(self, where: str) -> None:
        """A message that cannot be parsed arrived at `where` (`side_channel`, `notice`)."""
        self._add("junk", (where,), 1)

    def side_channel_closed(self, reason: str) -> None:
        """The side channel closed a connection."""
        self._add("side_channel_closed", (reason,), 1)

    def side_channel_refused(self, reason: str) -> None:
        """The side channel refused to answer a question."""
        self._add("side_channel_refused", (reason,), 1)

    def key_file_changed(self, outcome: KeyChange) -> None:
        """A look into the file of ticket keys found other ones, or what cannot be used."""
        self._add("key_file_changes", (outcome,), 1)

    def keep_begun(self, tokens: int) -> None:
        """A keep for a conversation's next turn begins, of so many tokens."""
        self._add("keeps_begun", (), 1)
        self._add("keep_tokens", ("kept",), tokens)

    def keep_refused(self, reason: NotKept) -> None:
        """A turn asked for a keep, and nothing is kept."""
        self._add("keeps_refused", (reason,), 1)

    def keep_ended(self, reason: KeepEnd, *, hit: int = 0) -> None:
        """A keep ended; `hit`: tokens that the next turn resumed from it."""
        self._add("keeps_ended", (reason,), 1)
        self._add("keep_tokens", ("hit",), hit)

    def keeps(self, number: int, *, blocks: int) -> None:
        """Note how many keeps there are now, and of how many different blocks."""
        with self._lock:
            self._gauges["keeps", ()] = number
            self._gauges["keep_blocks", ()] = blocks

    def wait_ended(self, reason: WaitEnd) -> None:
        """A waiting prompt no longer keeps what it resumes from."""
        self._add("waiting_holds_ended", (reason,), 1)

    def verify_seconds(self, seconds: float) -> None:
        """From a read's last byte to its verdict."""
        self._observe("verify_seconds", seconds)

    def capacity(self, capacity: Capacity) -> None:
        """The capacity of this engine's cache. `limit="state"` is left out where no group is bounded."""
        with self._lock:
            self._gauges["capacity_tokens", ()] = capacity.tokens
            self._gauges["capacity_sequences", ("max_model_len",)] = capacity.admitted
            self._gauges["capacity_binding", (capacity.binding.value,)] = 1
            if capacity.sequences is not None:
                self._gauges["capacity_sequences", ("state",)] = capacity.sequences

    def fingerprint(self, parts: Mapping[str, str]) -> None:
        """The fingerprint of this engine's cache bytes, by part; once, when all parts are known."""
        with self._lock:
            for part, value in parts.items():
                self._gauges["fingerprint", (part, value)] = 1

    def hashing(self, labels: tuple[str, ...]) -> None:
        """How this engine's prefix cache names tokens, by `scheduler_base.PrefixHashing.labels`; once."""
        with self._lock:
            self._gauges["hashing", labels] = 1

    def has_undrained_gauges(self) -> bool:
        """Whether a gauge was set since the last drain. An idle engine must step once more to export it."""
        return bool(self._gauges)

    def drain(self) -> CounterSnapshot:
        """Everything recorded since the last call; all counts start again from zero."""
        with self._lock:
            counts, self._counts = self._counts, Totals()
            seconds, self._seconds = self._seconds, []
            gauges, self._gauges = self._gauges, {}
        return CounterSnapshot(_rows(counts), seconds, _rows(gauges))

    def _add(self, name: str, labels: tuple[str, ...], value: int) -> None:
        if value > 0:
            with self._lock:
                self._counts[name, labels] += value

    def _observe(self, name: str, seconds: float) -> None:
        with self._lock:
            if len(self._seconds) < MAX_OBSERVATIONS:
                self._seconds.append((name, max(0.0, seconds)))


def _rows(values: Mapping[tuple[str, tuple[str, ...]], int]) -> list[tuple[str, list[str], int]]:
    return [(name, list(labels), value) for (name, labels), value in values.items()]
