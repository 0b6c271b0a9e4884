"""The composition root: everything the proxy consists of, built from the settings, and closed at the end."""

import asyncio
import collections
import contextlib
import dataclasses
import functools
import itertools
from collections.abc import AsyncIterator, Callable, Iterator

from opentelemetry.trace import Tracer
from prometheus_client import GC_COLLECTOR, PLATFORM_COLLECTOR, PROCESS_COLLECTOR, CollectorRegistry

from pdproxy.admin.app import admin_app
from pdproxy.admin.commands import Commands
from pdproxy.admin.context import AdminContext
from pdproxy.admin.guard import GuardedPort, RefusalLog
from pdproxy.app.files import INTERVAL, FileWatcher
from pdproxy.app.host import HostEnvironment, Secrets, Sources, transports
from pdproxy.app.kv_events import KvEvents, kv_events
from pdproxy.app.sizing import EVERY, SizingWatch
from pdproxy.background import Background
from pdproxy.clock import Clock, SystemClock
from pdproxy.credential import Secret
from pdproxy.intake.auth import OpenRequests
from pdproxy.intake.body import BodyBudget, BodyReader
from pdproxy.intake.browsers import below, for_origins
from pdproxy.intake.exchange import AsgiApp
from pdproxy.intake.handler import ApiApp, HandlerConfig, RequestHandler
from pdproxy.intake.rate_limits import RateLimits
from pdproxy.intake.routes import shown_to_clients
from pdproxy.nodes.cache_advice import EventsSeen
from pdproxy.nodes.circuit_breaker import CircuitBreakerConfig
from pdproxy.nodes.cohorts import Cohorts
from pdproxy.nodes.demand import Wanted
from pdproxy.nodes.discovery.source import DiscoverySync
from pdproxy.nodes.drain import Drainer
from pdproxy.nodes.health_check import HealthCheck
from pdproxy.nodes.join import Joiner, OutageLog
from pdproxy.nodes.node import Node
from pdproxy.nodes.pool import Pool
from pdproxy.nodes.preflight import Preflight
from pdproxy.nodes.proof import NothingCompared, Prover, warm_up
from pdproxy.nodes.silence import SilenceConfig, SilenceWatch
from pdproxy.observe.labels import Task
from pdproxy.observe.metrics import Metrics
from pdproxy.observe.refused_connections import RefusedConnections
from pdproxy.observe.tracing import TracedApp, tracing_of
from pdproxy.orchestration.context import OrchestrationConfig, OrchestrationContext
from pdproxy.orchestration.keeping import Keeping
from pdproxy.orchestration.known_answer import KnownAnswer
from pdproxy.orchestration.orchestrator import Orchestrator
from pdproxy.orchestration.prefix_source import CombinedSource, PrefixSource
from pdproxy.orchestration.request_queue import QueueLimits
from pdproxy.orchestration.text_prefix_source import TextPrefixSource
from pdproxy.planning.conversations import Conversations
from pdproxy.planning.policies import policy_named
from pdproxy.planning.shares import LimitsByKey
from pdproxy.random_ids import random_ids
from pdproxy.settings.model import ConfiguredNode, Settings
from pdproxy.settings.types import FirstHandOver, Keep, Routing, kind_of_node
from pdproxy.transport.port import Transport
from pdproxy.transport.traced import TracedTransport


@dataclasses.dataclass(frozen=True, slots=True)
class Proxy:
    """A running proxy: the ASGI applications of both ports; ``leaving`` is to be set when the shutdown begins; further
    ``files`` may be watched, and metrics be put on the ``registry``; ``refused`` is to be told of connections.
    """

    clients: AsgiApp
    operators: AsgiApp
    leaving: asyncio.Event
    files: FileWatcher
    registry: CollectorRegistry
    refused: RefusedConnections


@contextlib.asynccontextmanager
async def proxy(settings: Settings, host: HostEnvironment) -> AsyncIterator[Proxy]:
    """Build everything and watch the nodes while inside; then close everything.

    Raises:
        SettingsError: a file that the settings name cannot be used.
    """
    clock, registry, leaving = SystemClock(), CollectorRegistry(), asyncio.Event()
    for collector in (PROCESS_COLLECTOR, PLATFORM_COLLECTOR, GC_COLLECTOR):
        registry.register(collector)
    metrics = Metrics(registry)
    secrets = Secrets(settings, files := FileWatcher(metrics), metrics)
    headers = secrets.credential.headers
    pool = _pool(settings, clock, metrics)
    sources = Sources(settings.discovery, clock, host)
    tracing = tracing_of(settings.otel, metrics.spans)
    h1_transport, preflight_transport = transports(settings.upstream, clock, files, metrics)
    tracer = tracing.tracer if tracing else None
    transport = TracedTransport(h1_transport, tracer) if tracer else h1_transport
    texts = TextPrefixSource(pool, clock)
    background = Background(clock, metrics.task_failed, patience=settings.deadlines.release)
    events = kv_events(settings, pool, transport, clock, metrics, headers, texts, background)
    prefixes = CombinedSource(events.source, texts) if events else texts
    limits = secrets.keys.limits
    context = _orchestration_context(settings, transport, pool, metrics, clock, prefixes, limits, tracer, background)
    orchestrator = Orchestrator(context)
    handler = _request_handler(settings, orchestrator, context, secrets)
    sizing = SizingWatch(context, Wanted(**settings.sizing.model_dump()))
    test = KnownAnswer(context, headers)
    compares = settings.health.first_hand_over is FirstHandOver.KNOWN_ANSWER
    prover = Prover(pool, test if compares else NothingCompared(test), clock)
    prove = prover.join if compares else functools.partial(warm_up, pool, test, clock)
    proved: Callable[[str], bool] = prover.proved if compares else lambda _: True
    drainer = Drainer(pool, clock, background, settings.deadlines.drain, Cohorts(pool, proved).is_needed)
    admin_context = _admin_context(settings, context, drainer, registry, leaving, events, secrets.admin_token)
    metrics.nodes.watch_hand_overs(lambda: admin_context.hand_overs.fail)
    admin = admin_app(dataclasses.replace(admin_context, advice=sizing.advice, proved=proved))
    operators = GuardedPort(admin, settings.listen, RefusalLog(metrics.operator_refused))
    outages = OutageLog(clock)
    joiner = Joiner(pool, Preflight(preflight_transport, headers), prove, outages)
    health = HealthCheck(pool, joiner, transport, clock, headers, settings.health.interval, settings.health.timeout)
    background.run_forever(Task.HEALTH, health.run)
    if settings.health.silence:
        watch = SilenceWatch(pool, transport, clock, outages, metrics, _silence_config(settings), headers)
        background.run_forever(Task.SILENCE, watch.run)
    background.every(Task.FILES, INTERVAL, files.look)
    background.every(Task.SIZING, EVERY, sizing.look)
    background.every(Task.PROOF, 1.0, prover.look)
    if events is not None:
        background.run_forever(Task.EVENTS, events.subscriber.run)
    if sources.all:
        background.run_forever(Task.DISCOVERY, DiscoverySync(pool, drainer, sources.all, settings.deadlines.drain).run)
    try:
        api = ApiApp(handler, admin, shown_to_clients(settings.listen.metrics))
        clients = below(for_origins(TracedApp(api, tracer), settings.listen.cors_origins), settings.listen.root_path)
        yield Proxy(clients, operators, leaving, files, registry, RefusedConnections(registry))
    finally:
        for each in (background, sources, transport, preflight_transport):
            await each.aclose()
        if tracing:
            await asyncio.to_thread(tracing.close)


def nodes_of(entries: tuple[ConfiguredNode, ...]) -> list[Node]:
    """The nodes of the settings, named by roles and order: ``prefill-0``, ``decode-1``, ``node-0`` for both."""
    numbers = collections.defaultdict[str, Iterator[int]](itertools.count)
    kinds = [kind_of_node(each.roles) for each in entries]
    return [
        Node(f"{kind}-{next(numbers[kind])}", each.url, each.roles, each.model, each.aliases, each.weight)
        for kind, each in zip(kinds, entries, strict=True)
    ]


def _pool(settings: Settings, clock: SystemClock, metrics: Metrics) -> Pool:
    health = settings.health
    config = CircuitBreakerConfig(failures=health.failures, cool_down=health.cool_down, slow_start=health.slow_start)
    pool = Pool(clock, config, metrics)
    for node in nodes_of(settings.nodes):
        pool.add(node)
    return pool


def _silence_config(settings: Settings) -> SilenceConfig:
    health = settings.health
    return SilenceConfig(health.silence, health.silence_timeout, health.silence_share, settings.policy.on_no_decode)


def _orchestration_context(
    settings: Settings,
    transport: Transport,
    pool: Pool,
    metrics: Metrics,
    clock: Clock,
    source: PrefixSource,
    limits: LimitsByKey,
    tracer: Tracer | None,
    background: Background,
) -> OrchestrationContext:
    config, policy = orchestration_config(settings), settings.policy
    known = source if policy.routing is Routing.CACHE else None
    conversations = Conversations(policy.keep, random_ids().__next__, limits, policy.keep_longest)
    keeping = Keeping(conversations, clock, metrics.keeps, known)
    return OrchestrationContext(
        transport,
        pool,
        metrics,
        clock,
        config,
        prefix_source=known,
        keeping=None if policy.keep is Keep.OFF else keeping,
        key_limits=limits,
        tracer=tracer,
        background=background,
    )


def orchestration_config(settings: Settings) -> OrchestrationConfig:
    """The settings that orchestration uses."""
    deadlines, policy, limits = settings.deadlines, settings.policy, settings.limits
    return OrchestrationConfig(
        connect=deadlines.connect,
        prefill_headers=deadlines.prefill_headers,
        decode_headers=deadlines.decode_headers,
        stall=deadlines.stall,
        release=deadlines.release,
        on_prefill_failure=policy.on_prefill_failure,
        on_no_decode=policy.on_no_decode,
        retries=policy.retries,
        migrations=policy.migrations,
        routing_policy=policy_named(policy.routing, policy.itl_budget),
        ticket_life=policy.ticket_life,
        queue=QueueLimits(limits.concurrency, limits.queue, limits.queue_seconds, limits.reserve),
        decode_fill=limits.decode_fill,
    )


def _request_handler(
    settings: Settings, orchestrator: Orchestrator, context: OrchestrationContext, secrets: Secrets
) -> RequestHandler:
    limits, metrics = settings.limits, context.metrics
    open_requests, budget = OpenRequests(limits.key_concurrency, metrics), BodyBudget(limits.held_bytes, metrics)
    rates, bodies = RateLimits(context.clock, metrics), BodyReader(limits.body_bytes, settings.deadlines.stall)
    config = HandlerConfig(
        request_seconds=settings.deadlines.request,
        credential=settings.upstream.credential,
        own=secrets.credential,
        routing=settings.policy.routing,
        keep=settings.policy.keep,
        sse_keep_alive=settings.listen.sse_keep_alive,
    )
    return RequestHandler(
        secrets.keys, open_requests, rates, budget, bodies, orchestrator, context.pool, context.clock, config
    )


def commands_of(settings: Settings) -> Commands:
    """Makes commands for the operator that reach the operators' port and the nodes as this proxy does."""
    upstream, token_file = settings.upstream, settings.listen.admin_token_file
    given = {
        "--upstream-credential-file": upstream.credential_file,
        "--upstream-ca-file": upstream.ca_file,
        "--upstream-server-name": upstream.server_name,
    }
    options = tuple(word for option, value in given.items() if value for word in (option, str(value)))
    return Commands(str(token_file or ""), options)


def _admin_context(
    settings: Settings,
    context: OrchestrationContext,
    drainer: Drainer,
    registry: CollectorRegistry,
    leaving: asyncio.Event,
    events: KvEvents | None,
    token: Secret,
) -> AdminContext:
    return AdminContext(
        pool=context.pool,
        drainer=drainer,
        registry=registry,
        leaving=leaving,
        on_prefill_failure=settings.policy.on_prefill_failure,
        on_no_decode=settings.policy.on_no_decode,
        drain_seconds=settings.deadlines.drain,
        token=token,
        commands=commands_of(settings),
        live=context.in_flight,
        clock=context.clock,
        queue=context.queue.status,
        caches=events.statuses if events else lambda _: (),
        events=events.seen if events else lambda _: EventsSeen.UNKNOWN,
        orchestration=context,
    )
