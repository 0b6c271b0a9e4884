"""One hand-over that the proxy makes for itself: a prompt through a prefill and a decode node, and what came of it."""

import dataclasses
import functools
from collections.abc import Callable

import msgspec

from pdproxy.clock import Clock
from pdproxy.credential import OwnHeaders
from pdproxy.errors import NodeFault, PdproxyError
from pdproxy.legs.calls import NOTHING_HELD, decode, prefill, raise_if_aborted, read_answer
from pdproxy.legs.rewrite import decode_body, prefill_body
from pdproxy.nodes.no_hand_over import EXPLAIN, HANDED_OVER, SideChannel, read_told, sentence
from pdproxy.nodes.node import Node
from pdproxy.random_ids import random_ids
from pdproxy.request import Endpoint, Json, read_json, write_json
from pdproxy.transport.port import Timeouts, Transport
from pdproxy.usage import read_usage

TIMEOUTS = Timeouts(connect=5.0, headers=50.0, stall=50.0, whole=60.0)
"""Timeouts of each leg: longer than a node waits for a read (``pdproxy_read_deadline``, 30 s), because the node answers
then and tells why; and longer than a node takes for a prompt on a busy host."""
_TINY_PROMPT = (1, 2, 3, 4)
"""Token ids that any vocabulary has; the prefill node drops the last one, so there must be several."""


class Unanswered(PdproxyError):
    """A node cannot be asked now; the message says why."""


class NotHandedOver(PdproxyError):
    """The decode node did not read the ticket; the message says why, and what to change."""


@dataclasses.dataclass(frozen=True, slots=True)
class TestedPair:
    """Two nodes, and the monotonic second by which their test must be over."""

    prefill: Node
    decode: Node
    deadline: float


@dataclasses.dataclass(frozen=True, slots=True)
class HandOverCalls:
    """Makes hand-overs.

    Attributes:
        headers: what the nodes want to see, such as their credential.
        release: frees a hand-over on its prefill node; returns at once.
        new_id: must return unguessable ids.
    """

    transport: Transport
    clock: Clock
    headers: OwnHeaders
    release: Callable[[Node, str], None]
    new_id: Callable[[], str] = dataclasses.field(default_factory=lambda: random_ids().__next__)

    async def make(self, pair: TestedPair, body: Json, endpoint: Endpoint = Endpoint.COMPLETIONS) -> Json:
        """The decode node's answer to a body with a ticket of the prefill node.

        Raises:
            NodeFault: of the decode leg.
            NotHandedOver: the decode node did not read the ticket.
            Unanswered: there is no ticket, or no time left.
        """
        hand_over_id, held = self.new_id(), True
        copies = [hand_over_id]
        leg = prefill_body(endpoint, body, hand_over_id, readers=1)
        try:
            try:
                given = await prefill(
                    self.transport, pair.prefill, endpoint, leg, self.headers(), self.within(pair, TIMEOUTS),
                    functools.partial(copies.append, hand_over_id),
                )  # fmt: skip
            except NodeFault as fault:
                held = fault.fault not in NOTHING_HELD
                raise Unanswered(f"{pair.prefill.name} gave no ticket: {detail(fault)}") from fault
            ticket = read_json(bytes(given.ticket))
            asking = msgspec.Raw(write_json({**ticket, EXPLAIN: True}))
            answer = await self.decode(pair, body, asking, endpoint)
            told, usage = read_told(answer), read_usage(answer.get("usage"))
            recomputed = usage is not None and usage.recomputed(pair.prefill.tail_tokens)
            held = told.cause not in HANDED_OVER if told.cause else recomputed
        finally:
            if held or len(copies) > 1:
                self.release(pair.prefill, hand_over_id)
        if held:
            raise NotHandedOver(sentence(pair.prefill, pair.decode, SideChannel.of_ticket(ticket), told))
        return answer

    async def make_tiny(self, prefill: Node, decode: Node, within: float) -> None:
        """Hand a prompt of a few tokens over, in so many seconds; raises as `make`."""
        body = {"model": decode.model, "prompt": list(_TINY_PROMPT), "max_tokens": 1, "temperature": 0}
        await self.make(TestedPair(prefill, decode, self.clock.now() + within), body)

    async def decode(self, pair: TestedPair, body: Json, ticket: msgspec.Raw | None, endpoint: Endpoint) -> Json:
        """A decode leg's answer; raises its `NodeFault`, or `Unanswered` where no time is left."""
        timeouts = self.within(pair, TIMEOUTS)
        leg = decode_body(body, ticket)
        response = await decode(self.transport, pair.decode, endpoint, leg, self.headers(), timeouts, stream=False)
        answer = await read_answer(response)
        raise_if_aborted(endpoint, answer)
        return answer

    def within(self, pair: TestedPair, timeouts: Timeouts) -> Timeouts:
        """The same, as far as time is left; raises `Unanswered` where none is."""
        left = pair.deadline - self.clock.now()
        if left <= 0:
            raise Unanswered(f"{pair.prefill.name} and {pair.decode.name} took too long")
        return msgspec.structs.replace(timeouts, whole=min(timeouts.whole, left))


def detail(fault: NodeFault) -> str:
    """A fault for the log, with the beginning of the node's error body."""
    return f"{fault}: {fault.body[:_LOGGED_BYTES].decode('utf-8', 'replace')}" if fault.body else str(fault)


_LOGGED_BYTES = 300
