"""One HTTP exchange with a client, as the handlers get it."""

import dataclasses

from pdproxy.errors import ClientError
from pdproxy.intake.asgi import Message, Receive, Send, send_error
from pdproxy.request import Headers


class Sender:
    """ASGI's send, which remembers whether the response has begun."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._begun = False

    async def __call__(self, message: Message) -> None:
        self._begun = True
        await self._send(message)

    async def refuse(self, error: ClientError, name: str) -> None:
        """Send an error, unless the response has begun: then only cutting the connection says that it is broken."""
        if not self._begun:
            await send_error(self, error, name)


@dataclasses.dataclass(frozen=True, slots=True)
class Exchange:
    """A request's head, and the two halves of its connection.

    Attributes:
        query: with its question mark, or "".
        request_id: for logs and the response.
    """

    method: str
    path: str
    query: str
    headers: Headers
    request_id: str
    receive: Receive
    send: Sender
