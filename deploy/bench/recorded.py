"""Reads recorded traces. Their prompts are lists of block ids: two prompts share what begins with the same ids.

Mooncake's form is a line of JSON for each request: ``timestamp`` (ms), ``input_length``, ``output_length`` and
``hash_ids`` of 512 tokens each. Weka's (kv-cache-tester) is a JSON object for each session: ``id``, ``block_size`` (64)
and ``requests``, each with ``t`` (s), ``in``, ``out`` and ``hash_ids``; one of type ``subagent`` has requests of its
own, whose times count from its own ``t`` (so in the original files; others count them from the session's begin).
"""

import dataclasses
import json
import random
from collections.abc import Iterable, Mapping
from typing import Any

from deploy.bench.traces import Prompt, Request, Segment, Trace, from_arrivals

MOONCAKE_BLOCK = 512


def mooncake(name: str, lines: Iterable[str], limit: int | None = None) -> Trace:
    """The first ``limit`` requests, None for all. No sessions: the form has none.

    Raises:
        ValueError: a line is not of this form.
    """
    rows = [_object(line) for line in lines if line.strip()][:limit]
    return from_arrivals(name, [_mooncake(row) for row in rows])


def _mooncake(row: Mapping[str, Any]) -> Request:
    prompt = _prompt(0, row["hash_ids"], int(row["input_length"]), MOONCAKE_BLOCK)
    return Request(float(row["timestamp"]) / 1000, None, None, prompt, max(1, int(row["output_length"])))


def weka(name: str, sessions: Iterable[str], within: float = 30.0, faster: float = 1.0, seed: int = 1) -> Trace:
    """Sessions that begin within a time; ids mean something within a session alone (``hash_id_scope: local``).

    Args:
        faster: how many times shorter the recorded times become.

    Raises:
        ValueError: a session is not of this form.
    """
    dice, found = random.Random(seed), list[Request]()
    for number, text in enumerate(text for text in sessions if text.strip()):
        session = _object(text)
        block, scope = int(session.get("block_size", 64)), 0 if session.get("hash_id_scope") == "global" else number + 1
        begins = dice.uniform(0, within)
        for at, row in _flat(session["requests"], 0.0):
            prompt = _prompt(scope, row["hash_ids"], int(row["in"]), block)
            found.append(Request(begins + at / faster, None, number, prompt, max(1, int(row["out"]))))
    return from_arrivals(name, found)


def _flat(rows: Iterable[Mapping[str, Any]], offset: float) -> Iterable[tuple[float, Mapping[str, Any]]]:
    """All requests of a session and its sub-agents, with their times."""
    for row in rows:
        at = offset + float(row["t"])
        if row.get("type") == "subagent":
            yield from _flat(row["requests"], at)
        else:
            yield at, row


def _prompt(scope: int, ids: Iterable[int], tokens: int, block: int) -> Prompt:
    """Blocks of ``block`` tokens, the last one shorter; tokens that have no id are nobody else's."""
    segments, left = list[Segment](), tokens
    for each in ids:
        if left <= 0:
            break
        segments.append(Segment(scope << 40 | int(each), min(block, left)))
        left -= block
    if left > 0:
        segments.append(Segment(hash((scope, tokens, *segments)), left))
    return tuple(segments)


def _object(text: str) -> Mapping[str, Any]:
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError(f"a trace has an object on each line, not {text[:80]!r}")  # noqa: TRY004 - of the file
    return found


def rescaled(trace: Trace, faster: float) -> Trace:
    """The same requests in less time."""
    requests = (dataclasses.replace(request, at=request.at / faster) for request in trace.requests)
    return Trace(trace.name, tuple(requests))
