"""A request with several prompts as one request for each."""

from pdproxy.request import Endpoint, Json


def split(endpoint: Endpoint, body: Json) -> tuple[dict[str, object], ...]:
    """One body per prompt, in order; a single prompt gives one body.

    A list of ints is one prompt of token ids. An empty list is left as it is: the node knows what to say to it.
    """
    return tuple({**body, "prompt": prompt} for prompt in prompts(body)) if is_many(endpoint, body) else (dict(body),)


def prompts(body: Json) -> list[object]:
    """The prompts of a completions body whose ``prompt`` is a list of prompts."""
    prompt = body.get("prompt")
    return prompt if isinstance(prompt, list) else [prompt]


def is_many(endpoint: Endpoint, body: Json) -> bool:
    """Whether the body holds a list of prompts (of one or more), not one prompt."""
    prompt = body.get("prompt")
    return endpoint is Endpoint.COMPLETIONS and isinstance(prompt, list) and bool(prompt) and not _is_ids(prompt)


def _is_ids(prompt: list[object]) -> bool:
    return isinstance(prompt[0], int)
