"""A made-up state of a busy proxy, for screenshots."""

import asyncio
import dataclasses
import itertools

from prometheus_client import CollectorRegistry

from pdproxy.admin.context import AdminContext
from pdproxy.background import Background
from pdproxy.errors import Fault
from pdproxy.failures import Step
from pdproxy.nodes.demand import Advice, Limit
from pdproxy.nodes.drain import Drainer
from pdproxy.nodes.node import Footprint, Node, Role
from pdproxy.nodes.outlier import LegOrigin
from pdproxy.nodes.pool import Pool
from pdproxy.nodes.pool_entry import LegLoad
from pdproxy.observe.labels import Leg, Outcome, Phase, Prediction
from pdproxy.orchestration.in_flight import InFlightRequests, LegFailure
from pdproxy.orchestration.request_record import AnswerRecord, FailureRecord, RequestRecord, Route
from pdproxy.reasons import RouteReason
from pdproxy.request import ClientRequest, Endpoint, HeldBody
from tests.fakes.clock import FakeClock
from tests.fakes.refused import refuse

MODEL = "Qwen3.6-35B-A3B"
ROUTES = (
    # seconds in plan, prefill, hand-over and decode; a phase that has not come is left out
    ("req-9f31c22c13f90123456789abcdef7c29", Endpoint.CHAT, "prefill-0", "decode-0", (0.002, 0.84, 0.05, 6.2)),
    ("agent-7-turn-12", Endpoint.RESPONSES, "prefill-1", "decode-2", (0.002, 2.9, 0.21, 3.4)),
    ("req-40aa1771aa040123456789abcdef7c29", Endpoint.MESSAGES, "", "decode-1", (0.003, 0.0, 0.31, 3.1)),
    ("req-b2d904409d2b0123456789abcdef7c29", Endpoint.CHAT, "prefill-0", "decode-2", (0.002, 1.1, 0.07, 0.9)),
    ("nightly-eval-0388", Endpoint.COMPLETIONS, "prefill-1", "decode-0", (0.002, 1.6, 0.12)),
    ("req-77e5d00d5e770123456789abcdef7c29", Endpoint.CHAT, "prefill-0", "", (0.002, 0.6)),
)
COHORT, UPGRADED = "0.32.0+0.1.0+9c41f07be2d8", "0.33.0+0.1.1+9c41f07be2d8"
REQUESTS = 64
"""For each decode node, in the last minutes."""
PHASES = (Phase.PLAN, Phase.PREFILL, Phase.HANDOVER, Phase.DECODE)


class SampleState:
    """Two prefill and four decode nodes in every condition, six requests, some failures."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.live = InFlightRequests()
        self.pool = Pool(self.clock)
        self._add_nodes()
        self._failures()
        self._hurt()
        self._requests()
        self._hits()
        self._tickets()

    def context(self) -> AdminContext:
        """The context that the page is served from."""
        drainer = Drainer(self.pool, self.clock, Background(self.clock))
        base = AdminContext(self.pool, drainer, CollectorRegistry(), asyncio.Event(), live=self.live, clock=self.clock)
        advice = Advice(prefill=1.6, decode=4.3, limit=Limit.CACHE, minutes=60)
        return dataclasses.replace(base, advice=lambda: advice)

    def _add_nodes(self) -> None:
        roles = [Role.PREFILL] * 2 + [Role.DECODE] * 5
        for role, number in zip(roles, itertools.chain(range(2), range(5)), strict=True):
            cohort = UPGRADED if number == 0 else COHORT
            node = Node(f"{role}-{number}", f"http://{role}-{number}:8000", (role,), MODEL, cohort=cohort)
            self.pool.add(node)
            self.pool.bring_up(node)
            for _ in range(REQUESTS * (role is Role.DECODE)):
                self.pool.acquire(node.name, LegLoad(footprint=Footprint(1, 1))).release()
        self.clock.advance(60)
        self.pool.drain("decode-3")
        refuse(self.pool, "decode-1")
        self.pool.refuse("decode-4", "mamba_cache_mode is 'all' there and 'align' on its partners: set it to 'align'")

    def _hits(self) -> None:
        for way, prompts, tokens, cached in (
            (Route.DISAGGREGATED, 1284, 4136, 3011),
            (Route.LOCAL, 96, 210, 16),
            (Route.RECOMPUTED, 2, 8195, 0),
        ):
            for _ in range(prompts):
                self.live.cache_stats[way].add(tokens, cached)
        for role, prompts, planned, real in ((Role.PREFILL, 1284, 3140, 3011), (Role.DECODE, 88, 150, 148)):
            for number in range(prompts):
                outcome = Prediction.LESS if number % 40 == 0 else Prediction.RIGHT
                self.live.planned_hits[role].add(4136, planned, real, outcome)
        self.live.plans.update(zip(RouteReason, (902, 71, 118, 0, 205, 88), strict=True))

    def _tickets(self) -> None:
        """Two of 1286 tickets were of no use."""
        pair, hand_overs = ("prefill-0", "decode-0"), self.pool.hand_overs
        for _ in range(1284):
            hand_overs.ticket_used(pair, "", self.clock.now())
        for number in range(2):
            hand_overs.ticket_in_vain(pair, LegOrigin(f"req-{number}"), "", self.clock.now())

    def _requests(self) -> None:
        for name, endpoint, prefill, decode, seconds in ROUTES:
            record = AnswerRecord.of(self._request(name, endpoint), self.clock.now)
            record.first.took = dict(zip(PHASES, seconds, strict=False))
            record.first.phase = PHASES[len(seconds) - 1]
            of_phases = {Phase.PREFILL: prefill, Phase.HANDOVER: decode}
            record.first.nodes = {phase: node for phase, node in of_phases.items() if node}
            for each in filter(None, (prefill, decode)):
                self.pool.acquire(each)
            self.live.add(record)

    def _request(self, name: str, endpoint: Endpoint) -> ClientRequest:
        now = self.clock.now()
        return ClientRequest(name, endpoint, HeldBody({}), (), MODEL, True, 0, now, now + 600, lambda: True)

    def _hurt(self) -> None:
        """Whom it hits: of a few hundred requests two, of one key."""
        for key, outcome, count in (("alice", Outcome.FAILED, 2), ("bob", Outcome.OK, 410)):
            request = RequestRecord("req-x", Endpoint.CHAT, Endpoint.CHAT, MODEL, key)
            for _ in range(count):
                self.live.recent.ended(request, self.clock.now(), outcome)

    def _failures(self) -> None:
        told = (
            (
                "req-1d02b77b20d10123456789abcdef7c29",
                Leg.PREFILL,
                "prefill-1",
                Fault.HEADERS_TIMEOUT,
                Step.OTHER_PREFILL,
                Outcome.OK,
            ),
            ("req-c6e018810e6c0123456789abcdef7c29", Leg.DECODE, "decode-1", Fault.RESET, Step.MIGRATE, Outcome.OK),
            (
                "req-58fa3333af850123456789abcdef7c29",
                Leg.DECODE,
                "decode-1",
                Fault.REFUSED,
                Step.SAME_TICKET,
                Outcome.OK,
            ),
        )
        for name, leg, node, fault, step, outcome in told:
            ended = FailureRecord(outcome=outcome)
            self.live.failed(LegFailure(self.clock.now(), name, leg, node, fault, step, ended))
            self.clock.advance(14)
