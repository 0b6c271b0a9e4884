"""The bodies that go to nodes: of both legs, release, continued stream. Pure; nothing else writes them.

A hand-over id is what the proxy calls a prefill leg: with it the node can be asked to free whatever that leg holds,
before, during and after the leg. It must be unguessable, and each leg gets a new one.
"""

from pdproxy.legs.shape import COMPLETIONS_DEFAULT_TOKENS
from pdproxy.raw_json import IdList, value_of
from pdproxy.request import Addition, Continuation, Endpoint, Json

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
    Endpoint.COMPLETIONS: ("max_tokens",),
    Endpoint.CHAT: ("max_tokens", "max_completion_tokens"),
    Endpoint.MESSAGES: ("max_tokens",),
    Endpoint.RESPONSES: ("max_output_tokens",),
}


def prefill_body(endpoint: Endpoint, body: Json, hand_over_id: str, readers: int) -> dict[str, object]:
    """Ask for exactly one token and for a ticket that so many ``readers`` (``n``) will use.

    ``body`` is scrubbed and of one prompt, or what `continuation_body` made.
    """
    leg = {key: value for key, value in body.items() if key not in DROPPED}
    if "n" in leg:
        leg["n"] = 1
    if endpoint is Endpoint.RESPONSES:
        leg["store"] = False
    leg.update(dict.fromkeys(ONE_TOKEN[endpoint], 1))
    leg["kv_transfer_params"] = _prefill_params(body, hand_over_id, readers)
    return leg


def _prefill_params(body: Json, hand_over_id: str, readers: int) -> dict[str, object]:
    own = body.get("kv_transfer_params")
    params: dict[str, object] = dict(own) if isinstance(own, dict) else {}
    params |= {"do_remote_decode": True, "do_remote_prefill": False}
    # Stock connectors read these keys; None says that there is nothing to read yet.
    params |= dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
    params["pdproxy_hand_over"] = hand_over_id
    if readers > 1:
        params["pdproxy_readers"] = readers
    return params


def release_body(model: str, hand_over_id: str) -> dict[str, object]:
    """Ask a prefill node to free the blocks of a hand-over; ``model`` is any name that the node serves."""
    return {"model": model, "prompt": [0], "max_tokens": 1, "kv_transfer_params": {"pdproxy_release": hand_over_id}}


def decode_body(
    endpoint: Endpoint, body: Json, ticket: Json | None, additions: frozenset[Addition]
) -> dict[str, object]:
    """What the client sent (or `continuation_body` made), with our additions and the ticket, unchanged.

    Without a ticket the decode node computes the prompt. Only completions and chat know the additions.
    """
    leg = dict(body)
    own = body.get("kv_transfer_params")
    if ticket is not None:
        leg["kv_transfer_params"] = {**own, **ticket} if isinstance(own, dict) else dict(ticket)
    if endpoint not in (Endpoint.COMPLETIONS, Endpoint.CHAT):
        return leg
    if Addition.TOKEN_IDS in additions:
        leg["return_token_ids"] = True
    if Addition.USAGE in additions:
        options = value_of(leg.get("stream_options"))
        leg["stream_options"] = {**(options if isinstance(options, dict) else {}), "include_usage": True}
    return leg


def resume_body(body: bytes, records: bytes) -> bytes:
    """The bytes of a decode leg that resumes a stream: those of the same leg from the start, and the journal so far.

    ``body`` is a JSON object that is not empty; ``records`` are JSON values joined by commas.
    """
    return body.removesuffix(b"}") + b',"pdproxy_resume":{"records":[' + records + b"]}}"


SYNTAX = frozenset("\\^$.|?*+()[]{}/-")
"""What a pattern must escape to mean the character itself."""


def continuation_body(endpoint: Endpoint, body: Json, continuation: Continuation) -> dict[str, object]:
    """A body whose prompt is the old one and all tokens so far, allowed what is left.

    Completions take token ids as their prompt; chat takes them in ``kv_transfer_params.prompt_token_ids``, which
    `prefill_body` and `decode_body` keep. A seed is advanced, so that the same random numbers are not drawn again.
    Where the client has a part of a token's text, a grammar makes a sampled continuation begin with that text.
    """
    if endpoint not in (Endpoint.COMPLETIONS, Endpoint.CHAT):
        raise ValueError(f"a stream of {endpoint} cannot be continued")
    rest = dict(body)
    prompt, produced = continuation.prompt_token_ids, continuation.produced_token_ids
    _put_prompt(endpoint, rest, prompt.followed_by(produced) if isinstance(prompt, IdList) else [*prompt, *produced])
    _spend(endpoint, rest, len(continuation.produced_token_ids))
    if continuation.forced:
        rest["structured_outputs"] = {"regex": beginning_with(continuation.forced)}
    return rest


def beginning_with(text: str) -> str:
    """A pattern for any text that begins with ``text``, as every grammar backend of vLLM reads it."""
    return "".join(_literal(character) for character in text) + r"[\s\S]*"


def _literal(character: str) -> str:
    if character in SYNTAX:
        return "\\" + character
    # vLLM refuses a bare NUL; other control characters are spelled out with it.
    return f"\\u{ord(character):04x}" if ord(character) < 32 else character


def _put_prompt(endpoint: Endpoint, rest: dict[str, object], ids: object) -> None:
    # The ids are what truncation and FIM rendering made; neither may happen twice.
    for key in ("truncate_prompt_tokens", "truncation_side", "suffix", "return_prompt_text"):
        rest.pop(key, None)
    if endpoint is Endpoint.COMPLETIONS:
        rest["prompt"] = ids
    else:
        rest["kv_transfer_params"] = {"prompt_token_ids": ids}


def _spend(endpoint: Endpoint, rest: dict[str, object], spent: int) -> None:
    if endpoint is Endpoint.COMPLETIONS and value_of(rest.get("max_tokens")) is None:
        rest["max_tokens"] = COMPLETIONS_DEFAULT_TOKENS
    for key in ("max_tokens", "max_completion_tokens"):
        if isinstance(allowed := value_of(rest.get(key)), int):
            rest[key] = max(1, allowed - spent)
    if isinstance(least := value_of(rest.get("min_tokens")), int):
        rest["min_tokens"] = max(0, least - spent)
    if isinstance(seed := value_of(rest.get("seed")), int):
        rest["seed"] = (seed + spent) % 2**63
