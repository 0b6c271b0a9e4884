"""The text that a prompt is rendered from, in parts that later prompts of the same conversation begin with. Pure.

It is not what a node's template makes of it: two prompts whose parts begin alike are rendered alike as far as that,
which is all that `planning.text_index` needs.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from pdproxy.raw_json import LIST, ends, first_byte, value_of
from pdproxy.request import Endpoint, Json

MOST_BYTES = 512 * 1024
"""The most bytes of a prompt's text that are looked at."""
MOST_PARTS = 1024
"""The most parts of a prompt that are looked at. Each is a mark in an index of all prompts."""
MOST_IDS = 256 * 1024
"""The most token ids of a prompt that are looked at."""
_WHOLE = 4096
"""Characters of a text outside of a message's own: of longer ones, such as images, the length and both ends count."""
_END = 64
_RENDERING = frozenset({
    "cache_salt", "chat_template", "chat_template_kwargs", "documents", "mm_processor_kwargs", "add_generation_prompt",
    "continue_final_message", "add_special_tokens", "reasoning", "reasoning_effort", "truncate_prompt_tokens", "suffix",
    "prompt_embeds",
})  # fmt: skip
"""Fields that change what nodes make of the same messages, or keep their caches apart."""


def prompt_salt(endpoint: Endpoint, model: str, body: Json) -> str:
    """The facts that two prompts must have in common before their texts are compared."""
    if _RENDERING.isdisjoint(body):
        return f"{endpoint}\0{model}"
    told = _RENDERING.intersection(body)
    fields = (f"{key}={text}" for key in sorted(told) for text in _flat(value_of(body[key])))
    return "\0".join((endpoint, model, *fields))


def prompt_ids(body: Json) -> Sequence[int]:
    """The token ids that a client sent as its prompt; none where it sent text, or more than are decoded at once."""
    prompt = body.get("prompt")
    if prompt is None or (isinstance(prompt, msgspec.Raw) and first_byte(prompt) != LIST):
        return ()
    ids = value_of(prompt)
    return ids if isinstance(ids, list) and ids and isinstance(ids[0], int) else ()


def prompt_parts(body: Json) -> list[bytes]:
    """Tools, system prompt and messages, in the order in which templates render them; a completion's prompt is one.

    Of a body whose fields are small enough to be decoded at once (`legs.outline` has the parts of others).

    There are at most `MOST_PARTS`, together at most `MOST_BYTES` long.
    """
    prompt = value_of(body.get("prompt"))
    if isinstance(prompt, str):
        return [_bytes(prompt)[:MOST_BYTES]]
    parts: list[bytes] = []
    left = MOST_BYTES
    for part in itertools.islice(_parts(body), MOST_PARTS):
        parts.append(part[:left])
        left -= len(part)
        if left <= 0:
            break
    return parts


def _parts(body: Json) -> Iterator[bytes]:
    for key in filter(body.__contains__, ("tools", "system", "instructions")):
        if value := value_of(body[key]):
            yield field_part(key, value)
    for key in filter(body.__contains__, ("messages", "input")):
        value = value_of(body[key])
        yield from map(message_part, value if isinstance(value, list) else [value] if value else ())


def field_part(key: str, value: object) -> bytes:
    """The part for a field that stands before the messages."""
    return _bytes("\0".join((key, *_content_texts(value))))


def message_part(message: object) -> bytes:
    """The part for one message."""
    return _bytes(_plain(message) or "\0".join(_message_texts(message)))


def _plain(message: object) -> str | None:
    """The result of `_message_texts` for a role and a text, as most messages are: in a fifth of the time."""
    if not isinstance(message, dict) or len(message) != 2:
        return None
    role, content = message.get("role"), message.get("content")
    return f"{role}\0{content}" if isinstance(content, str) and role is not None else None


def _message_texts(message: object) -> Iterator[str]:
    """Texts of a message are taken whole, whatever else it has by its ends."""
    if not isinstance(message, Mapping) or not isinstance(content := message.get("content"), str | list):
        yield from _content_texts(message)
        return
    yield str(message.get("role"))
    yield from _content_texts(content)
    yield from _flat({key: value for key, value in message.items() if key not in ("role", "content")})


def _content_texts(content: object) -> Iterator[str]:
    """Texts of a content: a text, or parts of which some have a text."""
    for part in content if isinstance(content, list) else [content]:
        text = part.get("text") if isinstance(part, Mapping) else part
        yield from [text] if isinstance(text, str) else _flat(part)


def _flat(value: object) -> Iterator[str]:
    """All keys and values within, in order. No recursion: clients choose the depth."""
    left = [value]
    while left:
        match left.pop():
            case str(text):
                yield text if len(text) <= _WHOLE else abridged(text, text, len(text))
            case list(items):
                left += reversed(items)
            case Mapping() as fields:
                left += reversed(list(itertools.chain.from_iterable(fields.items())))
            case msgspec.Raw() as raw:
                yield abridged(*ends(raw), len(raw))
            case other:
                yield str(other)


def abridged(begin: str, end: str, length: int) -> str:
    """The stand-in for a long text, such as an image: its length and both ends."""
    return f"{length}{begin[:_END]}{end[-_END:]}"


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
