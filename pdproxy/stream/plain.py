"""The most common event of a stream, read without a JSON parser.

One choice that says text and token ids and nothing else, written as vLLM 0.32 writes it. What looks different in any
way is not plain, and takes the long way.
"""

import json
import re
from typing import NamedTuple

_WORD = rb'"[^"\\\x00-\x1f]*+"'
_HEAD = (
    rb'data: \{"id":' + _WORD + rb',"object":' + _WORD + rb',"created":\d++,"model":' + _WORD
    + rb',"choices":\[\{"index":(\d++),'
)  # fmt: skip
_SAID = rb'"([^"\\\x00-\x1f]*+(?:\\.[^"\\\x00-\x1f]*+)*+)"'
_TEXT = rb'(?:"delta":\{"content":' + _SAID + rb'\}|"text":' + _SAID + rb"),"
_TAIL = rb'"logprobs":null,"finish_reason":null,(?:"stop_reason":null,)?+(?:"prompt_token_ids":null,)?+'
_IDS = rb'"token_ids":\[(\d++(?:,\d++)*+|)\]\}\]\}\n\n'
_PLAIN = re.compile(_HEAD + _TEXT + _TAIL + _IDS)


class Plain(NamedTuple):
    """What a plain event says, and where in its bytes the token ids lie."""

    choice: int
    text: str
    token_ids: list[int]
    ids_from: int
    ids_to: int


def plain(raw: bytes) -> Plain | None:
    """The meaning of one whole event; None where it must be parsed, or is not one event, or more."""
    match = _PLAIN.fullmatch(raw)
    if match is None:
        return None
    index, content, text, ids = match.groups()
    said = content if text is None else text
    try:
        words: str = json.loads(b'"' + said + b'"') if b"\\" in said else said.decode()
        listed = list(map(int, ids.split(b","))) if b"," in ids else [int(ids)] if ids else []
    except ValueError:
        return None
    return Plain(int(index), words, listed, match.start(4) - 1, match.end(4) + 1)
