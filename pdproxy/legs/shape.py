"""What kind of request a body is."""

from pdproxy.legs.parse import is_many, prompts
from pdproxy.request import Addition, Endpoint, Json, Shape

MEDIA = frozenset(
    {"image", "image_url", "image_embeds", "input_image", "audio_url", "input_audio", "audio_embeds", "video_url"}
)
OUTPUT_PENALTIES = ("presence_penalty", "frequency_penalty")
"""They count output tokens; a continuation's output begins anew. repetition_penalty counts the prompt's too."""
OUTPUT_RULES = {
    "bad_words": "bad_words",
    "thinking_token_budget": "reasoning",
    "repetition_detection": "repetition_detection",
    "watermarking": "watermarking",
    "structured_outputs": "structured_output",
    "prompt_logprobs": "prompt_logprobs",
    "echo": "echo",
    "use_beam_search": "beam_search",
}
MOST_READERS = 1024
"""How many reads of one hand-over a prefill node's connector grants."""
CLIENT_TOOLS = "function"
"""The only kind of a response's tools that the client runs: others run on the node, in further generations."""


def shape(endpoint: Endpoint, body: Json) -> Shape:
    """What planning, driving and relaying need to know of a scrubbed body."""
    choices = body.get("n")
    held = max((len(text) for text in stops(body)), default=1) - 1
    return Shape(
        prompts=len(prompts(body)) if is_many(endpoint, body) else 1,
        choices=choices if isinstance(choices, int) else 1,
        stream=body.get("stream") is True,
        local_because=_local(endpoint, body),
        final_because=_final(endpoint, body),
        asked=_asked(body),
        held_back=0 if body.get("include_stop_str_in_output") is True else held,
        greedy=body.get("temperature") == 0 and not isinstance(body.get("temperature"), bool),
        max_tokens=_max_tokens(body),
    )


def stops(body: Json) -> tuple[str, ...]:
    """The stop strings of a completions or chat body."""
    stop = body.get("stop")
    listed = stop if isinstance(stop, list) else [stop]
    return tuple(text for text in listed if isinstance(text, str))


def _local(endpoint: Endpoint, body: Json) -> str | None:
    """Why prefill and decode cannot be two requests."""
    if body.get("prompt_logprobs") is not None:
        return "prompt_logprobs"
    if body.get("echo") is True and _scores_prompt(endpoint, body):
        return "echo_logprobs"
    if body.get("use_beam_search") is True:
        return "beam_search"
    if _max_tokens(body) == 0:
        return "no_tokens"
    if isinstance(choices := body.get("n"), int) and choices > MOST_READERS:
        return "choices"
    if endpoint is not Endpoint.COMPLETIONS and _open_truncation(body):
        return "open_truncation"
    if endpoint is Endpoint.RESPONSES:
        return _local_response(body)
    return _local_prompt(body) if endpoint is Endpoint.COMPLETIONS else None


def _scores_prompt(endpoint: Endpoint, body: Json) -> bool:
    # vLLM takes an echoed request's logprobs (chat: top_logprobs, 0 where missing) for prompt_logprobs.
    return endpoint is Endpoint.CHAT or body.get("logprobs") is not None


def _open_truncation(body: Json) -> bool:
    # vLLM cuts a prompt to the context less one token where a limit is given, as the prefill leg's is, and to the
    # whole context where none is: two different prompts (renderers/params.py, max_truncation_tokens).
    open_ended = body.get("truncate_prompt_tokens") == -1 or body.get("truncation") == "auto"
    return open_ended and _max_tokens(body) is None


def _local_response(body: Json) -> str | None:
    tools = body.get("tools")
    if isinstance(tools, list) and any(isinstance(t, dict) and t.get("type") != CLIENT_TOOLS for t in tools):
        return "server_tools"
    return "stored_prompt" if body.get("prompt") is not None else None


def _local_prompt(body: Json) -> str | None:
    prompt = body.get("prompt")
    if prompt in (None, "", []):
        return "no_prompt"
    # The prefill node leaves the last prompt token to the decode node: of one token nothing is left.
    return "one_token" if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], int) else None


def _final(endpoint: Endpoint, body: Json) -> str | None:
    """Why a broken stream cannot go on elsewhere."""
    if endpoint in (Endpoint.MESSAGES, Endpoint.RESPONSES):
        return endpoint.name.lower()
    if body.get("n") not in (None, 1):
        return "choices"
    if any(body.get(key) for key in OUTPUT_PENALTIES):
        return "penalties"
    rule = next((word for key, word in OUTPUT_RULES.items() if _is_set(body.get(key))), None)
    return rule or _final_format(body) or (_final_chat(body) if endpoint is Endpoint.CHAT else None)


def _is_set(value: object) -> bool:
    """Whether a field asks for something; 0 does."""
    return value is not None and value is not False and value not in ([], {})


def _final_format(body: Json) -> str | None:
    form = body.get("response_format")
    plain = form is None or (isinstance(form, dict) and form.get("type") == "text")
    return None if plain else "structured_output"


def _final_chat(body: Json) -> str | None:
    if body.get("tools") and body.get("tool_choice") != "none":
        return "tool_calls"
    messages = body.get("messages")
    return "media" if isinstance(messages, list) and any(_has_media(message) for message in messages) else None


def _has_media(message: object) -> bool:
    content = message.get("content") if isinstance(message, dict) else None
    return isinstance(content, list) and any(not _is_text(part) for part in content)


def _is_text(part: object) -> bool:
    return isinstance(part, str) or (isinstance(part, dict) and "text" in part and not MEDIA & part.keys())


def _asked(body: Json) -> frozenset[Addition]:
    options = body.get("stream_options")
    usage = isinstance(options, dict) and bool(options.get("include_usage"))
    wishes = {Addition.TOKEN_IDS: bool(body.get("return_token_ids")), Addition.USAGE: usage}
    return frozenset(addition for addition, asked in wishes.items() if asked)


def _max_tokens(body: Json) -> int | None:
    named = (body.get(key) for key in ("max_completion_tokens", "max_output_tokens", "max_tokens"))
    return next((value for value in named if isinstance(value, int) and not isinstance(value, bool)), None)
