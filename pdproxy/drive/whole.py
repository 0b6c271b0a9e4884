"""An answer that is not streamed."""

import dataclasses
import json

from pdproxy.drive.job import Job
from pdproxy.drive.passage import Ask, Passage
from pdproxy.errors import Fault, NodeFault
from pdproxy.legs.judge import ANSWER_BYTES, json_object
from pdproxy.legs.tally import tally
from pdproxy.request import Endpoint
from pdproxy.stream.usage import true_answer
from pdproxy.transport.port import Incoming

_PROMISED = {
    Endpoint.COMPLETIONS: "choices",
    Endpoint.CHAT: "choices",
    Endpoint.MESSAGES: "content",
    Endpoint.RESPONSES: "output",
}
"""The field without which an answer is none."""


@dataclasses.dataclass(frozen=True, slots=True)
class Whole:
    """A node's answer as the client may see it.

    Attributes:
        body: its bytes, untouched where nothing had to be changed.
        answer: the same, parsed.
    """

    body: bytes
    answer: dict[str, object]


async def whole(passage: Passage, job: Job) -> Whole:
    """The answer to one prompt; closes the passage, on every exit.

    Raises:
        ClientError: all chances are used up.
        Answered: a node's own error goes to the client.
    """
    try:
        raw, answer = await passage.open(Ask(job.body, job.shape.additions), lambda incoming: _read(job, incoming))
        counted = tally(answer.get("usage"))
        if counted is not None:
            passage.settle(counted)
        return _seen(passage, job, raw, answer)
    finally:
        await passage.aclose()


async def _read(job: Job, incoming: Incoming) -> tuple[bytes, dict[str, object]]:
    raw = await incoming.read(ANSWER_BYTES)
    answer = json_object(raw)
    if not isinstance(answer.get(_PROMISED[job.endpoint]), list):
        raise NodeFault(Fault.INVALID_BODY, f"the answer has no {_PROMISED[job.endpoint]}")
    return raw, answer


def _seen(passage: Passage, job: Job, raw: bytes, answer: dict[str, object]) -> Whole:
    told = passage.hand_over is not None and not passage.recomputed
    cached = passage.hand_over.cached_tokens if passage.hand_over is not None and told else None
    seen = true_answer(job.endpoint, answer, cached)
    if seen == answer:
        return Whole(raw, answer)
    return Whole(json.dumps(seen, separators=(",", ":")).encode("ascii"), seen)
