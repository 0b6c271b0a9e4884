"""What goes on beside requests and after them: telling prefill nodes to free what nobody will read, closing."""

import asyncio
import logging
from collections.abc import Coroutine

from pdproxy.drive.means import Means
from pdproxy.errors import Fault, NodeFault
from pdproxy.legs.release import release
from pdproxy.nodes.node import Node
from pdproxy.observe.labels import Leg, Release
from pdproxy.request import Headers
from pdproxy.transport.port import Incoming

_log = logging.getLogger(__name__)


class Errands:
    """Background tasks, all bounded by the release deadline. None outlives `aclose`."""

    def __init__(self, means: Means) -> None:
        self._means = means
        self._running: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        """Errands under way."""
        return len(self._running)

    def release(self, node: Node, model: str, hand_over: str, headers: Headers) -> None:
        """Have ``hand_over`` freed on ``node``. Returns at once; never raises: also good while being cancelled."""
        self._run(self._release(node, model, hand_over, headers))

    def close(self, incoming: Incoming) -> None:
        """Close a response that somebody else reads: there the reading ends in RESET. Returns at once."""
        self._run(incoming.aclose())

    def _run(self, errand: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(errand)
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def aclose(self) -> None:
        """Wait for what is under way; what outlasts the release deadline is given up."""
        if self._running:
            _, late = await asyncio.wait(tuple(self._running), timeout=self._means.terms.release)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    async def _release(self, node: Node, model: str, hand_over: str, headers: Headers) -> None:
        outcome = Release.FAILED
        try:
            await self._try(node, model, hand_over, headers)
            outcome = Release.DONE
        except NodeFault as fault:
            self._means.metrics.leg_failed(Leg.RELEASE, fault.fault)
            _log.warning("release of %s on %s failed: %s", hand_over, node.name, fault.fault)
        finally:
            self._means.metrics.released(outcome)

    async def _try(self, node: Node, model: str, hand_over: str, headers: Headers) -> None:
        """Once more where the connection broke: a release is good any number of times."""
        patience = self._means.terms.release_patience()
        try:
            await release(self._means.transport, node, model, hand_over, patience, headers)
        except NodeFault as fault:
            if fault.fault is not Fault.RESET:
                raise
            await release(self._means.transport, node, model, hand_over, patience, headers)
