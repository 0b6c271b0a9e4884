"""Everything that can go wrong, by whose fault it is.

::

    PdproxyError
    ├── SettingsError          the operator's settings cannot be used; the message says what to change
    ├── ClientError            what the client gets: a status and an OpenAI-shaped error body
    └── NodeFault              one leg failed on one node; `Fault` names how
        (raised by `transport` for the wire, by `legs` for what the answer says)

A `NodeFault` never reaches a client as it is: the table in `failures` decides what follows from it.
"""

import dataclasses
import enum
import json
from typing import TypeVar

Error = TypeVar("Error", bound=BaseException)


def untraced(error: Error) -> Error:
    """A copy without a traceback: of an error that is kept, and of a kept one to be raised.

    The frames of a traceback keep all that a failed request holds, its body above all. Where one of these frames
    belongs to whoever keeps the error, they keep each other until the garbage collector comes by.
    """
    made = error.__class__.__new__(error.__class__, *error.args)
    made.__dict__.update(error.__dict__)
    return made


class PdproxyError(Exception):
    """The root of the tree."""


class SettingsError(PdproxyError):
    """Settings that cannot be used. The message names the setting and what would work."""


@dataclasses.dataclass(eq=False, repr=False)
class ClientError(PdproxyError):
    """An answer for the client, in OpenAI's error shape.

    Args:
        status: 400 to 599.
        message: a sentence that says what to do.
        kind: OpenAI's ``type``.
        code: a word; of the errors that vLLM writes too, the status, as there.
        param: the field of the request that is at fault.
        headers: such as ``retry-after``.
    """

    status: int
    message: str
    _: dataclasses.KW_ONLY
    kind: str = "invalid_request_error"
    code: str | int | None = None
    param: str | None = None
    headers: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        return self.message

    def body(self) -> bytes:
        """The JSON body, OpenAI's shape: ``{"error": {message, type, param, code}}``."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return json.dumps({"error": error}).encode()  # in ASCII: a client's text may hold what UTF-8 cannot write


class BrokenAnswer(PdproxyError):
    """An answer that is under way cannot be completed, and has no way to say so: the client's connection is cut."""


class Fault(enum.StrEnum):
    """How a leg failed: the rows of the failure table."""

    REFUSED = "refused"
    """No connection: nothing of the request reached the node."""
    RESET = "reset"
    """The connection broke after the request was (partly) sent, or the body ended before its end."""
    HEADERS_TIMEOUT = "headers_timeout"
    """No response head within the phase's deadline."""
    STALL = "stall"
    """The body stopped arriving for longer than the stall deadline."""
    CLIENT_ERROR = "client_error"
    """A 4xx other than 429: the request's own fault."""
    NO_ROUTE = "no_route"
    """The route of streams that can be resumed has no such stream: a 404 or 405, for the node does not know the route,
    or not the model; or a 400 that says that this stream could not be resumed."""
    BUSY = "busy"
    """A 429, or a 503 with Retry-After: the node is healthy and full. Or the proxy is, and has no socket for it."""
    SERVER_ERROR = "server_error"
    """A 5xx."""
    INVALID_BODY = "invalid_body"
    """A 2xx whose body is not what the endpoint promises."""
    NO_TICKET = "no_ticket"
    """A good prefill answer without kv_transfer_params."""
    ABORTED = "aborted"
    """A 200 whose answer the node gave up, as vLLM does with what arrives while it shuts down (`finish_reasons`)."""
    ERROR_EVENT = "error_event"
    """An error other than a 4xx that the node reported inside a 200 stream."""


@dataclasses.dataclass(eq=False, repr=False)
class NodeFault(PdproxyError):
    """One leg failed on one node.

    Attributes:
        fault: the row of the failure table.
        detail: for the log, never for the client: may hold internal addresses.
        status: the upstream status, where there was one.
        body: the upstream body (bounded), which a client may be shown when the fault is its own.
        headers: upstream response headers worth keeping (``retry-after``).
        resent: a kept-alive connection broke under the request before: even if the node then refused a fresh one, the
            request may have reached it, and may be what ended it.
        silent: nothing came back at all: no connection in time, no route, no such name, no answer in time. A process
            that has ended is not silent: its host refuses the connection.
    """

    fault: Fault
    detail: str
    _: dataclasses.KW_ONLY
    status: int | None = None
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = ()
    resent: bool = False
    silent: bool = False

    def __str__(self) -> str:
        return f"{self.fault}: {self.detail}"
