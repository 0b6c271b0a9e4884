"""An answer that is not streamed."""

import dataclasses
import json

from pdproxy.errors import Fault, NodeFault
from pdproxy.legs.calls import ANSWER_BYTES, json_object
from pdproxy.legs.usage import read_usage
from pdproxy.orchestration.sub_request import SubRequest
from pdproxy.orchestration.upstream import UpstreamBody, UpstreamRequest
from pdproxy.request import Endpoint
from pdproxy.stream.rewrite_usage import rewrite_answer
from pdproxy.transport.port import HttpResponse, read_to_end

_REQUIRED_FIELD = {
    Endpoint.COMPLETIONS: "choices",
    Endpoint.CHAT: "choices",
    Endpoint.MESSAGES: "content",
    Endpoint.RESPONSES: "output",
}
"""The field without which an answer is none."""


@dataclasses.dataclass(frozen=True, slots=True)
class BufferedAnswer:
    """A node's answer as the client may see it.

    Attributes:
        body: its bytes, untouched where nothing had to be changed.
        answer: the same, parsed.
    """

    body: bytes
    answer: dict[str, object]


async def read_buffered(upstream: UpstreamRequest, sub_request: SubRequest) -> BufferedAnswer:
    """The answer to one prompt; closes the passage, on every exit.

    Raises:
        ClientError: all chances are used up.
        UpstreamErrorResponse: a node's own error goes to the client.
    """
    try:
        raw, answer = await upstream.start(
            UpstreamBody(sub_request.body, sub_request.shape.additions), lambda response: _read(sub_request, response)
        )
        counted = read_usage(answer.get("usage"))
        if counted is not None:
            upstream.record_usage(counted)
        return _client_bytes(upstream, sub_request, raw, answer)
    finally:
        await upstream.aclose()


async def _read(sub_request: SubRequest, response: HttpResponse) -> tuple[bytes, dict[str, object]]:
    raw = await read_to_end(response, ANSWER_BYTES)
    answer = json_object(raw)
    if not isinstance(answer.get(_REQUIRED_FIELD[sub_request.endpoint]), list):
        raise NodeFault(Fault.INVALID_BODY, f"the answer has no {_REQUIRED_FIELD[sub_request.endpoint]}")
    return raw, answer


def _client_bytes(
    upstream: UpstreamRequest, sub_request: SubRequest, raw: bytes, answer: dict[str, object]
) -> BufferedAnswer:
    disaggregated = upstream.hand_over is not None and not upstream.recomputed
    cached = upstream.hand_over.cached_tokens if upstream.hand_over is not None and disaggregated else None
    seen = rewrite_answer(sub_request.endpoint, answer, cached)
    if seen == answer:
        return BufferedAnswer(raw, answer)
    return BufferedAnswer(json.dumps(seen, separators=(",", ":")).encode("ascii"), seen)
