"""The wait for a leg's answer, which ends early where active health gives the leg's node up."""

import asyncio
from collections.abc import Callable

from pdproxy.errors import Fault, NodeFault
from pdproxy.nodes.pool_entry import Slot


def node_down_fault() -> NodeFault:
    """The fault of a leg on a node that active health gave up."""
    return NodeFault(Fault.STALL, "active health gave the node up, and nothing has come from it since")


class LegWait:
    """Wait inside for a leg's answer: a STALL fault, as soon as active health has given its node up.

    Where no alternative exists the leg waits on, for the node may come back. It works as `asyncio.timeout` does, by
    cancelling the task and taking that back, and costs a third of one.
    """

    __slots__ = ("_alternative_exists", "_cancelled", "_cancelling", "_handle", "_slot", "_task")

    def __init__(self, slot: Slot, alternative_exists: Callable[[], bool]) -> None:
        self._slot = slot
        self._alternative_exists = alternative_exists
        self._handle: asyncio.Handle | None = None
        self._cancelled = False

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task, self._cancelling = task, task.cancelling()
        self._slot.alarm = self._on_node_down

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        self._slot.alarm = None
        if self._handle is None:
            return
        self._handle.cancel()  # where the wait ended first
        ours = self._cancelled and self._task.uncancel() <= self._cancelling
        if ours and kind is asyncio.CancelledError:
            raise node_down_fault() from error

    def _on_node_down(self) -> None:
        if self._handle is None and self._alternative_exists():  # later, for the task itself may be calling
            self._handle = asyncio.get_running_loop().call_soon(self._cancel)

    def _cancel(self) -> None:
        self._cancelled = True
        self._task.cancel()
