"""The HTTP calls to nodes: the prefill leg, the decode leg, the release of a hand-over."""

import asyncio
from collections.abc import Callable

import msgspec

from pdproxy.errors import Fault, NodeFault
from pdproxy.finish_reasons import is_aborted
from pdproxy.legs.node_headers import for_client
from pdproxy.legs.parse import LARGE
from pdproxy.legs.rewrite import release_body, resume_body
from pdproxy.nodes.node import Node
from pdproxy.observe.tracing import LegSpan
from pdproxy.raw_json import LIST, SMALL, first_byte, kind_of_items
from pdproxy.request import DecodeRoute, Endpoint, Headers, Json, LegForm, header, media_type, read_json, write_json
from pdproxy.transport.port import HttpRequest, HttpResponse, Timeouts, Transport, read_to_end
from pdproxy.usage import CacheUse, read_usage, written_tokens

FAULT_BODY_BYTES = 64 * 1024
"""How much of an error's body is kept for the client."""
ANSWER_BYTES = 256 * 1024 * 1024
"""The longest answer that is read whole: token ids and log-probabilities of a long prompt fit."""
EVENT_STREAM = "text/event-stream"
STREAMS_PATH = "/v1/pdproxy/streams"
"""Before the path of an endpoint: the same endpoint, its streams with a journal."""
_JSON_HEADER = ("content-type", "application/json")
_NOT_RESUMABLE = b'"NotResumableError"'
"""The type of the error with which that route leaves a stream to the endpoint itself."""

NOTHING_HELD = frozenset({Fault.REFUSED, Fault.BUSY, Fault.CLIENT_ERROR, Fault.NO_TICKET})
"""Faults of a prefill leg after which its node holds nothing for it: there is nothing to release, if the leg was sent
once (`prefill`)."""
_OUR_FIELDS = "pdproxy"
"""Where in a ticket the fields of our connector are."""
KEPT = "pdproxy_kept"
"""The field of an answer's ``kv_transfer_params`` in which a node tells what it keeps of the conversation."""
_CACHED_HINT = "remote_prefill_cached_tokens"
"""vLLM's scheduler adds it to the ticket, and a decode node that gets it reports it as its own ``cached_tokens``
(0.32, v1/engine/output_processor.py). Without it the decode node reports what it did not have to compute, which shows
whether it used the ticket. The connector does not look at it, and no signature covers it."""


_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_OBJECTS = msgspec.json.Decoder(list[dict[str, msgspec.Raw]]).decode


class PrefillAnswer(msgspec.Struct, frozen=True):
    """The ticket for the decode leg; where the prefill node tells, how many of how many prompt tokens were cached, and
    how many of the others it left in its cache. ``kept`` is what it says of the conversation that it was asked to keep.

    The ticket is raw JSON: it is written once and kept as long as the stream, and parsed it has three times the bytes.
    """

    ticket: msgspec.Raw
    cached_tokens: int | None = None
    prompt_tokens: int | None = None
    written_tokens: int | None = None
    kept: object = None

    @property
    def cache_use(self) -> CacheUse | None:
        """The use of the cache that the client is told; None where the node did not tell."""
        return None if self.cached_tokens is None else CacheUse(self.cached_tokens, self.written_tokens)


async def prefill(
    transport: Transport,
    node: Node,
    endpoint: Endpoint,
    body: Json,
    headers: Headers,
    timeouts: Timeouts,
    on_resend: Callable[[], None],
    span: LegSpan | None = None,
) -> PrefillAnswer:
    """Run the prefill leg to its end; ``body`` is from `rewrite.prefill_body`, ``headers`` are the client's, but for
    those that tell of its body or ask for a kind of answer.

    ``on_resend``: called when the leg is sent a second time (`Transport.send`). The node may then hold a second ticket
    under the same hand-over id, also where the leg fails with one of `NOTHING_HELD`: the id has to be released even if
    the ticket of the answer was read.

    Raises:
        NodeFault: any fault; NO_TICKET where the answer is good and carries no ticket.
    """
    return read_prefill(
        endpoint,
        await read_answer(await _post(transport, node, endpoint, write_json(body), headers, timeouts, span, on_resend)),
    )


def read_prefill(endpoint: Endpoint, answer: Json) -> PrefillAnswer:
    """The ticket in a prefill leg's answer; without one, a NO_TICKET fault, or ABORTED."""
    params = answer.get("kv_transfer_params")
    kept = params.pop(KEPT, None) if isinstance(params, dict) else None
    if not isinstance(params, dict) or not params:
        raise_if_aborted(endpoint, answer)
        raise NodeFault(Fault.NO_TICKET, "the prefill answer carries no kv_transfer_params")
    hint, usage = params.pop(_CACHED_HINT, None), read_usage(answer.get("usage"))
    ticket = msgspec.Raw(write_json(params))
    prompt, written = None if usage is None else usage.prompt, written_tokens(endpoint, answer.get("usage"))
    if isinstance(hint, int):
        return PrefillAnswer(ticket, hint, prompt, written, kept)
    return PrefillAnswer(ticket, None if usage is None else usage.cached, prompt, written, kept)


def kept_of(answer: Json) -> object:
    """The field in which a node that computes alone tells, in a whole answer, what it keeps; None without it."""
    params = answer.get("kv_transfer_params")
    return params.get(KEPT) if isinstance(params, dict) else None


async def decode(
    transport: Transport,
    node: Node,
    endpoint: Endpoint,
    body: Json,
    headers: Headers,
    timeouts: Timeouts,
    form: LegForm = LegForm(),  # noqa: B008 - frozen
    span: LegSpan | None = None,
    *,
    stream: bool,
) -> HttpResponse:
    """Start the decode leg; ``body`` is from `rewrite.decode_body`. The caller must close the response.

    Args:
        stream: the body asks for a stream.

    Raises:
        NodeFault: any fault up to the head; INVALID_BODY where a stream was asked for and something else came.
    """
    raw = write_json(body)
    if form.route is DecodeRoute.JOURNALED:
        response = await _open_journaled(transport, node, endpoint, raw, headers, timeouts, form.records, span)
    else:
        response = await _post(transport, node, endpoint, raw, headers, timeouts, span)
    kind = media_type(header(response.headers, "content-type"))
    if stream == (kind == EVENT_STREAM):
        return response
    await response.aclose()
    raise NodeFault(Fault.INVALID_BODY, f"asked for stream={stream} and got {kind or 'no content type'}")


async def _open_journaled(
    transport: Transport,
    node: Node,
    endpoint: Endpoint,
    body: bytes,
    headers: Headers,
    timeouts: Timeouts,
    records: bytes,
    span: LegSpan | None,
) -> HttpResponse:
    """A stream with a journal; one that a node leaves to the endpoint itself is a NO_ROUTE fault."""
    path = STREAMS_PATH + endpoint
    try:
        return await _post(
            transport, node, path, resume_body(body, records) if records else body, headers, timeouts, span
        )
    except NodeFault as fault:
        if _left_to_endpoint(fault):
            raise NodeFault(Fault.NO_ROUTE, f"status {fault.status} from {path}", status=fault.status) from fault
        raise


def _left_to_endpoint(fault: NodeFault) -> bool:
    return fault.status in (404, 405) or (fault.status == 400 and _NOT_RESUMABLE in fault.body)


async def release(
    transport: Transport, node: Node, model: str, hand_over_id: str, timeouts: Timeouts, headers: Headers = ()
) -> None:
    """Free the blocks of a hand-over; good before, during and after its prefill, and more than once.

    The node chose the rank of the prefill by itself and does not report it, so the message goes to every rank: those
    that do not know the id have nothing to free. ``model`` is any name that the node serves. A fault of one rank is
    raised after all were called; its blocks are freed when the lease ends.
    """
    body = write_json(release_body(model, hand_over_id))

    async def on_rank(rank: Headers) -> None:
        response = await _post(transport, node, Endpoint.COMPLETIONS, body, (*headers, *rank), timeouts)
        try:
            await read_to_end(response, FAULT_BODY_BYTES)
        finally:
            await response.aclose()

    for failure in await asyncio.gather(*map(on_rank, node.each_rank()), return_exceptions=True):
        if failure is not None:
            raise failure


async def _post(
    transport: Transport,
    node: Node,
    path: str,
    body: bytes,
    headers: Headers,
    timeouts: Timeouts,
    span: LegSpan | None = None,
    on_resend: Callable[[], None] | None = None,
) -> HttpResponse:
    """The response to a leg; a status that is not 2xx is a fault with a bounded body, and closes the response."""
    if len(body) > LARGE:
        await asyncio.sleep(0)  # to write it as JSON took some milliseconds, and to send it takes some more
    traced = None if span is None else span.span
    response = await transport.send(
        HttpRequest("POST", node.url + path, (*headers, _JSON_HEADER), body, on_resend, traced), timeouts
    )
    if 200 <= response.status < 300:
        return response
    try:
        shown = await _bounded(response)
    finally:
        await response.aclose()
    fault, kept = fault_of(response.status, response.headers), for_client(response.headers)
    raise NodeFault(fault, f"status {response.status}", status=response.status, body=shown, headers=kept)


def fault_of(status: int, headers: Headers) -> Fault:
    """The row of the failure table for a status that is not 2xx."""
    if status == 429 or (status == 503 and header(headers, "retry-after") is not None):
        return Fault.BUSY
    if 400 <= status < 500:
        return Fault.CLIENT_ERROR
    return Fault.SERVER_ERROR if 500 <= status < 600 else Fault.INVALID_BODY


async def _bounded(response: HttpResponse) -> bytes:
    kept = b""
    async for chunk in response:
        kept += chunk
        if len(kept) > FAULT_BODY_BYTES:
            return b""  # half an error body is no error body
    return kept


async def read_answer(response: HttpResponse, limit: int = ANSWER_BYTES) -> dict[str, object]:
    """A non-streamed answer, whole; closes the response. No JSON object, or one over ``limit`` bytes: INVALID_BODY."""
    try:
        return json_object(await read_to_end(response, limit))
    finally:
        await response.aclose()


def prompt_digest(ticket: msgspec.Raw) -> str:
    """The digest of the prompt that a ticket of our connector is for; "" of any other ticket."""
    ours = read_json(bytes(ticket)).get(_OUR_FIELDS)
    digest = ours.get("digest") if isinstance(ours, dict) else None
    return digest if isinstance(digest, str) else ""


def raise_if_aborted(endpoint: Endpoint, answer: Json) -> None:
    """Raise the ABORTED fault for an answer in one piece that its node gave up."""
    if is_aborted(endpoint, answer):
        raise NodeFault(Fault.ABORTED, "the node gave the answer up")


def json_object(raw: bytes) -> dict[str, object]:
    """A JSON object; anything else is an INVALID_BODY fault."""
    try:
        value: object = read_json(raw)
    except (ValueError, RecursionError) as error:
        raise _not_json(error) from error
    if not isinstance(value, dict):
        raise NodeFault(Fault.INVALID_BODY, f"the answer is a JSON {type(value).__name__}, not an object")
    return value


async def outlined_object(raw: bytes) -> dict[str, object]:
    """As `json_object`; of a long answer, long values stay raw JSON: those of the object, and of its lists' items."""
    if len(raw) <= LARGE:
        return json_object(raw)
    answer: dict[str, object] = {}
    try:
        for name, value in _FIELDS(raw).items():
            await asyncio.sleep(0)
            answer[name] = _outlined(value)
    except (msgspec.MsgspecError, UnicodeDecodeError):  # the standard library reads more
        return json_object(raw)
    except RecursionError as error:
        raise _not_json(error) from error
    return answer


def _outlined(value: msgspec.Raw) -> object:
    if first_byte(value) == LIST and kind_of_items(value) == b"{":
        return [{name: _small(each) for name, each in item.items()} for item in _OBJECTS(value)]
    return _small(value)


def _small(value: msgspec.Raw) -> object:
    return read_json(bytes(value)) if len(value) <= SMALL else value


def _not_json(error: Exception) -> NodeFault:
    return NodeFault(Fault.INVALID_BODY, f"the answer is not JSON: {error}")
