"""The route of a fake node on which streams come with a journal, and are resumed from one."""

import dataclasses
import itertools
import json
from collections.abc import Iterator, Mapping
from typing import Any

from tests.fakes.fake_model import ChoiceText, next_tokens
from tests.fakes.kv_transfer import FakeKvTransfer
from tests.fakes.vllm_answers import Group, ParsedRequest, batches

STREAMS_PATH = "/v1/pdproxy/streams"
RESUME = "pdproxy_resume"
Record = list[Any]


def records_of(body: Mapping[str, Any]) -> list[Record] | None:
    """The records of the stream that a body is to resume; None for a body that the route refuses."""
    order = body.get(RESUME, {"records": []})
    records = order.get("records") if isinstance(order, dict) and order.keys() == {"records"} else None
    if not body.get("stream") or not isinstance(records, list):
        return None
    return records if all(isinstance(each, list) and len(each) in (2, 3) for each in records) else None


def journaled(question: ParsedRequest, cached: int, records: list[Record], fabric: FakeKvTransfer) -> tuple[bytes, ...]:
    """The pieces of a stream that goes on after these records; each is the events of a group, and their record.

    The old groups go through the same code as new ones, and the events that come of them are dropped.
    """
    names = {name: value for record in records for name, value in (record[2] if len(record) == 3 else {}).items()}
    cached = names.pop("cached", cached)  # a resumed stream tells of the node that began it
    question = dataclasses.replace(question, **names)
    old = [group for record in records for group in record[1]]
    to_drop, groups_left = sum(record[0] for record in records), len(old)
    pieces = []
    for batch in batches(question, cached, _outputs(question, old, fabric)):
        if to_drop or groups_left:
            to_drop -= len(batch.events)
            groups_left -= bool(batch.group)
            continue
        record: Record = [len(batch.events), [_written(batch.group)] if batch.group else []]
        if batch.events and not names:
            names = {"name": question.name, "created": question.created}
            record.append({**names, "cached": cached})
        pieces.append(b"".join(batch.events) + comment(record))
    if to_drop or groups_left:
        fabric.wrong.append(f"the journal {records} does not end where events do")
    return tuple(pieces)


def comment(record: Record) -> bytes:
    """A record as it stands in the stream."""
    return b": pdproxy " + json.dumps(record, separators=(",", ":")).encode() + b"\n\n"


def _outputs(question: ParsedRequest, old: list[Any], fabric: FakeKvTransfer) -> Iterator[Group]:
    """The old groups as they were, then what is generated after them."""
    texts = [ChoiceText(question.prompt, question.count, question.stops) for _ in range(question.n)]
    tokens = [next_tokens(question.prompt, index) for index in range(question.n)]
    for group in old:
        steps = tuple((index, texts[index].feed(list(ids))) for index, ids, *_ in group)
        right = [list(itertools.islice(tokens[index], len(ids))) for index, ids, *_ in group]
        if [ids for _, ids, *_ in group] != right or _written(steps) != group:
            fabric.wrong.append(f"the journal's group {group} is not what was generated")
        yield steps
    while unfinished := [index for index, text in enumerate(texts) if text.left]:
        index = min(unfinished, key=lambda each: texts[each].produced)  # each in its turn
        step = itertools.islice(tokens[index], min(question.burst, texts[index].left))
        yield ((index, texts[index].feed(list(step))),)


def _written(group: Group) -> list[list[Any]]:
    """As it stands in a record."""
    ended = {index: [step.finish, step.stop] if step.finish else [] for index, step in group}
    return [[index, step.tokens, *ended[index]] for index, step in group]
