"""The shape of a request: what kind of answer a body asks for, and about how long its prompt is. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import msgspec

from pdproxy.legs.lax_fields import read_fields
from pdproxy.legs.outline import PromptFacts, facts_of
from pdproxy.raw_json import LIST, MOST_ITEMS, OBJECT, first_byte, first_items, value_of
from pdproxy.reasons import LocalReason, NotContinuableReason
from pdproxy.request import Endpoint, Json, Shape

MOST_READERS = 1024
"""How many reads of one hand-over a prefill node's connector grants."""
CLIENT_TOOLS = "function"
"""The only kind of a response's tools that the client runs: others run on the node, in further generations."""
OUTPUT_LOGPROBS = "message.output_text.logprobs"
"""In a response's ``include``: log-probabilities of the output."""
COMPLETIONS_DEFAULT_TOKENS = 16
"""The tokens that vLLM's completions endpoint allows where ``max_tokens`` is missing or null."""
MOST_CHOICES = 2**31 - 1
"""Answers to reckon with: nodes refuse more than 16,384 (vLLM's ``VLLM_MAX_N_SEQUENCES``), and tokens times more
than these may be no float."""
_LOOKED_AT = frozenset(
    {
        "logprobs", "truncation", "include",
    }
)  # fmt: skip
"""Beside those that `lax_fields` reads."""
_BRIEF = 64
"""Bytes of a prompt's JSON beyond which it is neither empty nor of one token."""


class _Typed(msgspec.Struct):
    """A tool, as far as it is looked at."""

    type: msgspec.Raw = msgspec.Raw(b"null")


_Asked: TypeAlias = Mapping[str, Any]
"""The fields of a body that are looked at, by name; raw where they are long."""
_TYPED = msgspec.json.Decoder(_Typed).decode


def shape(
    endpoint: Endpoint, body: Json, facts: PromptFacts | None = None, fields: Mapping[str, Any] | None = None
) -> Shape:
    """The shape of a scrubbed body of one prompt.

    ``facts`` are those of its prompt, ``fields`` what `read_fields` made of it, where they are known. Raises as that.
    """
    facts = facts_of(body) if facts is None else facts
    asked = dict(read_fields(endpoint, body) if fields is None else fields)
    if not _LOOKED_AT.isdisjoint(body):
        asked |= {name: value_of(body[name]) for name in _LOOKED_AT.intersection(body)}
    asked["prompt"], asked["tools"] = body.get("prompt"), body.get("tools")  # looked into, not decoded
    most = _max_tokens(asked)
    return Shape(
        choices=min(asked.get("n") or 1, MOST_CHOICES),
        stream=bool(asked.get("stream")),
        local=_local(endpoint, asked, most),
        not_resumable=_not_resumable(endpoint, asked),
        wants_usage=_wants_usage(asked),
        longest=COMPLETIONS_DEFAULT_TOKENS if most is None and endpoint is Endpoint.COMPLETIONS else most,
        prompt_tokens=facts.tokens,
        media=facts.media,
    )


def _local(endpoint: Endpoint, body: _Asked, most: int | None) -> LocalReason | None:
    """Why prefill and decode cannot be two requests."""
    if body.get("prompt_logprobs") is not None:
        return LocalReason.PROMPT_LOGPROBS
    if body.get("echo") and _scores_prompt(endpoint, body):
        return LocalReason.ECHO_LOGPROBS
    if body.get("use_beam_search"):
        return LocalReason.BEAM_SEARCH
    if most == 0:
        return LocalReason.NO_TOKENS
    if (body.get("n") or 1) > MOST_READERS:
        return LocalReason.CHOICES
    if most is None and _open_truncation(endpoint, body):
        return LocalReason.OPEN_TRUNCATION
    if endpoint is Endpoint.RESPONSES:
        return _local_response(body)
    return _local_prompt(body) if endpoint is Endpoint.COMPLETIONS else None


def _scores_prompt(endpoint: Endpoint, body: _Asked) -> bool:
    # vLLM takes an echoed request's logprobs (chat: top_logprobs, 0 where missing) for prompt_logprobs.
    return endpoint is Endpoint.CHAT or body.get("logprobs") is not None


def _open_truncation(endpoint: Endpoint, body: _Asked) -> bool:
    # vLLM cuts a prompt to the context less one token where a limit is given, as the prefill leg's is, and to the
    # whole context where none is: two different prompts (renderers/params.py, max_truncation_tokens).
    if endpoint is Endpoint.RESPONSES:
        return bool(body.get("truncation", "disabled") != "disabled")  # null is "auto", too
    return endpoint is Endpoint.CHAT and body.get("truncate_prompt_tokens") == -1


def _local_response(body: _Asked) -> LocalReason | None:
    if _server_tools(body):
        return LocalReason.SERVER_TOOLS
    return LocalReason.STORED_PROMPT if _brief(body.get("prompt")) is not None else None


def _server_tools(body: _Asked) -> bool:
    """Whether a response may use tools that run on the node."""
    tools = body.get("tools")
    if isinstance(tools, msgspec.Raw):
        tools = first_items(tools) if first_byte(tools) == LIST else None
    return isinstance(tools, Sequence) and (len(tools) >= MOST_ITEMS or not all(map(_runs_at_client, tools)))


def _runs_at_client(tool: object) -> bool:
    if not isinstance(tool, msgspec.Raw):
        return not isinstance(tool, dict) or tool.get("type") == CLIENT_TOOLS
    return first_byte(tool) != OBJECT or value_of(_TYPED(tool).type) == CLIENT_TOOLS


def _brief(prompt: object) -> object:
    """The prompt where it is short, to see whether it is there at all."""
    return value_of(prompt) if isinstance(prompt, msgspec.Raw) and len(prompt) <= _BRIEF else prompt


def _local_prompt(body: _Asked) -> LocalReason | None:
    prompt = _brief(body.get("prompt"))
    if prompt in (None, "", []):
        return LocalReason.NO_PROMPT
    # The prefill node leaves the last prompt token to the decode node: of one token nothing is left.
    one_id = isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], int)
    return LocalReason.ONE_TOKEN if one_id else None


def _not_resumable(endpoint: Endpoint, body: _Asked) -> NotContinuableReason | None:
    """Why a broken stream cannot be resumed by its journal, which tells what was generated for the prompt, in order."""
    if body.get("use_beam_search"):
        return NotContinuableReason.BEAM_SEARCH
    if body.get("prompt_logprobs") is not None or (body.get("echo") and _scores_prompt(endpoint, body)):
        return NotContinuableReason.PROMPT_LOGPROBS
    return _not_resumable_response(body) if endpoint is Endpoint.RESPONSES else None


def _not_resumable_response(body: _Asked) -> NotContinuableReason | None:
    if _server_tools(body):
        return NotContinuableReason.SERVER_TOOLS
    included = body.get("include")
    shown = isinstance(included, list) and OUTPUT_LOGPROBS in included
    return NotContinuableReason.RESPONSE_LOGPROBS if shown else None


def _wants_usage(body: _Asked) -> bool:
    options = body.get("stream_options")
    return options is not None and bool(options.include_usage)


def _max_tokens(body: _Asked) -> int | None:
    for key in ("max_completion_tokens", "max_output_tokens", "max_tokens"):
        most: int | None = body.get(key)
        if most is not None:
            return most
    return None
