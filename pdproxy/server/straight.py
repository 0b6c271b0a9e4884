"""The way for pieces of a response that need not wait for their turn: ASGI's ``send`` without the coroutine."""

import functools

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from pdproxy.server.outlet import Outlet
from pdproxy.sink import Sink


def straight(cycle: RequestResponseCycle, outlet: Outlet) -> Sink:
    """The sink of one exchange; see `pdproxy.sink.EXTENSION`."""
    return functools.partial(_write, cycle, outlet)


def _write(cycle: RequestResponseCycle, outlet: Outlet, piece: bytes) -> bool:
    """As uvicorn writes a piece of a body whose length is not known."""
    if cycle.disconnected:
        return False
    if cycle.response_complete or not cycle.chunked_encoding:
        raise RuntimeError("only pieces of a body whose length is not known go this way, after its head")
    outlet.write_now(b"%x\r\n%b\r\n" % (len(piece), piece))
    return not cycle.flow.write_paused
