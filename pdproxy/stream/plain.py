"""The most common event of a stream, read without a JSON parser.

One choice that says text and token ids and nothing else, written as vLLM 0.32 writes it. What looks different in any
way is not plain, and takes the long way.
"""

import json
import re
from typing import NamedTuple

_HEAD = rb'\{"id":"[^"\\]*+","object":"[^"\\]*+","created":\d++,"model":"[^"\\]*+","choices":\[\{"index":(\d++),'
_SAID = rb'"([^"\\\x00-\x1f]*+(?:\\.[^"\\\x00-\x1f]*+)*+)"'
_TEXT = rb'(?:"delta":\{"content":' + _SAID + rb'\}|"text":' + _SAID + rb"),"
_TAIL = rb'"logprobs":null,"finish_reason":null,(?:"stop_reason":null,)?+(?:"prompt_token_ids":null,)?+'
_IDS = rb'"token_ids":(\[[\d,]*+\])\}\]\}'
_PLAIN = re.compile(_HEAD + _TEXT + _TAIL + _IDS)


class Plain(NamedTuple):
    """What a plain event says, and where in its data the token ids lie."""

    choice: int
    text: str
    token_ids: list[int]
    ids_from: int
    ids_to: int


def plain(data: bytes) -> Plain | None:
    """The event's meaning; None where it must be parsed."""
    match = _PLAIN.fullmatch(data)
    if match is None:
        return None
    index, content, text, ids = match.groups()
    try:
        said = _decoded(content if text is None else text)
    except ValueError:
        return None
    listed = [int(number) for number in ids[1:-1].split(b",")] if len(ids) > 2 else []
    return Plain(int(index), said, listed, match.start(4), match.end(4))


def _decoded(said: bytes) -> str:
    text: str = json.loads(b'"' + said + b'"') if b"\\" in said else said.decode()
    return text
