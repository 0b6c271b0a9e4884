"""The bodies that go to nodes: of both legs, resumed stream, release. Pure; nothing else writes them.

A hand-over id is what the proxy calls a prefill leg: with it the node can be asked to free whatever that leg holds,
before, during and after the leg. It must be unguessable, and each leg gets a new one.
"""

from types import MappingProxyType

import msgspec

from pdproxy.raw_json import value_of
from pdproxy.request import Endpoint, Json, LegForm

DROPPED = frozenset(
    {
        # refused beside max_tokens = 1, or without a stream
        "min_tokens", "stream", "stream_options", "best_of", "background",
        # ends or shapes output that is not used
        "stop", "stop_sequences", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "stream_interval",
        "logit_bias", "allowed_token_ids", "bad_words", "frequency_penalty", "presence_penalty", "repetition_penalty",
        "structured_outputs", "thinking_token_budget", "repetition_detection", "watermarking", "max_tool_calls",
        # the token is thrown away; and in vLLM 0.32 for CPUs a seed together with a prompt that is computed in chunks
        # ends the engine ("CPU Generator does not use offset")
        "seed",
        # only costs
        "logprobs", "top_logprobs", "prompt_logprobs", "logprob_token_ids", "return_tokens_as_token_ids",
        "return_token_ids", "return_prompt_text", "return_token_offsets", "routed_experts_prompt_start", "echo",
        "include", "enable_response_messages",
        # the decode node's name for the request
        "request_id",
    }
)  # fmt: skip
ONE_TOKEN = {
    Endpoint.COMPLETIONS: {"max_tokens": 1},
    Endpoint.CHAT: {"max_tokens": 1, "max_completion_tokens": 1},
    Endpoint.MESSAGES: {"max_tokens": 1},
    Endpoint.RESPONSES: {"max_output_tokens": 1},
}
_PREFILL_PARAMS: dict[str, object] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    # Stock connectors read these keys; None says that there is nothing to read yet.
    **dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")),
}

NOTHING_KEPT: Json = MappingProxyType({})
"""For a leg that tells its node nothing of conversations to keep."""
CALL_NO_TOOL = {"type": "none"}
"""In the place of a named tool, for messages: vLLM decodes the call's arguments as JSON, and refuses a request whose
only token is their beginning. The prompt has its tools all the same, but on nodes with
`--exclude-tools-when-tool-choice-none`, where the ticket is of another prompt then and the decode node computes."""


def prefill_body(
    endpoint: Endpoint, body: Json, hand_over_id: str, readers: int, keep: Json = NOTHING_KEPT
) -> dict[str, object]:
    """Ask for exactly one token and for a ticket that so many ``readers`` (``n``) will use.

    ``body`` is scrubbed and of one prompt. ``keep``: what the node is told of conversations that it keeps.
    """
    leg = dict(body)
    for name in DROPPED.intersection(body):
        del leg[name]
    if "n" in leg:
        leg["n"] = 1
    if endpoint is Endpoint.RESPONSES:
        leg["store"] = False
    if endpoint is Endpoint.MESSAGES and _names_a_tool(leg):
        leg["tool_choice"] = CALL_NO_TOOL
    leg |= ONE_TOKEN[endpoint]
    params = leg["kv_transfer_params"] = {**_PREFILL_PARAMS, "pdproxy_hand_over": hand_over_id, **keep}
    if readers > 1:
        params["pdproxy_readers"] = readers
    return leg


def _names_a_tool(body: Json) -> bool:
    choice = value_of(body.get("tool_choice"))
    return isinstance(choice, dict) and choice.get("type") == "tool"


def release_body(model: str, hand_over_id: str) -> dict[str, object]:
    """Ask a prefill node to free the blocks of a hand-over; ``model`` is any name that the node serves."""
    return {"model": model, "prompt": [0], "max_tokens": 1, "kv_transfer_params": {"pdproxy_release": hand_over_id}}


def decode_body(
    body: Json,
    ticket: msgspec.Raw | None,
    form: LegForm = LegForm(),  # noqa: B008
    keep: Json = NOTHING_KEPT,
) -> dict[str, object]:
    """The client's body, with the ticket. Without one the decode node computes the prompt, and may be told what to
    ``keep``.

    Where the form adds the usage event, the body must have no ``stream_options`` of its own.
    """
    leg = dict(body)
    if ticket is not None:
        leg["kv_transfer_params"] = ticket
    elif keep:
        leg["kv_transfer_params"] = keep
    if form.adds_usage:
        leg["stream_options"] = {"include_usage": True}
    return leg


def resume_body(body: bytes, records: bytes) -> bytes:
    """The bytes of a decode leg that resumes a stream: those of the same leg from the start, and the journal so far.

    ``body`` is a JSON object that is not empty; ``records`` are JSON values joined by commas.
    """
    return body.removesuffix(b"}") + b',"pdproxy_resume":{"records":[' + records + b"]}}"
