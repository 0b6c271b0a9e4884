"""Shapes of streamed requests, how to ask for them by way of the journal's route, and how to read what comes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.connector.api_server import END, PAD, SYSTEM, ApiServer, FakeCore

STREAMS = "/v1/pdproxy/streams"
COMPLETIONS, CHAT, MESSAGES, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"
TEXT = "One. 12 and 13? The end."
CALL = '<tool_call>\n{"name": "look", "arguments": {"place": "here"}}\n</tool_call>'
TOOL = {"name": "look", "parameters": {"type": "object", "properties": {"place": {"type": "string"}}}}


@dataclass(frozen=True)
class Shape:
    """A request, and what the model says to it: one text for each choice, `|` for the end of its reasoning."""

    path: str
    body: Mapping[str, Any]
    says: Sequence[str] = (TEXT,)
    steps: Sequence[int] = (1,)
    merged: int = 1
    parsers: bool = False
    more: Mapping[str, Any] = field(default_factory=dict)


def completion(**more: Any) -> dict[str, Any]:
    return {"prompt": "Tell me: ", "max_tokens": 40, **more}


def chat(**more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Tell me."}], "max_tokens": 120, **more}


def response(**more: Any) -> dict[str, Any]:
    return {"input": "Tell me.", "max_output_tokens": 120, **more}


def core_for(server: ApiServer, shape: Shape, **more: Any) -> FakeCore:
    return FakeCore([[*_script(server, text), END] for text in shape.says], shape.steps, shape.merged, **more)


def _script(server: ApiServer, text: str) -> list[int]:
    thinks, ends, answer = text.rpartition("|")
    return [SYSTEM, *server.ids_of(thinks), PAD, *server.ids_of(answer)] if ends else server.ids_of(answer)


@dataclass(frozen=True)
class Journaled:
    """A stream in its parts: events in front of each record, and the records."""

    events: list[list[str]]
    records: list[str]

    @property
    def all_events(self) -> list[str]:
        return [event for part in self.events for event in part]


def read(text: str) -> Journaled:
    """A journaled stream. Fails if something stands behind the last record, or a record counts other events."""
    events: list[list[str]] = [[]]
    records: list[str] = []
    for block in text.split("\n\n")[:-1]:
        if block.startswith(": pdproxy "):
            records.append(block.removeprefix(": pdproxy "))
            assert json.loads(records[-1])[0] == len(events[-1])
            events.append([])
        else:
            events[-1].append(block)
    assert events.pop() == []
    return Journaled(events, records)


async def ask(
    client: httpx.AsyncClient, shape: Shape, records: Sequence[str] | None = None, name: str = "first"
) -> httpx.Response:
    body = {"model": "tiny", "stream": True, **shape.body}
    content = json.dumps(body)
    if records is not None:
        content = f'{content[:-1]}, "pdproxy_resume": {{"records": [{", ".join(records)}]}}}}'
    headers = {"content-type": "application/json", "X-Request-Id": name}
    return await client.post(STREAMS + shape.path, content=content, headers=headers)


async def streamed(
    server: ApiServer,
    shape: Shape,
    records: Sequence[str] | None = None,
    *,
    name: str = "first",
    core: FakeCore | None = None,
) -> Journaled:
    """The node's answer, on the core that says the shape where none is given."""
    async with server.on(core or core_for(server, shape)) as client:
        return read((await ask(client, shape, records, name)).text)


def nameless(events: Sequence[str], known: Sequence[str] = ()) -> list[str]:
    """Events without what is random or a time, but for what is known."""

    def hide(name: re.Match[str]) -> str:
        return name[0] if name[2] in known else f'"{name[1]}":0'

    kinds = "id|item_id|call_id|signature|created|created_at"
    return re.sub(rf'"({kinds})":("[^"]*"|\d+)', hide, "\n\n".join(events)).split("\n\n")


def names(records: Sequence[str]) -> list[str]:
    """The names that these records tell, as JSON has them."""
    notes = [note for record in records for note in json.loads(record)[2:]]
    return [json.dumps(name) for note in notes for kind, listed in note.items() if kind != "cached" for name in listed]
