"""Answers that are not streamed: of one prompt, or of several merged into one."""

import asyncio
import dataclasses
import functools
import json
from collections.abc import Callable, Coroutine, Sequence
from typing import TypeVar

from pdproxy.errors import Fault, NodeFault
from pdproxy.legs.calls import ANSWER_BYTES, json_object
from pdproxy.orchestration.upstream import UpstreamBody, UpstreamRequest
from pdproxy.request import Endpoint, Json
from pdproxy.stream.chunks import rewrite_answer
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


@dataclasses.dataclass(frozen=True, slots=True)
class BufferedAnswer:
    """A node's answer as the client may see it.

    Attributes:
        body: its bytes, untouched where nothing had to be changed.
        answer: the same, parsed.
    """

    body: bytes
    answer: dict[str, object]


async def buffered_body(upstreams: Sequence[UpstreamRequest], width: int) -> bytes:
    """The body for the client; at most ``width`` prompts are answered at once. Closes all upstreams, on every exit.

    Raises:
        ClientError: as `UpstreamRequest.start`, for any of the prompts.
        UpstreamErrorResponse: likewise.
    """
    if len(upstreams) == 1:
        return (await read_buffered(upstreams[0])).body
    answers = await gather_bounded([functools.partial(read_buffered, upstream) for upstream in upstreams], width)
    return _encode(merge_answers([each.answer for each in answers]))


async def read_buffered(upstream: UpstreamRequest) -> BufferedAnswer:
    """The answer to one prompt; closes the upstream, on every exit. Raises as `UpstreamRequest.start`."""
    sub_request = upstream.sub_request
    try:
        raw, answer = await upstream.start(
            UpstreamBody(sub_request.body, sub_request.shape.additions),
            functools.partial(_read, REQUIRED_FIELD[sub_request.endpoint]),
        )
        usage = read_usage(answer.get("usage"))
        if usage is not None:
            upstream.record_usage(usage)
    finally:
        await upstream.aclose()
    cached = None if upstream.hand_over is None or upstream.recomputed else upstream.hand_over.answer.cached_tokens
    seen = rewrite_answer(sub_request.endpoint, answer, cached)
    return BufferedAnswer(raw if seen == answer else _encode(seen), seen)


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


def choices_of(answer: Json) -> list[dict[str, object]]:
    """The choices of an answer or of an event's payload."""
    choices = answer.get("choices")
    return [choice for choice in choices if isinstance(choice, dict)] if isinstance(choices, list) else []


def _encode(answer: Json) -> bytes:
    return json.dumps(answer, separators=(",", ":")).encode("ascii")
