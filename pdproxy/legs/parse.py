"""A request's bytes to bodies that may be planned: well-formed, without what a client may not send, one per prompt.

A body is a mapping of names to raw JSON (`raw_json`): it makes no objects, whatever a client sends, and goes to nodes
as it came but for the names that are taken out or replaced. Of a request that goes to one node as it is only the model
is read. A body with a field that the proxy needs and cannot read (`UnreadableField`) goes to one node as it is, too,
which refuses it in its own words.
"""

import contextlib
from collections.abc import Mapping
from typing import Any

import msgspec

from pdproxy.errors import ClientError
from pdproxy.legs.lax_fields import UnreadableField, read_fields
from pdproxy.raw_json import (
    LIST,
    MOST_FIELDS,
    TEXT,
    Steps,
    TooManyFieldsError,
    at_once,
    check_utf8,
    count_ids,
    fields_of,
    first_byte,
    first_items,
    kind_of_items,
    small_fields_of,
    value_of,
)
from pdproxy.request import Endpoint, Json, write_json

FORBIDDEN = frozenset({"kv_transfer_params", "ec_transfer_params", "kv_cache_report_mode"})
"""Where keys and values lie, which only a node may set; and vLLM's switch (among a request's extra arguments) that has
a node publish blocks that it hits as if they were new ones, so that proxies take it to hold more than it does."""
CARRIERS = frozenset({"vllm_xargs", "extra_args", "extra_body", "sampling_params"})
"""Fields whose content reaches the engine's extra arguments (vLLM: ``SamplingParams.extra_args``)."""
EMBEDS = frozenset({"prompt_embeds"})
_SUSPECT = FORBIDDEN | CARRIERS | EMBEDS
_HIDDEN = tuple(name.encode() for name in FORBIDDEN | EMBEDS)
MAX_PROMPTS = 1024
"""As vLLM's VLLM_MAX_COMPLETION_PROMPTS: split prompts would pass the node's own check one by one."""
LONGEST_MODEL = 512
"""Characters of a model's name. A longer one names no model, and would be kept with whatever failed for its sake."""
LONGEST_CARRIER = 1024 * 1024
"""Bytes of a field among `CARRIERS` that are parsed, to take out what hides there."""
_MAY_BE_SEVERAL = (list, msgspec.Raw)
LARGE = 128 * 1024
"""Bytes above which a body is read in steps; below, all of it takes less than a millisecond."""


def parse(raw: bytes) -> dict[str, msgspec.Raw]:
    """The names and the raw values of the JSON object in ``raw``; none of them is checked.

    For up to `LARGE` bytes; more are read by `reading`.

    Raises:
        ClientError: 400 for no JSON object.
    """
    try:
        if not raw.isascii():
            at_once(check_utf8(raw))
        return small_fields_of(raw)
    except _UNREADABLE as error:
        raise _no_object(error) from error


def reading(raw: bytes) -> Steps[dict[str, msgspec.Raw]]:
    """As `parse`, in steps."""
    try:
        yield from check_utf8(raw)
        yield
        return (yield from fields_of(raw))
    except _UNREADABLE as error:
        raise _no_object(error) from error


_UNREADABLE = (TooManyFieldsError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def _no_object(error: Exception) -> ClientError:
    match error:
        case TooManyFieldsError():
            why = f"The body has more than {MOST_FIELDS} fields, or too long ones of names that are not known."
        case msgspec.ValidationError():
            why = 'The body must be a JSON object, such as {"model": …}.'
        case RecursionError():
            why = "The body is nested too deeply."
        case _:
            why = f"The body is not valid JSON: {error}."
    return _bad(None, why)


def model_in(endpoint: Endpoint, body: Json) -> str:
    """The ``model`` of a body; "" where it names none, which is the model that a node serves (as in vLLM).

    Raises:
        ClientError: 404 for a name that is too long to be one.
        UnreadableField: it is no text, or an endpoint that requires one has none.
    """
    name = model_name(body.get("model"))
    if not name and (endpoint is Endpoint.MESSAGES or value_of(body.get("model")) not in (None, "")):
        raise UnreadableField("model")
    return name


def model_name(value: object) -> str:
    """The text; "" for anything else, and the `ClientError` 404 for one that is too long."""
    name = value_of(value)
    long_text = isinstance(name, msgspec.Raw) and first_byte(name) == TEXT
    if long_text or (isinstance(name, str) and len(name) > LONGEST_MODEL):
        raise unknown_model(f"The model does not exist: no name has more than {LONGEST_MODEL} characters.")
    return name if isinstance(name, str) else ""


def unknown_model(message: str) -> ClientError:
    """404, as vLLM writes it."""
    return ClientError(404, message, kind="NotFoundError", code=404, param="model")


def scrub(body: Json) -> dict[str, object]:
    """A copy without what only nodes may set, wherever it hides.

    Raises:
        ClientError: 400 for prompt embeddings: a ticket cannot be checked against them. An empty list has none.
    """
    if _SUSPECT.isdisjoint(body) and "pdproxy_" not in " ".join(body):  # as of most bodies
        return dict(body)
    if "prompt_embeds" in body and value_of(body["prompt_embeds"]) not in (None, []):
        raise _bad("prompt_embeds", "`prompt_embeds` is not served here; send the prompt as text or token ids.")
    kept = {key: value for key, value in body.items() if key not in FORBIDDEN and not key.startswith("pdproxy_")}
    for carrier in CARRIERS.intersection(kept):
        kept[carrier] = _scrubbed(carrier, kept[carrier])
    return kept


def _scrubbed(name: str, value: object) -> object:
    """Unchanged where no name that only nodes may set can be in it; escapes may spell one."""
    raw = value if isinstance(value, msgspec.Raw) else write_json(value)
    text = bytes(raw)
    if b"\\u" not in text and not any(hidden in text for hidden in _HIDDEN):
        return value
    if len(text) > LONGEST_CARRIER:
        raise _bad(name, f"`{name}` is longer than {LONGEST_CARRIER} bytes: send less.")
    try:
        return _without(msgspec.json.decode(text))
    except (msgspec.MsgspecError, RecursionError) as error:
        raise _bad(name, f"`{name}` cannot be read: {error}.") from error


def _without(value: object) -> object:
    if isinstance(value, dict):
        return {key: _without(inner) for key, inner in value.items() if key not in FORBIDDEN | EMBEDS}
    return [_without(inner) for inner in value] if isinstance(value, list) else value


def checked_fields(endpoint: Endpoint, body: Json) -> Steps[Mapping[str, Any]]:
    """The fields that the proxy looks at, by name: see `lax_fields`.

    Raises:
        ClientError: 400 for what is not served here, and for a list of prompts that is none.
        UnreadableField: one of them cannot be read.
    """
    fields = read_fields(endpoint, body)
    if endpoint is Endpoint.RESPONSES:
        _check_stateless(body, fields)
    elif endpoint is Endpoint.COMPLETIONS:
        yield from _check_prompts(body.get("prompt"))
    return fields


def _check_prompts(prompt: object) -> Steps[None]:
    """Check a list: it must be of token ids, or of prompts. Nodes write an error for each value that is of neither."""
    if not isinstance(prompt, msgspec.Raw) or first_byte(prompt) != LIST:
        return
    kind = kind_of_items(prompt)
    if kind == b"]":
        return
    if kind in (b'"', b"["):
        prompts = first_items(prompt)
        if any(first_byte(each) != kind[0] for each in prompts):
            raise _invalid_prompt()
        if len(prompts) > MAX_PROMPTS:
            raise _bad("prompt", f"`prompt` holds more than the {MAX_PROMPTS} prompts that are served in one request.")
    elif not (yield from count_ids(prompt)):
        raise _invalid_prompt()


def _invalid_prompt() -> ClientError:
    return _bad("prompt", "`prompt` must be a string, a list of strings, token ids, or a list of lists of them.")


def _check_stateless(body: Json, fields: Json) -> None:
    if value_of(body.get("previous_response_id")) is not None:
        why = "Responses are not kept between requests: send the whole conversation in `input`."
        raise _bad("previous_response_id", f"`previous_response_id` is not served here. {why}")
    if fields.get("background"):
        raise _bad("background", "`background` is not served here; use `stream` and keep the connection open.")


def _bad(param: str | None, message: str) -> ClientError:
    return ClientError(400, message, param=param, code="invalid_value")


def split(endpoint: Endpoint, body: Json) -> tuple[Json, ...]:
    """One body per prompt, in order; a single prompt gives this body.

    A list of ints is one prompt of token ids. An empty list is left as it is: the node answers it with its own error.
    """
    prompt = body.get("prompt")
    if endpoint is not Endpoint.COMPLETIONS or not isinstance(prompt, _MAY_BE_SEVERAL):
        return (body,)
    raw = prompt if isinstance(prompt, msgspec.Raw) else msgspec.Raw(write_json(prompt))
    if first_byte(raw) != LIST or kind_of_items(raw) not in (b'"', b"["):
        return (body,)
    return tuple({**body, "prompt": each} for each in first_items(raw))


class _Named(msgspec.Struct):
    """The field that is read of a body that goes to one node: nothing else of it is made an object."""

    model: msgspec.Raw = msgspec.Raw(b"null")


_MODEL = msgspec.json.Decoder(_Named).decode


def model_of(raw: bytes) -> str:
    """The ``model`` of a JSON body; "" where there is none.

    Raises:
        ClientError: 404 for a name that is too long to be one.
    """
    with contextlib.suppress(msgspec.MsgspecError, RecursionError):
        return model_name(_MODEL(raw).model)
    return ""
