"""Messages between the scheduler and its workers in every step; pickled between processes.

ConnectorMetadata   scheduler → workers   vLLM's own metadata, with our reads, leases, releases and aliases
WorkerReport        workers → scheduler   from `build_connector_worker_meta`; merged over ranks by vLLM's output
                                          aggregator, in the same step output as the `finished_sending` and
                                          `finished_recving` that it explains
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TypeVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlConnectorMetadata

from .counters import ReadOutcome
from .peer_paths import Peer

_Key = TypeVar("_Key", str, int)


@dataclass(frozen=True, slots=True)
class ReadOrder:
    """The read of one ticket; it belongs to the entry of the same request id in `reqs_to_recv`.

    `nonce`: of this read, on every rank; the completion notification carries it.
    `issued_at`: when the ticket was issued, unix seconds by the prefill node's clock (0.0: unknown).
    `hit_tokens`, `pull_tokens`: tokens that the local cache has, and that the read brings. 0 to pull: only give notice.
    """

    nonce: str
    issued_at: float = 0.0
    hit_tokens: int = 0
    pull_tokens: int = 0


class ConnectorMetadata(NixlConnectorMetadata):
    """vLLM's metadata plus ours. All keys but those of `aliases` and `probes` are request ids of *this* node.

    reads: orders for the entries of `reqs_to_recv` (notify-only entries, with no local blocks, included).
    readers: prefill side, for the entries of `reqs_to_send`: how many nonces must complete before blocks are freed.
    releases: prefill side: end these leases now. A rank that still tracks such a request reports it in
        `finished_sending` once; one that has reported it already, or never knew it, does nothing.
    aliases: prefill side: alias → request id, of prefill legs that have arrived since the last step. It comes before
        the request is computed, so before a ticket can name the alias.
    returned: prefill side: nonces of reads that will not be made, or not any more, by request id.
    probes: decode side: paths to probe, by number.
    retired: prefill side: request ids whose alias is no longer valid. A worker that does not know one does nothing.
    idle: the step computes nothing: a worker may wait in it without delaying a token.
    """

    reads: Mapping[str, ReadOrder] = MappingProxyType({})
    readers: Mapping[str, int] = MappingProxyType({})
    releases: frozenset[str] = frozenset()
    aliases: Mapping[str, str] = MappingProxyType({})
    retired: frozenset[str] = frozenset()
    returned: Mapping[str, Collection[str]] = MappingProxyType({})
    probes: Mapping[int, Peer] = MappingProxyType({})
    idle: bool = False

    @classmethod
    def extending(cls, stock: NixlConnectorMetadata) -> "ConnectorMetadata":
        """A new one with everything that vLLM's own scheduler side put into `stock`."""
        ours = cls()
        ours.__dict__.update(stock.__dict__)
        return ours


_SEVERITY = {outcome: rank for rank, outcome in enumerate(ReadOutcome)}


@dataclass(frozen=True, slots=True)
class ReadEnd:
    """The end of one read. Reported in the step in which the request is in `finished_recving`, or earlier.

    Bytes are added up over ranks; the outcome is the worst of them. `why`: of that one, where more is known.
    """

    nonce: str
    outcome: ReadOutcome
    attention_bytes: int = 0
    state_bytes: int = 0
    why: str = ""

    def merged(self, other: "ReadEnd") -> "ReadEnd":
        """Both ranks' ends of one read; of two reads, the other's (the newer)."""
        if other.nonce != self.nonce:
            return other
        worst = max(self, other, key=lambda end: _SEVERITY[end.outcome])
        return ReadEnd(
            nonce=self.nonce,
            outcome=worst.outcome,
            attention_bytes=self.attention_bytes + other.attention_bytes,
            state_bytes=self.state_bytes + other.state_bytes,
            why=worst.why,
        )


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """Reports of one rank, or of all ranks after merging, since the last step.

    reads_seen: prefill side: request id → nonce → number of ranks on which all of that nonce's readers
        have given notice.
    reads_ended: decode side: request id → how its read ended.
    stalled: decode side: nonce → number of ranks that gave up on a read whose transfer is still live; the local
        blocks must outlive the request. Reported together with, or before, the failure of that request.
    drained: decode side: nonce → number of ranks whose given-up transfer of that nonce has ended.
    broken: decode side: those of `drained` whose transfer ended in an error, so without notice to the prefill node.
    returned: decode side: nonce → number of ranks that have given a ticket back without a read, or given up on it.
    paths_passed, paths_failed: decode side: probe → number of ranks on which it ended so.
    """

    reads_seen: dict[str, dict[str, int]] = field(default_factory=dict)
    reads_ended: dict[str, ReadEnd] = field(default_factory=dict)
    stalled: dict[str, int] = field(default_factory=dict)
    drained: dict[str, int] = field(default_factory=dict)
    broken: dict[str, int] = field(default_factory=dict)
    returned: dict[str, int] = field(default_factory=dict)
    paths_passed: dict[int, int] = field(default_factory=dict)
    paths_failed: dict[int, int] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return any(vars(self).values())

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "WorkerReport":
        """This report with another rank's added."""
        if not isinstance(other, WorkerReport):
            raise TypeError(f"cannot merge a {type(other).__name__} into a WorkerReport")
        for request_id, reads in other.reads_seen.items():
            _add(self.reads_seen.setdefault(request_id, {}), reads)
        for request_id, end in other.reads_ended.items():
            mine = self.reads_ended.get(request_id)
            self.reads_ended[request_id] = end if mine is None else mine.merged(end)
        _add(self.stalled, other.stalled)
        _add(self.drained, other.drained)
        _add(self.broken, other.broken)
        _add(self.returned, other.returned)
        _add(self.paths_passed, other.paths_passed)
        _add(self.paths_failed, other.paths_failed)
        return self


def _add(counts: dict[_Key, int], more: Mapping[_Key, int]) -> None:
    for key, number in more.items():
        counts[key] = counts.get(key, 0) + number
