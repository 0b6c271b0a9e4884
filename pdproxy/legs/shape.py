"""What kind of request a body is, and about how long its prompt. Pure."""

from collections.abc import Iterator

from pdproxy.request import NO_ADDITIONS, Addition, Endpoint, Json, LocalReason, NotContinuableReason, Shape
from pdproxy.unparsed import LargeValue

MEDIA = frozenset(
    {"image", "image_url", "image_embeds", "input_image", "audio_url", "input_audio", "audio_embeds", "video_url"}
)
OUTPUT_PENALTIES = ("presence_penalty", "frequency_penalty")
"""They count output tokens; a continuation's output begins anew. repetition_penalty counts the prompt's too."""
OUTPUT_RULES = {
    "bad_words": NotContinuableReason.BAD_WORDS,
    "thinking_token_budget": NotContinuableReason.REASONING,
    "repetition_detection": NotContinuableReason.REPETITION_DETECTION,
    "watermarking": NotContinuableReason.WATERMARKING,
    "structured_outputs": NotContinuableReason.STRUCTURED_OUTPUT,
    "prompt_logprobs": NotContinuableReason.PROMPT_LOGPROBS,
    "echo": NotContinuableReason.ECHO,
    "use_beam_search": NotContinuableReason.BEAM_SEARCH,
}
_RULING = frozenset({*OUTPUT_PENALTIES, *OUTPUT_RULES})
MOST_READERS = 1024
"""How many reads of one hand-over a prefill node's connector grants."""
CLIENT_TOOLS = "function"
"""The only kind of a response's tools that the client runs: others run on the node, in further generations."""
OUTPUT_LOGPROBS = "message.output_text.logprobs"
"""In a response's ``include``: log-probabilities of the output."""
BYTES_PER_TOKEN = 4
"""UTF-8 bytes that a token stands for, in prose; of code and rare scripts it stands for fewer."""
COMPLETIONS_DEFAULT_TOKENS = 16
"""What vLLM's completions endpoint allows where ``max_tokens`` is missing or null."""
_PROMPT_FIELDS = ("prompt", "messages", "input", "system", "instructions", "tools")
"""The fields that a prompt is rendered from."""
NO_TEXT = MEDIA | {"source", "file", "file_data"}
"""Fields that hold media: their length has nothing to do with their number of tokens."""


def shape(endpoint: Endpoint, body: Json) -> Shape:
    """The shape of a scrubbed body of one prompt."""
    choices, most = body.get("n"), _max_tokens(body)
    held = max(map(len, stops(body)), default=1) - 1 if "stop" in body else 0
    return Shape(
        choices=choices if isinstance(choices, int) else 1,
        stream=body.get("stream") is True,
        local=_local(endpoint, body, most),
        not_continuable=_not_continuable(endpoint, body),
        not_resumable=_not_resumable(endpoint, body),
        asked=_asked(body),
        held_back=0 if body.get("include_stop_str_in_output") is True else held,
        greedy=body.get("temperature") == 0 and not isinstance(body.get("temperature"), bool),
        longest=COMPLETIONS_DEFAULT_TOKENS if most is None and endpoint is Endpoint.COMPLETIONS else most,
    )


def max_prompt_tokens(endpoint: Endpoint, body: Json) -> int | None:
    """An upper bound in tokens; None where the prompt is rendered by a template or is not text.

    A text has at most one token for each of its UTF-8 bytes, and one that marks its beginning.
    """
    if endpoint is not Endpoint.COMPLETIONS:
        return None
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        return _utf8_length(prompt) + 1
    if isinstance(prompt, LargeValue):
        return prompt.ids or len(prompt.raw)
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
        return len(prompt)
    return None


def estimated_prompt_tokens(body: Json) -> int:
    """About how many tokens the prompt has: token ids are counted, text goes by its length, media count nothing."""
    own = body.get("kv_transfer_params")
    ids = own.get("prompt_token_ids") if isinstance(own, dict) else body.get("prompt")
    if isinstance(ids, LargeValue) and ids.ids:
        return ids.ids
    if isinstance(ids, list) and ids and isinstance(ids[0], int):
        return len(ids)
    return -(-sum([text_length(body[key]) for key in _PROMPT_FIELDS if key in body]) // BYTES_PER_TOKEN)


def text_length(value: object) -> int:
    """Of all texts within, but for media, in UTF-8."""
    if isinstance(value, str):
        return _utf8_length(value)
    return value.text_bytes if isinstance(value, LargeValue) else sum(map(_utf8_length, _texts(value)))


def _utf8_length(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


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
                left += [inner for key, inner in fields.items() if key not in NO_TEXT]


def stops(body: Json) -> tuple[str, ...]:
    """The stop strings of a completions or chat body."""
    stop = body.get("stop")
    listed = stop if isinstance(stop, list) else [stop]
    return tuple(text for text in listed if isinstance(text, str))


def _local(endpoint: Endpoint, body: Json, most: int | None) -> LocalReason | None:
    """Why prefill and decode cannot be two requests."""
    if body.get("prompt_logprobs") is not None:
        return LocalReason.PROMPT_LOGPROBS
    if body.get("echo") is True and _scores_prompt(endpoint, body):
        return LocalReason.ECHO_LOGPROBS
    if body.get("use_beam_search") is True:
        return LocalReason.BEAM_SEARCH
    if most == 0:
        return LocalReason.NO_TOKENS
    if isinstance(choices := body.get("n"), int) and choices > MOST_READERS:
        return LocalReason.CHOICES
    if endpoint is not Endpoint.COMPLETIONS and most is None and _open_truncation(body):
        return LocalReason.OPEN_TRUNCATION
    if endpoint is Endpoint.RESPONSES:
        return _local_response(body)
    return _local_prompt(body) if endpoint is Endpoint.COMPLETIONS else None


def _scores_prompt(endpoint: Endpoint, body: Json) -> bool:
    # vLLM takes an echoed request's logprobs (chat: top_logprobs, 0 where missing) for prompt_logprobs.
    return endpoint is Endpoint.CHAT or body.get("logprobs") is not None


def _open_truncation(body: Json) -> bool:
    # vLLM cuts a prompt to the context less one token where a limit is given, as the prefill leg's is, and to the
    # whole context where none is: two different prompts (renderers/params.py, max_truncation_tokens).
    return body.get("truncate_prompt_tokens") == -1 or body.get("truncation") == "auto"


def _local_response(body: Json) -> LocalReason | None:
    if _server_tools(body):
        return LocalReason.SERVER_TOOLS
    return LocalReason.STORED_PROMPT if body.get("prompt") is not None else None


def _server_tools(body: Json) -> bool:
    """Whether a response may use tools that run on the node."""
    tools = body.get("tools")
    return isinstance(tools, list) and any(isinstance(t, dict) and t.get("type") != CLIENT_TOOLS for t in tools)


def _local_prompt(body: Json) -> LocalReason | None:
    prompt = body.get("prompt")
    if prompt in (None, "", []):
        return LocalReason.NO_PROMPT
    # The prefill node leaves the last prompt token to the decode node: of one token nothing is left.
    one_id = isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], int)
    return LocalReason.ONE_TOKEN if one_id else None


def _not_continuable(endpoint: Endpoint, body: Json) -> NotContinuableReason | None:
    """Why a broken stream cannot be continued on another node by the ids of its tokens."""
    if endpoint in (Endpoint.MESSAGES, Endpoint.RESPONSES):
        return NotContinuableReason[endpoint.name]
    if body.get("n") not in (None, 1):
        return NotContinuableReason.CHOICES
    rule = None if _RULING.isdisjoint(body) else _output_rule(body)
    return rule or _format(body) or (_chat(body) if endpoint is Endpoint.CHAT else None)


def _output_rule(body: Json) -> NotContinuableReason | None:
    if any(body.get(key) for key in OUTPUT_PENALTIES):
        return NotContinuableReason.PENALTIES
    return next((reason for key, reason in OUTPUT_RULES.items() if _is_set(body.get(key))), None)


def _not_resumable(endpoint: Endpoint, body: Json) -> NotContinuableReason | None:
    """Why a broken stream cannot be resumed by its journal, which tells what was generated for the prompt, in order."""
    if body.get("use_beam_search") is True:
        return NotContinuableReason.BEAM_SEARCH
    if body.get("prompt_logprobs") is not None or (body.get("echo") is True and _scores_prompt(endpoint, body)):
        return NotContinuableReason.PROMPT_LOGPROBS
    return _not_resumable_response(body) if endpoint is Endpoint.RESPONSES else None


def _not_resumable_response(body: Json) -> NotContinuableReason | None:
    if _server_tools(body):
        return NotContinuableReason.SERVER_TOOLS
    included = body.get("include")
    shown = isinstance(included, list) and OUTPUT_LOGPROBS in included
    return NotContinuableReason.RESPONSE_LOGPROBS if shown else None


def _is_set(value: object) -> bool:
    """Whether a field asks for something; 0 does."""
    return value is not None and value is not False and value not in ([], {})


def _format(body: Json) -> NotContinuableReason | None:
    form = body.get("response_format")
    plain = form is None or (isinstance(form, dict) and form.get("type") == "text")
    return None if plain else NotContinuableReason.STRUCTURED_OUTPUT


def _chat(body: Json) -> NotContinuableReason | None:
    if body.get("tools") and body.get("tool_choice") != "none":
        return NotContinuableReason.TOOL_CALLS
    return NotContinuableReason.MEDIA if has_media(body) else None


def has_media(body: Json) -> bool:
    """Whether a chat's messages hold anything but text."""
    messages = body.get("messages")
    if isinstance(messages, LargeValue):
        return messages.media
    return isinstance(messages, list) and any(map(is_media_message, messages))


def is_media_message(message: object) -> bool:
    """Whether a message holds anything but text."""
    content = message.get("content") if isinstance(message, dict) else None
    return isinstance(content, list) and any(not _is_text(part) for part in content)


def _is_text(part: object) -> bool:
    return isinstance(part, str) or (isinstance(part, dict) and "text" in part and not MEDIA & part.keys())


def _asked(body: Json) -> frozenset[Addition]:
    options, asked = body.get("stream_options"), set[Addition]()
    if isinstance(options, dict) and options.get("include_usage"):
        asked.add(Addition.USAGE)
    if body.get("return_token_ids"):
        asked.add(Addition.TOKEN_IDS)
    return frozenset(asked) or NO_ADDITIONS


def _max_tokens(body: Json) -> int | None:
    for key in ("max_completion_tokens", "max_output_tokens", "max_tokens"):
        value = body.get(key)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None
