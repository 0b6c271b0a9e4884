"""Drives client requests through their lives: the one door from intake to the nodes."""

import asyncio
import functools

from pdproxy.drive import headers
from pdproxy.drive.account import Account, outcome_of
from pdproxy.drive.errands import Errands
from pdproxy.drive.forward import Forwarded, forward
from pdproxy.drive.job import Job
from pdproxy.drive.means import Means
from pdproxy.drive.passage import Passage
from pdproxy.drive.relay import Relay
from pdproxy.drive.reply import Reply, ReplyStream
from pdproxy.drive.timeline import Timeline
from pdproxy.drive.verdict import Answered
from pdproxy.drive.whole import whole
from pdproxy.errors import ClientError
from pdproxy.fanout import Fan, merged, together
from pdproxy.legs.body import shape, split
from pdproxy.observe.labels import Outcome
from pdproxy.request import ClientRequest

__all__ = ["Forwarded", "Means", "Orchestrator", "Reply", "ReplyStream"]


class Orchestrator:
    """Answers requests with the nodes of the pool.

    Args:
        means: the transport, the pool, the metrics, the clock and the operator's terms.
    """

    def __init__(self, means: Means) -> None:
        self._means = means
        self._errands = Errands(means)

    async def answer(self, request: ClientRequest) -> Reply:
        """The reply to a request for a generating endpoint.

        A streamed reply comes back as soon as its first event is here. An upstream error that is the client's own comes
        back as a `Reply` with the node's status and body. Cancelling the awaiting task, or `aclose` on the reply's
        stream, means that the client has gone: legs end, hand-overs are released, load is given back.

        Raises:
            ClientError: no such model (404), nothing can serve it now (503), all tries failed (502), too late (504).
        """
        account = Account(self._means, request)
        try:
            return await self._answer(request, account)
        except Answered as answered:
            account.end(outcome_of(answered.reply.status))
            reply = answered.reply
            return Reply(reply.status, (*reply.headers, *headers.own(request, account.timeline)), reply.body)
        except ClientError as error:
            account.end(outcome_of(error.status))
            raise
        except asyncio.CancelledError:
            account.end(Outcome.CLIENT_GONE)
            raise
        except BaseException:
            account.end(Outcome.FAILED)
            raise

    async def forward(self, asked: Forwarded) -> Reply:
        """The reply of one suitable node to a request that the proxy does not understand (embeddings, tokenize, …).

        Raises:
            ClientError: as `answer`.
        """
        return await forward(self._means, asked)

    @property
    def errands(self) -> int:
        """Releases under way."""
        return len(self._errands)

    async def aclose(self) -> None:
        """Wait, within the release deadline, for the releases that are still under way."""
        await self._errands.aclose()

    async def _answer(self, request: ClientRequest, account: Account) -> Reply:
        jobs = _jobs(request)
        if len(jobs) > 1:
            return await (self._many_streams if request.stream else self._many)(request, jobs, account)
        return await (self._stream if request.stream else self._one)(request, jobs[0], account)

    async def _one(self, request: ClientRequest, job: Job, account: Account) -> Reply:
        passage = self._passage(job, account.timeline)
        answer = await whole(passage, job)
        return self._completed(request, account, [passage], answer.body)

    async def _many(self, request: ClientRequest, jobs: list[Job], account: Account) -> Reply:
        passages = self._passages(jobs, account)
        parts = [functools.partial(whole, passage, job) for passage, job in zip(passages, jobs, strict=True)]
        answers = await together(parts, self._means.terms.fan_out)
        return self._completed(request, account, passages, merged(answers))

    def _completed(self, request: ClientRequest, account: Account, passages: list[Passage], body: bytes) -> Reply:
        account.timeline.first()
        account.end(Outcome.OK)
        return Reply(200, headers.whole(request, account.timeline, passages), body)

    async def _stream(self, request: ClientRequest, job: Job, account: Account) -> Reply:
        passage = self._passage(job, account.timeline)
        return await self._opened(Relay(self._means, passage, job, account.end), request, account, [passage])

    async def _many_streams(self, request: ClientRequest, jobs: list[Job], account: Account) -> Reply:
        passages = self._passages(jobs, account)
        relays = [
            Relay(self._means, passage, job, _ignore_outcome) for passage, job in zip(passages, jobs, strict=True)
        ]
        fan = Fan(relays, jobs[0].shape.choices, self._means.terms.fan_out, account.end)
        return await self._opened(fan, request, account, passages)

    async def _opened(
        self, stream: Relay | Fan, request: ClientRequest, account: Account, passages: list[Passage]
    ) -> Reply:
        try:
            await stream.open()
        except BaseException:
            await stream.aclose()
            raise
        account.timeline.first()
        return Reply(200, headers.streamed(request, account.timeline, passages), stream)

    def _passages(self, jobs: list[Job], account: Account) -> list[Passage]:
        """The first prompt's phases stand for the request's."""
        others = (Timeline(self._means.clock, self._means.metrics, account.timeline.start) for _ in jobs[1:])
        return [self._passage(job, timeline) for job, timeline in zip(jobs, (account.timeline, *others), strict=True)]

    def _passage(self, job: Job, timeline: Timeline) -> Passage:
        return Passage(self._means, self._errands, job, timeline)


def _jobs(request: ClientRequest) -> list[Job]:
    """One for each prompt."""
    endpoint = request.endpoint
    bodies = split(endpoint, request.body)
    if len(bodies) == 1:
        return [Job(request, bodies[0], shape(endpoint, bodies[0]), request.request_id)]
    names = (f"{request.request_id}-{index}" for index in range(len(bodies)))
    return [Job(request, body, shape(endpoint, body), name) for body, name in zip(bodies, names, strict=True)]


def _ignore_outcome(outcome: Outcome) -> None:
    """One of several prompts has ended; the request's own end counts."""
