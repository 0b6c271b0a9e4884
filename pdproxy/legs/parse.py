"""A request's bytes to bodies that may be planned: well-formed, without what a client may not send, one per prompt.

Of a request that goes to one node as it is only the model is read.
"""

import contextlib
import re
from collections.abc import Callable, Mapping
from typing import TypeGuard

import msgspec

from pdproxy.errors import ClientError
from pdproxy.request import Endpoint, Json, read_json
from pdproxy.unparsed import LargeValue

TOKEN_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens")
FORBIDDEN = frozenset({"kv_transfer_params", "ec_transfer_params", "kv_cache_report_mode"})
"""Where keys and values lie, which only a node may set; and vLLM's switch (among a request's extra arguments) that has
a node publish blocks that it hits as if they were new ones, so that proxies take it to hold more than it does."""
CARRIERS = ("vllm_xargs", "extra_args", "extra_body", "sampling_params")
"""Fields whose content reaches the engine's extra arguments (vLLM: ``SamplingParams.extra_args``)."""
EMBEDS = frozenset({"prompt_embeds"})
MAX_PROMPTS = 1024
"""As vLLM's VLLM_MAX_COMPLETION_PROMPTS: split prompts would pass the node's own check one by one."""

LARGE = 128 * 1024
"""Bytes above which a body is read in steps (`legs.large`); below, parsing it whole takes less than the steps would."""
MOST_VALUES = 2_000_000
"""Values that a JSON body may hold. Parsing blocks the event loop: for no time with long texts and images, for half a
second with so many values, for ten seconds with as many as fit into 64 MiB."""


def parse(endpoint: Endpoint, raw: bytes) -> dict[str, object]:
    """The JSON object in ``raw``, its fields that the proxy relies on checked. Of over `LARGE` bytes: `legs.large`.

    Raises:
        ClientError: 400, with the field at fault in ``param``; 413 for too many values.
    """
    check_values(raw)
    body = read_object(raw)
    check(endpoint, body)
    return body


def check(endpoint: Endpoint, body: dict[str, object]) -> None:
    """Check the fields that the proxy relies on; raises as `parse`."""
    model = body.get("model")
    if not isinstance(model, str) or not model:
        raise _bad("model", "`model` must be the name of a model; GET /v1/models lists them.")
    _check_kinds(body)
    _check_prompts(endpoint, body)
    if endpoint is Endpoint.RESPONSES:
        _check_stateless(body)


def scrub(body: dict[str, object]) -> dict[str, object]:
    """A copy without what only nodes may set, wherever it hides.

    Raises:
        ClientError: 400 for prompt embeddings: a ticket cannot be checked against them.
    """
    if any(body.get(key) is not None for key in EMBEDS):
        raise _bad("prompt_embeds", "`prompt_embeds` is not served here; send the prompt as text or token ids.")
    kept = {key: value for key, value in body.items() if key not in FORBIDDEN and not key.startswith("pdproxy_")}
    for carrier in CARRIERS:
        if carrier in kept:
            kept[carrier] = _without(kept[carrier])
    return kept


def _without(value: object) -> object:
    if isinstance(value, dict):
        return {key: _without(inner) for key, inner in value.items() if key not in FORBIDDEN | EMBEDS}
    return [_without(inner) for inner in value] if isinstance(value, list) else value


def check_values(raw: bytes) -> None:
    """Refuse a body with 413 whose parsing would block the event loop for too long."""
    if len(raw) > MOST_VALUES:
        check_commas(raw.count(b","))


def check_commas(commas: int) -> None:
    """As `check_values`, by the number of commas in a body."""
    if commas > MOST_VALUES:
        why = f"The body holds more than the {MOST_VALUES} values that are served in one request: send several."
        raise ClientError(413, why, code="request_too_large")


def read_object(raw: bytes) -> dict[str, object]:
    """The JSON object in ``raw``; a `ClientError` 400 where there is none."""
    try:
        body = read_json(raw, parse_constant=_no_constant)
    except (RecursionError, ValueError) as error:
        raise bad_json(error) from error
    if not isinstance(body, dict):
        raise _bad(None, 'The body must be a JSON object, such as {"model": …}.')
    return body


def bad_json(error: RecursionError | ValueError) -> ClientError:
    """For JSONDecodeError, UnicodeDecodeError, integers of thousands of digits, and what is nested too deeply."""
    deep = isinstance(error, RecursionError)
    return _bad(None, "The body is nested too deeply." if deep else f"The body is not valid JSON: {error}.")


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is no JSON number")


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


_KINDS: Mapping[str, tuple[Callable[[object], bool], str]] = {
    **dict.fromkeys(TOKEN_LIMITS, (lambda value: _is_int(value) and value >= 0, "a whole number, 0 or more")),
    "stream": (lambda value: isinstance(value, bool), "true or false"),
    "n": (lambda value: _is_int(value) and value >= 1, "a whole number, 1 or more"),
    "priority": (_is_int, "a whole number"),
    "stream_options": (lambda value: isinstance(value, dict), "an object"),
}
"""What fields must be that the proxy relies on, where they are not null."""


def _check_kinds(body: Json) -> None:
    for field, (fits, kind) in _KINDS.items():
        value = body.get(field)
        if value is not None and not fits(value):
            raise _bad(field, f"`{field}` must be {kind}.")


def _check_prompts(endpoint: Endpoint, body: dict[str, object]) -> None:
    prompt = body.get("prompt")
    if endpoint is not Endpoint.COMPLETIONS or not isinstance(prompt, list):
        return
    kinds = set(map(_kind, prompt))
    if len(kinds) > 1 or not kinds <= {int, str, list}:
        raise invalid_prompt()
    if kinds != {int} and len(prompt) > MAX_PROMPTS:
        raise _bad("prompt", f"`prompt` holds {len(prompt)} prompts; at most {MAX_PROMPTS} are served in one request.")


def _kind(item: object) -> type:
    if isinstance(item, LargeValue):
        return list if item.ids else str
    return type(item)


def invalid_prompt() -> ClientError:
    """The error for a prompt of no known kind."""
    return _bad("prompt", "`prompt` must be a string, a list of strings, token ids, or a list of lists of them.")


def _check_stateless(body: dict[str, object]) -> None:
    if body.get("previous_response_id") is not None:
        why = "Responses are not kept between requests: send the whole conversation in `input`."
        raise _bad("previous_response_id", f"`previous_response_id` is not served here. {why}")
    if body.get("background"):
        raise _bad("background", "`background` is not served here; use `stream` and keep the connection open.")


def _bad(param: str | None, message: str) -> ClientError:
    return ClientError(400, message, param=param, code="invalid_value")


def split(endpoint: Endpoint, body: Json) -> tuple[dict[str, object], ...]:
    """One body per prompt, in order; a single prompt gives one body.

    A list of ints is one prompt of token ids. An empty list is left as it is: the node answers it with its own error.
    """
    prompt = body.get("prompt")
    if endpoint is not Endpoint.COMPLETIONS or not isinstance(prompt, list) or not prompt or isinstance(prompt[0], int):
        return (dict(body),)
    return tuple({**body, "prompt": each} for each in prompt)


_IN_FORM = re.compile(rb'name="?model"?\r\n(?:[^\r\n]+\r\n)*\r\n([^\r\n]*)\r\n--')
"""The ``model`` field of a multipart form, such as audio comes in."""


class _Named(msgspec.Struct):
    """What is read of a body that goes to one node: nothing else of it is made an object."""

    model: object = None


_MODEL = msgspec.json.Decoder(_Named).decode


def model_of(raw: bytes) -> str:
    """The ``model`` of a JSON body or a form; "" where there is none.

    Raises:
        ClientError: 413 for a body of too many values.
    """
    check_values(raw)
    if not raw.startswith(b"--"):
        with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            model = _MODEL(raw).model
            return model if isinstance(model, str) else ""
        with contextlib.suppress(ValueError, RecursionError):
            body = read_json(raw)
            model = body.get("model") if isinstance(body, dict) else None
            return model if isinstance(model, str) else ""
    field = _IN_FORM.search(raw)
    return field.group(1).decode("utf-8", "replace") if field else ""
