"""Where a node publishes its KV events, out of its answer to ``GET /kv_event_sources``. Pure.

The answer names an endpoint for each data-parallel rank, such as `tcp://10.0.0.7:5557` or `tcp://*:5557`. Only its port
is used: a node's publishers are looked for on the host of the node's own address. So a wildcard, or an address that can
be reached from the node alone, does no harm, and a node cannot make the proxy connect to other hosts.
"""

import dataclasses
import re
from collections.abc import Iterator
from urllib.parse import urlsplit

from pdproxy.request import read_json

MOST_RANKS = 256
"""Publishers of one node that are listened to; vLLM's largest deployments have fewer ranks behind one address."""
_TCP = re.compile(r"tcp://[^/]*:([0-9]{1,5})")


@dataclasses.dataclass(frozen=True, slots=True)
class EventSource:
    """The publisher of one data-parallel rank.

    Attributes:
        rank: as a place's: counted from 0 among those of the node, as the server itself counts (`RANK_HEADER`).
        publisher: the rank that its batches name. Of an engine over several hosts with an HTTP server on each
            (vLLM's `--data-parallel-hybrid-lb`), the second host's first may be 8.
        port: of its PUB socket.
        replay_port: of its ROUTER socket; None where it has none.
        topic: the first frame of its messages.
    """

    rank: int
    publisher: int
    host: str
    port: int
    replay_port: int | None
    topic: bytes


@dataclasses.dataclass(frozen=True, slots=True)
class EventSources:
    """All of a node's; ``unusable``: for operators, why others that it names are not used."""

    usable: tuple[EventSource, ...]
    unusable: tuple[str, ...] = ()


def read_sources(body: bytes, url: str) -> EventSources:
    """The publishers in the answer of the node at ``url``; none where it has none, or the answer is unusable."""
    listed = _listed(body)
    host = urlsplit(url).hostname or ""
    read = [_source(rank, publisher, fields, host) for rank, (publisher, fields) in enumerate(listed.items())]
    found = tuple(source for source in read if isinstance(source, EventSource))
    return EventSources(found[:MOST_RANKS], tuple(why for why in read if isinstance(why, str)))


def _listed(body: bytes) -> dict[int, dict[str, object]]:
    try:
        answer = read_json(body)
    except ValueError:
        return {}
    return dict(sorted(_ranks(answer))) if isinstance(answer, dict) else {}


def _ranks(answer: dict[str, object]) -> Iterator[tuple[int, dict[str, object]]]:
    for name, fields in answer.items():
        if name.isdecimal() and len(name) < 8 and isinstance(fields, dict) and fields.get("publisher") != "null":
            yield int(name), fields


def _source(rank: int, publisher: int, fields: dict[str, object], host: str) -> EventSource | str:
    """The source, or why there is none."""
    endpoint, replay, topic = (fields.get(name) for name in ("endpoint", "replay_endpoint", "topic"))
    port = _port(endpoint)
    if port is None:
        return f"rank {publisher} publishes at {str(endpoint)[:64]!r}, which is no TCP address with a port"
    text = topic if isinstance(topic, str) else ""
    return EventSource(rank, publisher, host, port, _port(replay), text.encode("utf-8", "replace"))


def _port(endpoint: object) -> int | None:
    parts = _TCP.fullmatch(endpoint) if isinstance(endpoint, str) else None
    port = int(parts[1]) if parts else 0
    return port if 0 < port < 65536 else None
