"""A prompt that a prefill node has computed for a decode node, and how the prefill node is told to free it."""

import logging

import msgspec

from pdproxy.errors import NodeFault
from pdproxy.legs.calls import PrefillAnswer, release
from pdproxy.nodes.node import Node
from pdproxy.observe.labels import Attempt, Leg
from pdproxy.orchestration.context import OrchestrationContext
from pdproxy.request import Headers

_LOG = logging.getLogger(__name__)


class HandOver(msgspec.Struct, frozen=True):
    """A prompt that prefill node ``node`` has computed for a decode node to read; ``issued_at`` monotonic seconds."""

    hand_over_id: str
    node: Node
    answer: PrefillAnswer
    issued_at: float


def release_later(context: OrchestrationContext, node: Node, model: str, hand_over_id: str, headers: Headers) -> None:
    """Have a hand-over freed on its prefill node. Returns at once and never raises, also while being cancelled."""
    context.background.finish("release", _release(context, node, model, hand_over_id, headers))


async def _release(context: OrchestrationContext, node: Node, model: str, hand_over_id: str, headers: Headers) -> None:
    outcome = Attempt.FAILED
    try:
        await release(context.transport, node, model, hand_over_id, context.config.release_timeouts(), headers)
        outcome = Attempt.SUCCEEDED
    except NodeFault as fault:
        context.metrics.leg_failed(Leg.RELEASE, fault.fault)
        _LOG.warning("release of %s on %s failed: %s", hand_over_id, node.name, fault.fault)
    finally:
        context.metrics.released(outcome)
