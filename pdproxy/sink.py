"""The callback that takes pieces of a stream from a node's connection straight to a client's.

Most pieces of a stream need no decision. Passed on within the callback that brought them, they cost no task switch and
no chain of coroutines.
"""

from collections.abc import Callable

Sink = Callable[[bytes], bool]
"""Takes a piece, always. It returns False when no more is to be passed on: the piece or the moment needs a decision.

What it raises is a bug: it ends the exchange that brought the piece, and is raised where the exchange is awaited."""

EXTENSION = "pdproxy.http.sink"
"""The ASGI extension whose ``sink`` is a `Sink` for pieces of a response's body, once the head is out.

It returns False where the client does not keep up, or has disconnected: then use ASGI's ``send``, which waits.
"""
