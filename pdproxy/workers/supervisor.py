"""``pdproxy serve --workers N``: accepts the clients' connections for N workers, and has the operators' port.

Nothing of a request passes through this process. A worker that ends takes its own streams with it, and is started
again; where none could be started, the supervisor ends with the worker's error.
"""

import asyncio
import contextlib
import dataclasses
import logging
import signal
import socket
import time
from collections.abc import Coroutine, Sequence

from prometheus_client import PLATFORM_COLLECTOR, PROCESS_COLLECTOR, CollectorRegistry, Counter, Gauge

from pdproxy.admin.guard import GuardedPort, RefusalLog, open_port_warning
from pdproxy.credential import read_secret
from pdproxy.errors import SettingsError
from pdproxy.observe.labels import OperatorRefusal, WatchedSetting
from pdproxy.observe.logs import DroppedLines, LineHandler, configure_process
from pdproxy.observe.metrics import operator_refusals
from pdproxy.observe.refused_connections import RefusedConnections
from pdproxy.server.server import (
    OPERATORS_GRACE,
    Server,
    address_of,
    bind,
    http_config,
    raise_file_limit,
    tune_collector,
)
from pdproxy.settings.model import Settings
from pdproxy.workers.acceptor import Acceptor
from pdproxy.workers.division import share_of
from pdproxy.workers.merged_metrics import MergedMetrics
from pdproxy.workers.operators import OperatorsApp
from pdproxy.workers.worker import NoAnswerError, OperatorRequest, Worker, WorkerFailedError, describe

_LOG = logging.getLogger("pdproxy")

FIRST_DELAY, LONGEST_DELAY = 0.2, 30.0
"""Seconds before a worker is started again; twice as long after each further end."""
STABLE_SECONDS = 60.0
"""A worker that ran for as long begins with the first delay again."""
READY_SECONDS = 15.0
"""For a worker that was started again to find its nodes, while others serve; then it gets connections anyway."""
LAST_SECONDS = 15.0
"""For a worker to end, after `deadlines.shutdown`; then it is killed."""


class SupervisorMetrics:
    """What the supervisor counts."""

    def __init__(self, registry: CollectorRegistry, workers: int) -> None:
        self.serving = Gauge("pdproxy_workers", "Workers that get clients' connections.", registry=registry)
        self.exits = Counter(
            "pdproxy_worker_exits_total", "Times that a worker ended by itself.", ["worker"], registry=registry
        )
        self.connections = Counter(
            "pdproxy_worker_connections_total", "Clients' connections given to a worker.", ["worker"], registry=registry
        )
        self._refusals = operator_refusals(registry)
        for number in range(workers):
            self.exits.labels(str(number))
            self.connections.labels(str(number))

    def operator_refused(self, reason: OperatorRefusal) -> None:
        """Count a request that the operators' port refused: workers get none of these."""
        self._refusals.labels(reason).inc()


def supervise(settings: Settings) -> int:
    """Run until SIGTERM or SIGINT; the process's exit status.

    Raises:
        SettingsError: an address or a file of the settings cannot be used, or workers end before they have started.
    """
    log = configure_process(settings.log)
    raise_file_limit()
    workers = [Worker(number, share_of(settings, number)) for number in range(settings.listen.workers)]
    try:
        asyncio.run(_run(settings, workers, log))
    except WorkerFailedError as error:
        raise SettingsError(str(error)) from error
    return 0


async def _run(settings: Settings, workers: Sequence[Worker], log: LineHandler) -> None:
    listen = settings.listen
    with (
        bind(listen.host, listen.port, "listen.port") as clients,
        bind(listen.admin_host, listen.admin_port, "listen.admin_port") as operators,
    ):
        await Supervisor(settings, workers, clients, operators, log).run()


class Supervisor:
    """``clients``, ``operators``: the bound sockets of the two ports."""

    def __init__(
        self,
        settings: Settings,
        workers: Sequence[Worker],
        clients: socket.socket,
        operators: socket.socket,
        log: LineHandler,
    ) -> None:
        self._settings = settings
        self._workers = workers
        self._clients, self._operators_socket = clients, operators
        registry = CollectorRegistry()
        registry.register(PROCESS_COLLECTOR)
        registry.register(PLATFORM_COLLECTOR)
        registry.register(DroppedLines(lambda: log.dropped))
        self._metrics = SupervisorMetrics(registry, len(workers))
        refused = RefusedConnections(registry)
        self._acceptor = Acceptor(clients, self._on_taken, refused.count)
        self._merged = MergedMetrics(registry)
        self._app = OperatorsApp(lambda: sorted(self._running, key=lambda worker: worker.number), self._merged)
        self._running: set[Worker] = set()
        guarded = GuardedPort(self._app, settings.listen, RefusalLog(self._metrics.operator_refused))
        self._operators = Server(http_config(settings, guarded, OPERATORS_GRACE, refused.count), operators)
        self._operating: asyncio.Task[None] | None = None
        self._leaving = asyncio.Event()

    async def run(self) -> None:
        """Until a signal.

        Raises:
            WorkerFailedError: no worker can be started.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._leave)
        try:
            await _until_first(self._start(), self._leaving.wait())
            if not self._leaving.is_set():
                await _until_first(self._leaving.wait(), self._run_operators(), *map(self._keep, self._workers))
        finally:
            await self._end()
        _LOG.info("ended")

    async def _start(self) -> None:
        """Start all workers, then take clients' connections."""
        started = await asyncio.gather(*(worker.start() for worker in self._workers), return_exceptions=True)
        for failure in started:
            if isinstance(failure, BaseException):
                raise failure
        self._acceptor.open()
        self._running.update(self._workers)
        for worker in self._workers:
            self._serve(worker)
        tune_collector()
        self._operators_socket.listen()  # what connects from now on waits until it is served, and is not refused
        addresses = address_of(self._clients), self._operators.address
        _LOG.info("clients: %s, operators: %s, workers: %d", *addresses, len(self._workers))
        if warning := open_port_warning(self._settings.listen):
            _LOG.warning(warning)

    async def _run_operators(self) -> None:
        """Shielded: the port stays open until the last worker has ended."""
        self._operating = asyncio.create_task(self._operators.run_port())
        await asyncio.shield(self._operating)

    async def _keep(self, worker: Worker) -> None:
        """Start a worker again whenever it has ended."""
        delay = FIRST_DELAY
        while True:
            began = time.monotonic()
            status = await worker.ended()
            self._drop(worker)
            self._metrics.exits.labels(str(worker.number)).inc()
            if time.monotonic() - began > STABLE_SECONDS:
                delay = FIRST_DELAY
            text = "worker %d %s, and its requests with it; it is started again in %g s"
            _LOG.error(text, worker.number, describe(status), delay)
            await asyncio.sleep(delay)
            delay = min(2 * delay, LONGEST_DELAY)
            await self._start_again(worker)

    async def _start_again(self, worker: Worker) -> None:
        """Raises WorkerFailedError: it cannot be started, and no other one runs."""
        try:
            await worker.start()
        except WorkerFailedError as error:
            if not self._running:
                raise
            _LOG.error("worker %d: %s", worker.number, error)
            return
        self._running.add(worker)  # before it is told what operators changed, so that it misses nothing
        await self._tell_changes(worker)
        await self._until_ready(worker)
        self._serve(worker)
        _LOG.info("worker %d serves again", worker.number)

    async def _tell_changes(self, worker: Worker) -> None:
        """Nodes that operators have added, drained or removed since the start."""
        for request in self._app.changes.all():
            try:
                token = read_secret(self._settings.listen.admin_token_file, WatchedSetting.ADMIN_TOKEN)
                headers = {**request.headers, "authorization": f"Bearer {token}"}  # it may have been rotated
                answer = await worker.ask_again(dataclasses.replace(request, headers=headers))
                said = "" if answer.ok else f"{answer.status} {answer.body.decode(errors='replace')}"
            except (NoAnswerError, SettingsError) as error:
                said = str(error)
            if said:
                _LOG.warning("worker %d, %s %s: %s", worker.number, request.method, request.target, said)

    async def _until_ready(self, worker: Worker) -> None:
        """Its nodes have to join first. Without another worker, it may as well tell clients so itself."""
        end = time.monotonic() + READY_SECONDS
        while len(self._acceptor) and time.monotonic() < end:
            with contextlib.suppress(NoAnswerError):
                if (await worker.ask(OperatorRequest("GET", "/ready"))).ok:
                    return
            await asyncio.sleep(0.1)

    def _serve(self, worker: Worker) -> None:
        """Give the worker connections from now on."""
        self._acceptor.add(worker)
        self._metrics.serving.set(len(self._acceptor))

    def _drop(self, worker: Worker) -> None:
        """It has ended."""
        self._running.discard(worker)
        self._merged.retire(worker.number)
        self._acceptor.remove(worker)
        self._metrics.serving.set(len(self._acceptor))

    def _on_taken(self, worker: Worker) -> None:
        self._metrics.connections.labels(str(worker.number)).inc()

    def _leave(self) -> None:
        """Begin the shutdown; at a second call the workers end at once."""
        if self._leaving.is_set():
            _LOG.warning("ending at once: running requests are cut")
            self._signal_all()
        self._leaving.set()

    def _signal_all(self) -> None:
        for worker in self._workers:
            worker.signal(signal.SIGTERM)

    async def _end(self) -> None:
        """No new connections; the workers' streams get their time, and operators can look until then."""
        self._leaving.set()
        self._acceptor.close()
        self._signal_all()
        ending = [asyncio.create_task(worker.ended()) for worker in self._workers]
        await asyncio.wait(ending, timeout=self._settings.deadlines.shutdown + LAST_SECONDS)
        for worker in self._workers:
            worker.kill()
        await asyncio.gather(*ending)
        self._operators.should_exit = True
        if self._operating is not None:
            await self._operating


async def _until_first(*work: Coroutine[None, None, object]) -> None:
    """Run until the first of several ends, and cancel the others. Raises what that one raised."""
    tasks = [asyncio.create_task(each) for each in work]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
