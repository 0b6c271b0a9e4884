"""A leg whose node active health gives up need not wait for its own deadline."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from pdproxy.errors import Fault, NodeFault
from pdproxy.nodes.pool import Occupied

DETAIL = "active health gave the node up, and nothing has come from it since"


def silent() -> NodeFault:
    """The fault of such a node."""
    return NodeFault(Fault.STALL, DETAIL)


@asynccontextmanager
async def unless_given_up(place: Occupied, worth: Callable[[], bool]) -> AsyncIterator[None]:
    """Wait inside for an answer.

    Args:
        place: the leg's on its node.
        worth: whether giving up leads anywhere; else the leg waits on, for the node may come back.

    Raises:
        NodeFault: STALL, as soon as active health has given the node up.
    """
    now = asyncio.get_running_loop().time
    scope = asyncio.timeout(None)
    try:
        async with scope:
            place.when_given_up(lambda: scope.reschedule(now()) if worth() and not scope.expired() else None)
            try:
                yield
            finally:
                place.when_given_up(None)
    except TimeoutError as error:
        if not scope.expired():
            raise
        raise silent() from error
