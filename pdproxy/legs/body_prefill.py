"""The prefill leg's body: the same prompt, exactly one token, nothing that only costs.

Field by field against vLLM 0.32's request models (``vllm/entrypoints/openai/*/protocol.py`` and ``anthropic``).
What shapes the prompt stays: tools and tool_choice, response_format (chat templates read it), template arguments,
reasoning settings, media, LoRA model name, cache_salt, truncation, suffix, echo's counterpart add_special_tokens.
"""

from pdproxy.request import Endpoint, Json

DROPPED = frozenset(
    {
        # refused beside max_tokens = 1, or without a stream
        "min_tokens", "stream", "stream_options", "best_of", "background",
        # ends or shapes output that nobody reads
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


def prefill_body(endpoint: Endpoint, body: Json, hand_over: str, readers: int) -> dict[str, object]:
    """Ask for exactly one token and for a ticket.

    Args:
        endpoint: which API the body is for.
        body: scrubbed, of one prompt; or what `continuation_body` made.
        hand_over: the unguessable name by which whatever this leg holds can be released.
        readers: how many decode requests will read the blocks (``n``).
    """
    leg = {key: value for key, value in body.items() if key not in DROPPED}
    if "n" in leg:
        leg["n"] = 1
    if endpoint is Endpoint.RESPONSES:
        leg["store"] = False
    leg.update(dict.fromkeys(ONE_TOKEN[endpoint], 1))
    leg["kv_transfer_params"] = _wish(body, hand_over, readers)
    return leg


def _wish(body: Json, hand_over: str, readers: int) -> dict[str, object]:
    own = body.get("kv_transfer_params")
    wish: dict[str, object] = dict(own) if isinstance(own, dict) else {}
    wish |= {"do_remote_decode": True, "do_remote_prefill": False}
    # Stock connectors read these keys; None says that there is nothing to read yet.
    wish |= dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
    wish["pdproxy_hand_over"] = hand_over
    if readers > 1:
        wish["pdproxy_readers"] = readers
    return wish
