"""One prompt of a client's request: its body, its length, and why it cannot be disaggregated or continued."""

import dataclasses
import enum
from collections.abc import Iterator

from pdproxy.legs.shape import MEDIA
from pdproxy.request import ClientRequest, Endpoint, Headers, Json, Shape


@dataclasses.dataclass(frozen=True, slots=True)
class SubRequest:
    """What has to be answered.

    Attributes:
        request: the client's.
        body: of one prompt.
        shape: of ``body``.
        name: the request id; with the prompt's number where there are several.
    """

    request: ClientRequest
    body: Json
    shape: Shape
    name: str

    @property
    def endpoint(self) -> Endpoint:
        """Which API."""
        return self.request.endpoint

    @property
    def headers(self) -> Headers:
        """What both legs send on: the client's headers, and the request id by which node logs can be matched."""
        kept = tuple((name, value) for name, value in self.request.headers if name != "x-request-id")
        return (*kept, ("x-request-id", self.name))


BYTES_PER_TOKEN = 4
"""UTF-8 bytes that a token stands for, in prose; of code and rare scripts it stands for fewer."""
_PROMPT = ("prompt", "messages", "input", "system", "instructions", "tools")
"""The fields that a prompt is rendered from."""
_NO_TEXT = MEDIA | {"source", "file", "file_data"}
"""What holds media: their bytes say nothing about tokens."""


def max_prompt_tokens(endpoint: Endpoint, body: Json) -> int | None:
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


def estimated_prompt_tokens(body: Json) -> int:
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


class RouteReason(enum.StrEnum):
    """Reasons, from the body's shape, the plan, the stream and us."""

    NONE = "none"
    OTHER = "other"
    SHORT_PROMPT = "short_prompt"
    NO_PREFILL = "no_prefill"
    NO_PAIR = "no_pair"
    BARRED_PAIR = "barred_pair"
    PREFILL_FAILED = "prefill_failed"
    PROMPT_LOGPROBS = "prompt_logprobs"
    ECHO_LOGPROBS = "echo_logprobs"
    BEAM_SEARCH = "beam_search"
    NO_TOKENS = "no_tokens"
    SERVER_TOOLS = "server_tools"
    STORED_PROMPT = "stored_prompt"
    NO_PROMPT = "no_prompt"
    ONE_TOKEN = "one_token"
    MESSAGES = "messages"
    RESPONSES = "responses"
    CHOICES = "choices"
    PENALTIES = "penalties"
    BAD_WORDS = "bad_words"
    REASONING = "reasoning"
    REPETITION_DETECTION = "repetition_detection"
    WATERMARKING = "watermarking"
    STRUCTURED_OUTPUT = "structured_output"
    ECHO = "echo"
    TOOL_CALLS = "tool_calls"
    MEDIA = "media"
    STOP_STRINGS = "stop_strings"
    TOKEN_DETAILS = "token_details"
    NO_TOKEN_IDS = "no_token_ids"
    DIVERGED = "diverged"

    @classmethod
    def of(cls, word: str | None) -> "RouteReason":
        """The member for a word; OTHER for one that is not known here."""
        if word is None:
            return cls.NONE
        return cls._value2member_map_.get(word, cls.OTHER)  # type: ignore[return-value]
