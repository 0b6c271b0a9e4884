"""How vLLM's request models read bodies: by pydantic, lax. Written down once more, apart from the proxy's own."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError

MODEL = "m"
"""The model of a request that names none."""
_Choices = Annotated[int, Field(le=16384)]
"""vLLM's ``VLLM_MAX_N_SEQUENCES``."""


class _Options(BaseModel):
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class _Common(BaseModel):
    model: str | None = None
    stream: bool | None = False
    temperature: float | None = None


class _Sampled(_Common):
    max_tokens: int | None = None
    min_tokens: int = 0
    stream_options: _Options | None = None
    priority: int = 0
    seed: int | None = None
    presence_penalty: float | None = None
    prompt_logprobs: int | None = None
    use_beam_search: bool = False
    return_token_ids: bool | None = None


class _Completion(_Sampled):
    n: _Choices = 1
    echo: bool | None = False


class _Chat(_Sampled):
    n: _Choices | None = 1
    echo: bool = False
    max_completion_tokens: int | None = None


class _Messages(_Common):
    model: str
    max_tokens: int


class _Responses(_Common):
    max_output_tokens: int | None = None
    priority: int = 0


_MODELS: Mapping[str, type[_Common]] = {
    "/v1/completions": _Completion,
    "/v1/chat/completions": _Chat,
    "/v1/messages": _Messages,
    "/v1/responses": _Responses,
}


class RefusedField(ValueError):
    """vLLM answers 400; the message is its own."""


def lax(path: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """The body of a generating endpoint, with the values that its fields are read as. Raises RefusedField."""
    try:
        read = _MODELS[path].model_validate(body).model_dump(exclude_unset=True)
    except ValidationError as error:
        first = error.errors()[0]
        raise RefusedField(f"{first['loc'][0]}: {first['msg']}") from error
    if path == "/v1/messages" and not body.get("model"):
        raise RefusedField("model: Model is required")
    return {**body, **read, "model": body.get("model") or MODEL}
