"""A request id that is taken already must not end the engine.

vLLM's scheduler asserts that a new request's id is not a living one's ("duplicate request id"), and a failed assertion
there ends the engine. Two ways lead to it (read in 0.32 and 0.33):

- `AsyncLLM.notify_kv_transfer_request_rejected`, for a request that the API server rejects, sends the engine a
  stand-in under the id that the client wrote into the body. Every other entry point makes the id unique first
  (`InputProcessor.assign_request_id`: 32 random bits behind the client's id; sub-requests of `n` and of a list put
  their number before or after that).
- Those 32 bits may repeat among the living requests to which clients gave one id.

vLLM has no hook before the assertion, so `Scheduler.add_request` is wrapped, once a process, when the engine's
scheduler makes its connector.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any
from uuid import uuid4

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request

log = logging.getLogger("vllm.pdproxy.scheduler")

_WRAPPED = "pdproxy_unique_ids"


def require_unique_ids(scheduler_class: type[Any]) -> None:
    """Wrap `add_request` of vLLM's scheduler; a second call changes nothing."""
    stock = scheduler_class.add_request
    if hasattr(stock, _WRAPPED):
        return

    @functools.wraps(stock)
    def add_request(self: Scheduler, request: Request) -> None:
        if request.abort_immediately:
            request.request_id = f"{request.request_id}-rejected-{uuid4().hex}"
        elif _is_taken(self, request):
            log.error("Request %s is dropped: its id is another living request's.", request.request_id)
            return
        stock(self, request)

    setattr(add_request, _WRAPPED, True)
    scheduler_class.add_request = add_request


def _is_taken(scheduler: Scheduler, request: Request) -> bool:
    """Whether a living request has this id. A session's next input has it rightly: it goes on under the first's id."""
    living = scheduler.requests.get(request.request_id)
    return living is not None and living.streaming_queue is None
