"""How many tokens a prompt has: at most, where that can be told without a tokenizer, and about. Pure."""

from collections.abc import Iterator

from pdproxy.legs.body_shape import MEDIA
from pdproxy.request import Endpoint, Json

BYTES_PER_TOKEN = 4
"""UTF-8 bytes that a token stands for, in prose; of code and rare scripts it stands for fewer."""
_PROMPT = ("prompt", "messages", "input", "system", "instructions", "tools")
"""The fields that a prompt is rendered from."""
_NO_TEXT = MEDIA | {"source", "file", "file_data"}
"""What holds media: their bytes say nothing about tokens."""


def most_tokens(endpoint: Endpoint, body: Json) -> int | None:
    """An upper bound in tokens; None where the prompt is rendered by a template or is not text.

    A text has at most one token for each of its UTF-8 bytes, and one that marks its beginning.
    """
    if endpoint is not Endpoint.COMPLETIONS:
        return None
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        return len(prompt.encode("utf-8", "surrogatepass")) + 1
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
        return len(prompt)
    return None


def estimated_tokens(body: Json) -> int:
    """About how many tokens the prompt has: token ids are counted, text goes by its length, media count nothing."""
    own = body.get("kv_transfer_params")
    ids = own.get("prompt_token_ids") if isinstance(own, dict) else body.get("prompt")
    if isinstance(ids, list) and ids and isinstance(ids[0], int):
        return len(ids)
    length = sum(len(text.encode("utf-8", "surrogatepass")) for text in _texts([body.get(key) for key in _PROMPT]))
    return -(-length // BYTES_PER_TOKEN)


def _texts(value: object) -> Iterator[str]:
    """All strings within, but for media. No recursion: clients choose the depth."""
    left = [value]
    while left:
        match left.pop():
            case str(text):
                yield text
            case list(items):
                left += items
            case dict(fields):
                left += [inner for key, inner in fields.items() if key not in _NO_TEXT]
