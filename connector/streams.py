"""The node's route for streams that may be continued elsewhere: `POST /v1/pdproxy/streams` + an endpoint's path.

    {...the endpoint's own body, "stream": true, "pdproxy_resume": {"records": [...]}}     the last only to continue
    200   the endpoint's events, with a journal between them (`journal`); of a stream that is continued, those behind
          its records
    400   in OpenAI's shape: a body that is no stream, bad records, or (type NotResumableError) a shape that cannot be
          continued, which the endpoint itself serves
    409   type ReplayError: the stream cannot be made again up to where it broke, and why
    else  what the endpoint itself answers

vLLM's own endpoint runs, with its own checks, errors and cancellation: the request goes to the app's router a second
time, under the endpoint's path. Two things differ. The serving object is a copy whose engine client is ours, which sees
each output that the endpoint's code consumes, and when it asks for the next. And the events on their way out are held
until then (`journaled_response`). Answers begin when the endpoint's code first asks for an output, so that whatever is
refused before is refused by status.

Not resumable, and refused before anything is sent:
- Several prompts in one body, and beam search, which are several requests to the engine.
- `echo` with `logprobs`: log-probabilities of the prompt take a computation of all of it, in one node.
- /v1/responses with tools that run on the node (between two requests to the engine, with a state of their own), in the
  background, on a stored response, or to be stored: the store is one node's.
- /v1/responses with log-probabilities: its last events show all of them again, and the journal has none.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from copy import copy
from typing import TYPE_CHECKING, Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse

from .journal import BadRecordsError, Record, parse_records
from .journaled_response import NOT_RESUMABLE, JournaledResponse, StreamedEngine, StreamRefusedError
from .replay import View
from .resume_order import KEY

if TYPE_CHECKING:
    from starlette.types import Message, Receive, Scope, Send
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

PREFIX = "/v1/pdproxy/streams"
RESPONSES = "/v1/responses"
HANDLERS = {
    "/v1/completions": "openai_serving_completion",
    "/v1/chat/completions": "openai_serving_chat",
    "/v1/messages": "anthropic_serving_messages",
    RESPONSES: "openai_serving_responses",
}
"""The endpoints, and where in the app's state their serving objects are."""
NODE_TOOLS = frozenset({"mcp", "web_search_preview", "code_interpreter", "container"})


class StreamRoute:
    """The route, as an ASGI application. `secret`: what orders are signed with; None where the node does not decode."""

    def __init__(self) -> None:
        self.secret: bytes | None = None
        self._current: ContextVar[JournaledResponse] = ContextVar("pdproxy_stream")
        self._handlers: dict[str, Any] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._serve(scope, receive, send)
        except ClientDisconnect:
            return  # before its body was complete
        except StreamRefusedError as refusal:
            await error_response(refusal.status, refusal.kind, str(refusal))(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.secret is None:
            raise StreamRefusedError(404, "NotFoundError", "this node does not decode for others")
        body, records = read_order(await Request(scope, receive).body())
        response = JournaledResponse(send, records, self.secret)
        self._current.set(response)
        app = scope["app"]
        root, path = scope["path"].split(PREFIX, 1)
        state = View(app.state, **{HANDLERS[path]: self._handler(app.state, path)})
        inner = {**scope, "app": View(app, state=state), "path": root + path, "raw_path": (root + path).encode()}
        await app.router(inner, body_first(body, receive), response)

    def _handler(self, state: Any, path: str) -> Any:
        """The serving object with our engine client; made once, for it may keep what it has computed."""
        if path not in self._handlers:
            original = getattr(state, HANDLERS[path], None)
            if original is None:
                raise StreamRefusedError(404, "NotFoundError", f"this node does not serve {path}")
            handler = self._handlers[path] = copy(original)
            handler.engine_client = StreamedEngine(original.engine_client, self._current)
            if path == RESPONSES:
                handler.create_responses = require_resumable(handler)
        return self._handlers[path]


def read_order(body: bytes) -> tuple[bytes, list[Record]]:
    """The endpoint's own body, and the records of a stream that is continued. Raises StreamRefusedError.

    A body that is not JSON is left to the endpoint, whose answer says what is wrong with it.
    """
    if KEY.encode() not in body:
        return body, []
    try:
        raw = json.loads(body)
    except (ValueError, RecursionError):
        return body, []
    if not isinstance(raw, dict) or KEY not in raw:
        return body, []
    order = raw.pop(KEY)
    try:
        return json.dumps(raw).encode(), parse_records(order)
    except BadRecordsError as error:
        raise StreamRefusedError(400, "BadRequestError", f"{KEY}: {error}") from error


def body_first(body: bytes, receive: Receive) -> Receive:
    """ASGI's `receive` for a body that has been read: once the body, then what comes after it."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> Message:
        return messages.pop() if messages else await receive()

    return receive_again


def require_resumable(handler: Any) -> Callable[..., Awaitable[Any]]:
    """The `create_responses` of a serving object, which refuses what it cannot resume. Raises StreamRefusedError."""
    create = handler.create_responses

    async def create_resumable(request: ResponsesRequest, raw_request: Request | None = None) -> Any:
        why = _why_not(handler, request)
        if why is not None:
            raise StreamRefusedError(400, NOT_RESUMABLE, f"{why} is not resumable")
        return await create(request, raw_request)

    return create_resumable


def _why_not(handler: Any, request: ResponsesRequest) -> str | None:
    if request.background:
        return "a response in the background"
    if handler.enable_store and (request.store or request.previous_response_id is not None):
        return "a response that is stored, or goes on from a stored one,"
    if handler.tool_server is not None and any(tool.type in NODE_TOOLS for tool in request.tools):
        return "a response with tools that run on the node"
    if request.is_include_output_logprobs():
        return "a response with log-probabilities"
    return None


def error_response(status: int, kind: str, message: str) -> JSONResponse:
    """In OpenAI's shape."""
    error = {"message": message, "type": kind, "param": None, "code": status}
    return JSONResponse({"error": error}, status_code=status)
