"""How many tokens a prompt has at most, where that can be told without a tokenizer. Pure."""

from pdproxy.request import Endpoint, Json


def most_tokens(endpoint: Endpoint, body: Json) -> int | None:
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
