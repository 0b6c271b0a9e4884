"""What a decode leg told of itself in the end, put into the metrics."""

import logging

from pdproxy.drive.errands import Errands
from pdproxy.drive.handover import HandOver
from pdproxy.drive.hits import Way
from pdproxy.drive.job import Job
from pdproxy.drive.means import Means
from pdproxy.legs.tally import Tally
from pdproxy.observe.labels import Tokens

_log = logging.getLogger(__name__)


def settle(means: Means, errands: Errands, job: Job, hand_over: HandOver | None, tally: Tally) -> bool:
    """Count tokens, and whether the ticket was of use; True where the node computed the prompt all the same.

    What it did not read is released.
    """
    recomputed = hand_over is not None and tally.recomputed
    means.metrics.tokens(Tokens.PROMPT, tally.prompt or 0)
    means.metrics.tokens(Tokens.COMPLETION, tally.completion or 0)
    cached = _cached(hand_over, tally, recomputed=recomputed)
    means.metrics.tokens(Tokens.CACHED, cached)
    means.live.hits.count(_way(hand_over, recomputed=recomputed), tally.prompt or 0, cached)
    if hand_over is not None and recomputed:
        means.metrics.recomputed()
        _log.warning("request %s: the decode node computed the prompt again", job.name)
        errands.release(hand_over.node, job.request.model, hand_over.name, job.headers)
    return recomputed


def _cached(hand_over: HandOver | None, tally: Tally, *, recomputed: bool) -> int:
    if hand_over is None or recomputed:
        return tally.cached or 0
    return hand_over.cached_tokens or 0


def _way(hand_over: HandOver | None, *, recomputed: bool) -> Way:
    if hand_over is None:
        return Way.LOCAL
    return Way.RECOMPUTED if recomputed else Way.DISAGGREGATED
