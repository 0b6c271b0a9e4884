"""Everything the proxy consists of, put together."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator

from prometheus_client import GC_COLLECTOR, PLATFORM_COLLECTOR, PROCESS_COLLECTOR, CollectorRegistry

from pdproxy.admin.app import admin_app
from pdproxy.admin.context import AdminContext
from pdproxy.app.host import HostEnvironment, Sources, node_tls, own_credential, own_headers, read_secret
from pdproxy.app.task_supervisor import TaskSupervisor
from pdproxy.clock import SystemClock
from pdproxy.intake.admission import Admission, BodyBudget
from pdproxy.intake.api_app import ApiApp, AsgiApp
from pdproxy.intake.auth import read_keys
from pdproxy.intake.handler import HandlerConfig, RequestHandler
from pdproxy.nodes.discovery.sync import DiscoverySync
from pdproxy.nodes.drain import Drainer
from pdproxy.nodes.health_check import HealthCheck, HealthCheckConfig
from pdproxy.nodes.join import Joiner
from pdproxy.nodes.node import Node, Role
from pdproxy.nodes.node_entry import CircuitBreakerConfig, MetricsPoolObserver
from pdproxy.nodes.pool import Pool
from pdproxy.nodes.preflight import Preflight
from pdproxy.nodes.proof import Prover, WarmUp
from pdproxy.nodes.reachability import OutageLog
from pdproxy.observe.labels import Task
from pdproxy.observe.metrics import Metrics
from pdproxy.observe.tracing import TracedApp, Tracing, tracing_of
from pdproxy.orchestration.context import OrchestrationConfig, OrchestrationContext
from pdproxy.orchestration.known_answer import KnownAnswer
from pdproxy.orchestration.orchestrator import Orchestrator
from pdproxy.orchestration.resources import BackgroundTasks
from pdproxy.planning.plan import WithoutPrefill
from pdproxy.settings.model import ConfiguredNode, Settings
from pdproxy.settings.types import FirstHandOver, OnPrefillFailure
from pdproxy.transport.h1_client import H1Transport
from pdproxy.transport.httpx_transport import HttpxTransport
from pdproxy.transport.port import Transport
from pdproxy.transport.traced import TracedTransport


@dataclasses.dataclass(frozen=True, slots=True)
class Proxy:
    """A proxy that runs: its two applications, and what tells it to go.

    Attributes:
        clients: the ASGI application for clients.
        operators: the ASGI application for operators.
        leaving: to be set when the end begins.
    """

    clients: AsgiApp
    operators: AsgiApp
    leaving: asyncio.Event


def nodes_of(entries: tuple[ConfiguredNode, ...]) -> list[Node]:
    """The nodes of the settings, named by role and order: ``prefill-0``, ``decode-1``."""
    counts = dict.fromkeys(Role, 0)
    nodes = []
    for entry in entries:
        role = Role(entry.role)
        name = f"{role}-{counts[role]}"
        counts[role] += 1
        nodes.append(Node(name, entry.url.rstrip("/"), role, entry.model, entry.aliases, entry.weight))
    return nodes


@contextlib.asynccontextmanager
async def proxy(settings: Settings, around: HostEnvironment) -> AsyncIterator[Proxy]:
    """Build, watch the nodes while inside, then let go of everything.

    Raises:
        SettingsError: a file that the settings name cannot be used.
    """
    clock, registry, leaving = SystemClock(), _registry(), asyncio.Event()
    metrics = Metrics(registry)
    credential = own_credential(settings.upstream)
    headers = own_headers(credential)
    pool = _pool(settings, clock, metrics)
    sources = Sources(settings.discovery, clock, around)
    tracing = tracing_of(settings.otel)
    trust = node_tls(settings.upstream)
    transport, questions = traced(H1Transport(clock, trust), tracing), HttpxTransport(trust)
    drainer = Drainer(pool, clock, settings.deadlines.drain)
    context = OrchestrationContext(transport, pool, metrics, clock, orchestration_config(settings))
    orchestrator = Orchestrator(context)
    service = _service(settings, orchestrator, pool, metrics, clock, credential)
    operators = admin_app(_desk(settings, context, drainer, registry, leaving))
    background_tasks = BackgroundTasks(context)
    test = KnownAnswer(context, background_tasks, headers)
    prover = Prover(pool, test, clock) if settings.health.first_hand_over is FirstHandOver.KNOWN_ANSWER else None
    outages = OutageLog(clock)
    joiner = Joiner(pool, Preflight(questions, headers), prover or WarmUp(pool, test), outages)
    health = HealthCheck(pool, joiner, transport, clock, _health_rules(settings), headers, outages)
    keeper = TaskSupervisor(clock, metrics)
    keeper.keep(Task.HEALTH, health.run)
    if prover is not None:
        keeper.keep(Task.PROOF, prover.run)
    for source in sources.all:
        keeper.keep(Task.DISCOVERY, DiscoverySync(pool, drainer, source, settings.deadlines.drain).run)
    try:
        door = ApiApp(service, operators)
        yield Proxy(TracedApp(door, tracing.tracer) if tracing else door, operators, leaving)
    finally:
        await keeper.aclose()
        await sources.aclose()
        await drainer.aclose()
        await orchestrator.aclose()
        await background_tasks.aclose()
        await transport.aclose()
        await questions.aclose()
        if tracing:
            await asyncio.to_thread(tracing.close)


def traced(transport: Transport, tracing: Tracing | None) -> Transport:
    """The transport with a span around each call, where tracing is on."""
    return TracedTransport(transport, tracing.tracer) if tracing else transport


def _registry() -> CollectorRegistry:
    registry = CollectorRegistry()
    for collector in (PROCESS_COLLECTOR, PLATFORM_COLLECTOR, GC_COLLECTOR):
        registry.register(collector)
    return registry


def _pool(settings: Settings, clock: SystemClock, metrics: Metrics) -> Pool:
    health = settings.health
    rules = CircuitBreakerConfig(failures=health.failures, cool_down=health.cool_down, slow_start=health.slow_start)
    pool = Pool(clock, rules, MetricsPoolObserver(metrics))
    for node in nodes_of(settings.nodes):
        pool.add(node)
    return pool


def _health_rules(settings: Settings) -> HealthCheckConfig:
    return HealthCheckConfig(interval=settings.health.interval, timeout=settings.health.timeout)


def orchestration_config(settings: Settings) -> OrchestrationConfig:
    """The part of the settings that the drive goes by."""
    deadlines, policy = settings.deadlines, settings.policy
    return OrchestrationConfig(
        connect=deadlines.connect,
        prefill_headers=deadlines.prefill_headers,
        decode_headers=deadlines.decode_headers,
        stall=deadlines.stall,
        release=deadlines.release,
        on_prefill_failure=policy.on_prefill_failure,
        retries=policy.retries,
        migrations=policy.migrations,
        local_below_tokens=policy.local_below_tokens,
        ticket_life=policy.ticket_life,
    )


def _service(
    settings: Settings, orchestrator: Orchestrator, pool: Pool, metrics: Metrics, clock: SystemClock, credential: str
) -> RequestHandler:
    limits = settings.limits
    admission = Admission(limits.concurrency, limits.queue, limits.queue_seconds, metrics, limits.key_concurrency)
    budget = BodyBudget(limits.held_bytes, metrics)
    rules = HandlerConfig(
        body_bytes=limits.body_bytes,
        upload_seconds=settings.deadlines.stall,
        request_seconds=settings.deadlines.request,
        credential=settings.upstream.credential,
        own=credential,
    )
    return RequestHandler(read_keys(settings.keys.file), admission, budget, orchestrator, pool, clock, rules)


def _desk(
    settings: Settings,
    context: OrchestrationContext,
    drainer: Drainer,
    registry: CollectorRegistry,
    leaving: asyncio.Event,
) -> AdminContext:
    fails = settings.policy.on_prefill_failure is OnPrefillFailure.FAIL
    return AdminContext(
        pool=context.pool,
        drainer=drainer,
        registry=registry,
        leaving=leaving,
        without_prefill=WithoutPrefill.FAIL if fails else WithoutPrefill.LOCAL,
        drain_seconds=settings.deadlines.drain,
        token=read_secret(settings.listen.admin_token_file, "listen.admin_token_file") or None,
        live=context.live,
        clock=context.clock,
    )
