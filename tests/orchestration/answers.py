"""Reads what a client got, strictly: a stream must be well framed and end properly."""

import dataclasses
import json
from typing import Any

from pdproxy.request import Endpoint


@dataclasses.dataclass(frozen=True, slots=True)
class ReadAnswer:
    """A streamed answer, understood.

    Attributes:
        texts: by choice index.
        finishes: by choice index.
        usage: of the final usage event.
        ids: distinct ``id`` fields.
        roles: how many role events came.
        error: the error event's object.
        ended: the stream's own end came, as the last thing.
    """

    texts: dict[int, str]
    finishes: dict[int, str]
    usage: dict[str, Any] | None
    ids: set[str]
    created: set[int]
    roles: int
    error: dict[str, Any] | None
    ended: bool
    chunks: list[dict[str, Any]]


def read_answer(endpoint: Endpoint, body: bytes) -> ReadAnswer:
    """Understand a stream of completions, chat, messages or responses."""
    blocks = body.decode().split("\n\n")
    assert blocks.pop() == "", "the stream ends in the middle of an event"
    texts: dict[int, str] = {}
    finishes: dict[int, str] = {}
    found: dict[str, Any] = {"usage": None, "error": None, "ended": False}
    ids, created, roles, chunks = set(), set(), 0, []
    for block in blocks:
        assert not found["ended"], "something came after the end"
        name, data = _fields(block)
        if data == "[DONE]" or name in ("message_stop", "response.completed"):
            found["ended"] = True
            continue
        chunk = json.loads(data)
        chunks.append(chunk)
        if "error" in chunk or name == "error":
            found["error"] = chunk.get("error", chunk)
            found["ended"] = name == "error"
            continue
        if endpoint in (Endpoint.MESSAGES, Endpoint.RESPONSES):
            delta = chunk.get("delta")
            texts[0] = texts.get(0, "") + (delta.get("text", "") if isinstance(delta, dict) else delta or "")
            continue
        assert "kv_transfer_params" not in chunk or chunk["kv_transfer_params"] is None
        ids.add(chunk["id"])
        created.add(chunk["created"])
        if not chunk["choices"]:
            found["usage"] = chunk["usage"]
        for choice in chunk["choices"]:
            index, said = choice["index"], choice.get("delta", choice)
            roles += "role" in said
            texts[index] = texts.get(index, "") + (said.get("content", said.get("text")) or "")
            if choice["finish_reason"]:
                assert index not in finishes, "a choice finished twice"
                finishes[index] = choice["finish_reason"]
    return ReadAnswer(texts, finishes, found["usage"], ids, created, roles, found["error"], found["ended"], chunks)


def _fields(block: str) -> tuple[str, str]:
    fields = dict(line.split(": ", 1) for line in block.split("\n"))
    return fields.get("event", ""), fields["data"]


def text_of(endpoint: Endpoint, answer: dict[str, Any]) -> str:
    """The first text of a whole answer."""
    match endpoint:
        case Endpoint.COMPLETIONS:
            return str(answer["choices"][0]["text"])
        case Endpoint.CHAT:
            return str(answer["choices"][0]["message"]["content"])
        case Endpoint.MESSAGES:
            return str(answer["content"][0]["text"])
        case _:
            return str(answer["output"][0]["content"][0]["text"])
