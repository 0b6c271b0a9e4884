"""Requests that wait on a fake decode node until their tickets are delivered, and tickets that came before them."""

import asyncio
import dataclasses
import json
import re
from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any

from tests.fakes.kv_transfer import FakeKvTransfer

if TYPE_CHECKING:
    from tests.fakes.node import Script

TICKETS_PATH = "/v1/pdproxy/tickets"
Params = Mapping[str, Any]
_ID = re.compile(r"[A-Za-z0-9_-]{16,128}")


async def either(*waits: Coroutine[Any, Any, object]) -> None:
    """Return when one of them is done; the others are cancelled. Not the proxy's own: a test counts what that runs."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclasses.dataclass(eq=False)
class WaitingRequest:
    """One request that waits.

    Attributes:
        seconds: after which the node computes the prompt by itself.
        answer: with the params of the ticket, or None to compute.
        leave: the request has ended, or was cut.
    """

    seconds: float
    answer: "Callable[[Params | None], Script]"
    leave: Callable[[], None]
    _told: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    _params: Params | None = None

    @property
    def told(self) -> bool:
        """Whether `tell` was called."""
        return self._told.is_set()

    def tell(self, params: Params | None) -> None:
        """Its ticket is here; None: there is none."""
        if not self._told.is_set():
            self._params = params
            self._told.set()

    async def script(self, sleep: Callable[[float], Coroutine[Any, Any, None]]) -> "Script":
        """The answer, once the ticket is here or the time is over."""
        if not self._told.is_set():
            await either(self._told.wait(), sleep(self.seconds))
        return self.answer(self._params)


class WaitingRoom:
    """All that wait on one node, by their ids.

    Attributes:
        taken: ids of all tickets that prefill nodes sent themselves.
        most: more than that do not wait, and are computed at once.
        deliveries: every well-formed delivery, in order.
    """

    def __init__(self, fabric: FakeKvTransfer) -> None:
        self._fabric = fabric
        self._waiting: dict[str, WaitingRequest] = {}
        self._direct: dict[str, Params] = {}
        self._took: dict[str, Params] = {}
        """Directly sent tickets that came first: what another delivery brings is given back."""
        self._early: dict[str, Params | None] = {}
        self._earlier: dict[str, Params | None] = {}
        self._missed: set[str] = set()
        """Of requests that wait no longer, or never did: their tickets come too late, and are given back."""
        self._missed_earlier: set[str] = set()
        self._seen: set[str] = set()
        self.most = 1024
        self.taken: list[str] = []
        self.deliveries: list[tuple[str, Params | None]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def clear(self) -> None:
        """The process died."""
        self._waiting.clear()
        self._direct.clear()
        self._took.clear()
        for kept in (self._early, self._earlier):
            kept.clear()
        for missed in (self._missed, self._missed_earlier):
            missed.clear()

    def forget(self) -> None:
        """Drop what only tests look at, and what nobody came for since the call before: a soak has no end of it."""
        self.deliveries.clear()
        self.taken.clear()
        self._direct.clear()
        self._took.clear()
        self._seen.clear()
        self._earlier, self._early = self._early, {}
        self._missed_earlier, self._missed = self._missed, set()

    def end_all(self) -> None:
        """The time of all that wait is over: they compute."""
        for wait_id, waiting in tuple(self._waiting.items()):
            del self._waiting[wait_id]
            self._missed.add(wait_id)
            waiting.tell(None)

    def enter(
        self, params: Params, answer: "Callable[[Params | None], Script]", *, streams_responses: bool
    ) -> WaitingRequest:
        """A request with ``pdproxy_wait`` came."""
        asked = params["pdproxy_wait"]
        wait_id, seconds = str(asked["id"]), float(asked["seconds"])
        self._check(wait_id, seconds, params, streams_responses=streams_responses)
        waiting = WaitingRequest(seconds, answer, lambda: self._leave(wait_id, waiting))
        if wait_id in self._early or wait_id in self._earlier:
            waiting.tell(self._early.pop(wait_id) if wait_id in self._early else self._earlier.pop(wait_id))
        elif wait_id in self._direct:
            waiting.tell(self._direct[wait_id])
            self._took[wait_id] = self._direct[wait_id]
        elif len(self._waiting) >= self.most:
            self._missed.add(wait_id)
            waiting.tell(None)
        else:
            self._waiting[wait_id] = waiting
        return waiting

    def deliver(self, raw: bytes) -> int:
        """The status of the answer to a delivery."""
        body = json.loads(raw)
        params = body.get("kv_transfer_params", "missing")
        if body.keys() != {"id", "kv_transfer_params"} or not (params is None or params.get("do_remote_prefill")):
            self._fabric.wrong.append(f"a delivery is {body}")
            return 400
        self.deliveries.append((body["id"], params))
        took = self._took.get(body["id"])
        if took and params and took["remote_request_id"] != params["remote_request_id"]:
            self._fabric.free(str(params["remote_request_id"]))
        elif body["id"] in self._waiting:
            self._waiting[body["id"]].tell(params)
        elif body["id"] in self._missed | self._missed_earlier:
            self._fabric.free(str((params or {}).get("remote_request_id")))
            self._early[body["id"]] = params  # as the connector keeps it: one that was sent twice may come again
        else:
            self._early[body["id"]] = params
        return 202

    def take(self, wait_id: str, params: Params) -> None:
        """A prefill node sent it. Has no effect but for a request that waits, or is still to come."""
        self.taken.append(wait_id)
        if wait_id in self._waiting:
            self._took[wait_id] = params
            self._waiting[wait_id].tell(params)
        elif wait_id not in self._missed | self._missed_earlier | self._early.keys() | self._earlier.keys():
            self._direct[wait_id] = params

    def _check(self, wait_id: str, seconds: float, params: Params, *, streams_responses: bool) -> None:
        again = wait_id in self._seen and not self._fabric.copies_allowed
        if _ID.fullmatch(wait_id) is None or seconds <= 0 or again:
            self._fabric.wrong.append(f"a request waits as {wait_id} for {seconds} s")
        if streams_responses:
            self._fabric.wrong.append("a stream of responses waits: its first events come before its ticket")
        if params.keys() - {"pdproxy_wait", "prompt_token_ids"}:
            self._fabric.wrong.append(f"a request waits with {sorted(params)}")
        self._seen.add(wait_id)

    def _leave(self, wait_id: str, waiting: WaitingRequest) -> None:
        if self._waiting.get(wait_id) is waiting:
            del self._waiting[wait_id]
            if not waiting.told:
                self._missed.add(wait_id)
        waiting.tell(None)
