"""The rest of a broken stream, as a request that goes the normal way again."""

from pdproxy.request import Continuation, Endpoint, Json

COMPLETIONS_DEFAULT_TOKENS = 16
"""What vLLM's completions endpoint allows where ``max_tokens`` is missing or null."""

SYNTAX = frozenset("\\^$.|?*+()[]{}/-")
"""What a pattern must escape to mean the character itself."""


def continuation_body(endpoint: Endpoint, body: Json, continuation: Continuation) -> dict[str, object]:
    """A body whose prompt is the old one and all tokens so far, allowed what is left.

    Completions take token ids as their prompt; chat takes them in ``kv_transfer_params.prompt_token_ids``, which
    `prefill_body` and `decode_body` keep. A seed moves on, so that the same random numbers are not drawn again. Where
    the client has a part of a token's text, a sampled continuation is held to that text by a grammar.

    Args:
        endpoint: completions or chat.
        body: the client's, scrubbed, of one prompt.
        continuation: what `pdproxy.stream.transcript.Transcript.continuation` found.

    Raises:
        ValueError: for an endpoint whose streams cannot go on.
    """
    if endpoint not in (Endpoint.COMPLETIONS, Endpoint.CHAT):
        raise ValueError(f"a stream of {endpoint} cannot go on")
    rest = dict(body)
    ids = [*continuation.prompt_token_ids, *continuation.produced_token_ids]
    _put_prompt(endpoint, rest, ids)
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


def _put_prompt(endpoint: Endpoint, rest: dict[str, object], ids: list[int]) -> None:
    # The ids are what truncation and FIM rendering made; neither may happen twice.
    for key in ("truncate_prompt_tokens", "truncation_side", "suffix", "return_prompt_text"):
        rest.pop(key, None)
    if endpoint is Endpoint.COMPLETIONS:
        rest["prompt"] = ids
    else:
        rest["kv_transfer_params"] = {"prompt_token_ids": ids}


def _spend(endpoint: Endpoint, rest: dict[str, object], spent: int) -> None:
    if endpoint is Endpoint.COMPLETIONS and rest.get("max_tokens") is None:
        rest["max_tokens"] = COMPLETIONS_DEFAULT_TOKENS
    for key in ("max_tokens", "max_completion_tokens"):
        if isinstance(allowed := rest.get(key), int):
            rest[key] = max(1, allowed - spent)
    if isinstance(least := rest.get("min_tokens"), int):
        rest["min_tokens"] = max(0, least - spent)
    if isinstance(seed := rest.get("seed"), int):
        rest["seed"] = (seed + spent) % 2**63
