"""Where bytes go the moment they come: what the ways in from nodes and out to clients have in common.

Most pieces of a stream need nobody's decision. Handed on within the callback that brought them, they cost no task
switch and no chain of coroutines.
"""

from collections.abc import Callable

Sink = Callable[[bytes], bool]
"""Takes a piece, always. False: hand on no more, the piece or the moment asks for a decision.

What it raises is a bug: it ends the exchange that brought the piece, and comes to whoever waits for it."""

EXTENSION = "pdproxy.http.sink"
"""The ASGI extension in which the server offers as ``sink`` a `Sink` for pieces of a response's body, its head being
out.

It says False where the client does not keep up, or has gone: then ASGI's own ``send`` knows how to wait.
"""
