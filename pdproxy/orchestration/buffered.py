"""Answers that are not streamed: of one prompt, or of several merged into one."""

import asyncio
import functools
import json
from collections.abc import Callable, Coroutine, Sequence
from typing import TypeVar

from pdproxy.errors import Fault, NodeFault
from pdproxy.legs.calls import ANSWER_BYTES, json_object
from pdproxy.orchestration.upstream import UpstreamRequest
from pdproxy.request import Endpoint, Json
from pdproxy.stream.chunks import choices_of, rewrite_answer
from pdproxy.transport.port import HttpResponse
from pdproxy.usage import read_usage, sum_usage

Result = TypeVar("Result")

REQUIRED_FIELD = {
    Endpoint.COMPLETIONS: "choices",
    Endpoint.CHAT: "choices",
    Endpoint.MESSAGES: "content",
    Endpoint.RESPONSES: "output",
}
"""The list that every answer must have."""


async def buffered_body(upstreams: Sequence[UpstreamRequest], width: int) -> bytes:
    """The body for the client; at most ``width`` prompts are answered at once. Closes all upstreams, on every exit.

    Raises:
        ClientError: as `UpstreamRequest.start`, for any of the prompts.
        UpstreamErrorResponse: likewise.
    """
    if len(upstreams) == 1:
        return (await _answer(upstreams[0]))[0]
    answers = await gather_bounded([functools.partial(_answer, upstream) for upstream in upstreams], width)
    return _encode(merge_answers([answer for _, answer in answers]))


async def _answer(upstream: UpstreamRequest) -> tuple[bytes, dict[str, object]]:
    """The answer to one prompt, as bytes (the node's own where nothing had to be changed) and parsed."""
    sub_request = upstream.sub_request
    try:
        raw, answer = await upstream.start(
            sub_request.body,
            sub_request.shape.additions,
            functools.partial(_read, REQUIRED_FIELD[sub_request.endpoint]),
        )
        usage = read_usage(answer.get("usage"))
        if usage is not None:
            upstream.record_usage(usage)
    finally:
        await upstream.aclose()
    cached = None if upstream.hand_over is None or upstream.recomputed else upstream.hand_over.answer.cached_tokens
    seen = rewrite_answer(sub_request.endpoint, answer, cached)
    return raw if seen == answer else _encode(seen), seen


async def _read(required_field: str, response: HttpResponse) -> tuple[bytes, dict[str, object]]:
    raw = await response.read(ANSWER_BYTES)
    answer = json_object(raw)
    if not isinstance(answer.get(required_field), list):
        raise NodeFault(Fault.INVALID_BODY, f"the answer has no {required_field}")
    return raw, answer


async def gather_bounded(parts: Sequence[Callable[[], Coroutine[None, None, Result]]], width: int) -> list[Result]:
    """All results, in order, at most ``width`` at a time. The first failure cancels the others and is raised."""
    gate = asyncio.Semaphore(width)

    async def one(part: Callable[[], Coroutine[None, None, Result]]) -> Result:
        async with gate:
            return await part()

    tasks = [asyncio.ensure_future(one(part)) for part in parts]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await cancel_all(tasks)


async def cancel_all(tasks: Sequence["asyncio.Future[Result]"]) -> None:
    """Cancel tasks and wait for their end, even if it is cancelled meanwhile."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def merge_answers(answers: Sequence[Json]) -> dict[str, object]:
    """Completions answers to several prompts as one, as a node gives it to a list of prompts.

    Choice indices count through (vLLM 0.32, ``openai/completion/serving.py``). Everything but choices and usage is the
    first answer's; ``metrics`` belongs to a single answer and is left out.
    """
    merged = dict(answers[0])
    choices = [choice for answer in answers for choice in choices_of(answer)]
    merged["choices"] = [{**choice, "index": index} for index, choice in enumerate(choices)]
    merged["usage"] = sum_usage([usage for answer in answers if isinstance(usage := answer.get("usage"), dict)])
    if "metrics" in merged:
        merged["metrics"] = None
    return merged


def _encode(answer: Json) -> bytes:
    return json.dumps(answer, separators=(",", ":")).encode("ascii")
