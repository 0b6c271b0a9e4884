"""One HTTP exchange with a client, as the handlers get it."""

import dataclasses

from pdproxy.errors import ClientError
from pdproxy.intake import paths
from pdproxy.intake.asgi import Message, Receive, Send, send_error
from pdproxy.request import Endpoint, Headers
from pdproxy.sink import Sink
from pdproxy.stream.errors import error_body, error_event


class Sender:
    """ASGI's send, which remembers whether the response has begun."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.begun = False

    async def __call__(self, message: Message) -> None:
        self.begun = True
        await self._send(message)


@dataclasses.dataclass(frozen=True, slots=True)
class Exchange:
    """A request's head, and the two halves of its connection.

    Attributes:
        query: with its question mark, or "".
        request_id: for logs and the response.
        sink: for pieces of the response's body that need not wait for their turn, where the server has one.
    """

    method: str
    path: str
    query: str
    headers: Headers
    request_id: str
    receive: Receive
    send: Sender
    sink: Sink | None = None

    async def refuse(self, error: ClientError) -> None:
        """Send an error in the shape of the endpoint's API.

        Not once the response has begun: then only cutting the connection says that it is broken.
        """
        if not self.send.begun:
            await send_error(self.send, error, error_body(self._endpoint, error), self.request_id)

    async def break_off(self, error: ClientError) -> None:
        """End a stream of events that cannot go on."""
        event = error_event(self._endpoint, error)
        await self.send({"type": "http.response.body", "body": event})

    @property
    def _endpoint(self) -> Endpoint:
        return paths.GENERATING.get(self.path, Endpoint.COMPLETIONS)
