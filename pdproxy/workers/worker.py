"""One worker as the supervisor sees it: a process, the channel to it, and HTTP requests to its operators' side."""

import asyncio
import contextlib
import dataclasses
import http.client
import signal
import socket
import sys
import time

from pdproxy.errors import PdproxyError
from pdproxy.settings.model import Settings
from pdproxy.workers.channel import READY, Connection, hand_over

START_SECONDS = 120.0
"""For a worker to start; more than the slowest machine needs."""
ANSWER_SECONDS = 5.0
"""For a worker to answer an operator's request."""
CHANGE_SECONDS = 60.0
"""For a worker that has just started, and may be slow still, to answer one that it must not miss."""
_LONGEST_ERROR = 1 << 16


class WorkerFailedError(PdproxyError):
    """A worker could not start; the message says why, as far as it told."""


class NoAnswerError(PdproxyError):
    """A worker did not answer an operator's request."""


@dataclasses.dataclass(frozen=True, slots=True)
class OperatorRequest:
    """An operator's request. ``target``: path and query; ``headers``: those that matter to the routes."""

    method: str
    target: str
    headers: dict[str, str] = dataclasses.field(default_factory=dict)
    body: bytes = b""

    @property
    def path(self) -> str:
        """Without the query."""
        return self.target.partition("?")[0]


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """A worker's answer to it. ``status``: 0 where there was none."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def ok(self) -> bool:
        """Whether it did what it was asked."""
        return 200 <= self.status < 300


class Worker:
    """A process that can be started again after its end. ``settings``: its own share of them."""

    def __init__(self, number: int, settings: Settings) -> None:
        self.number = number
        self._settings = settings.model_dump_json().encode()
        self._process: asyncio.subprocess.Process | None = None
        self._channel: socket.socket | None = None

    async def start(self) -> None:
        """Start the process, and wait until it takes connections.

        Raises:
            WorkerFailedError: it ended instead, or took too long.
        """
        self._channel, theirs = socket.socketpair()
        self._channel.setblocking(False)
        with theirs:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "pdproxy.app.worker", str(theirs.fileno()), str(self.number)),
                stdin=asyncio.subprocess.PIPE,
                pass_fds=(theirs.fileno(),),
                process_group=0,  # Ctrl-C is for the supervisor alone, which ends its workers in order
            )
        try:
            async with asyncio.timeout(START_SECONDS):
                said = await self._first_words(self._process)
        except TimeoutError:
            said = f"it did not start within {START_SECONDS:g} s"
        except BaseException:
            self.kill()
            raise
        if said:
            self.kill()
            status = await self.ended()
            raise WorkerFailedError(said if said.strip() else f"worker {self.number} {describe(status)} at its start.")

    async def ended(self) -> int:
        """Wait for the process to end; its exit status, or minus the signal that killed it."""
        if self._process is None:
            return 0
        status = await self._process.wait()
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        return status

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, unless the process has ended."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    def kill(self) -> None:
        """End the process at once."""
        self.signal(signal.SIGKILL)

    def take(self, kind: Connection, connection: socket.socket) -> bool:
        """Give the worker a connection; whether it could be given."""
        return self._channel is not None and hand_over(self._channel, kind, connection)

    async def ask(self, request: OperatorRequest) -> Answer:
        """Send an operator's request to this worker alone.

        Raises:
            NoAnswerError: it has ended, or did not answer in time.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            if not self.take(Connection.OPERATOR, theirs):
                ours.close()
                raise NoAnswerError(f"worker {self.number} does not run")
        try:
            return await asyncio.to_thread(_exchange, ours, request)
        except (OSError, http.client.HTTPException) as error:
            raise NoAnswerError(f"worker {self.number} did not answer: {error!r}") from error

    async def ask_again(self, request: OperatorRequest) -> Answer:
        """Send a request that this worker must not miss, again while it runs and gives no answer.

        Raises:
            NoAnswerError: it has ended, or answered none within CHANGE_SECONDS.
        """
        end = time.monotonic() + CHANGE_SECONDS
        while True:
            try:
                return await self.ask(request)
            except NoAnswerError:
                if not self.runs or time.monotonic() > end:
                    raise
            await asyncio.sleep(0.1)

    @property
    def runs(self) -> bool:
        """Whether its process was started and has not ended."""
        return self._process is not None and self._process.returncode is None

    async def _first_words(self, process: asyncio.subprocess.Process) -> str:
        """Hand the settings over. "" once it is ready, else its error; " " where it ended without a word."""
        assert process.stdin is not None
        assert self._channel is not None
        loop, said = asyncio.get_running_loop(), b""
        with contextlib.suppress(ConnectionError):
            process.stdin.write(self._settings)
            await process.stdin.drain()
        process.stdin.close()
        while len(said) < _LONGEST_ERROR:
            try:
                piece = await loop.sock_recv(self._channel, _LONGEST_ERROR)
            except ConnectionError:
                piece = b""
            if piece == READY and not said:
                return ""
            if not piece:
                break
            said += piece
        return said.decode(errors="replace") or " "


def describe(status: int) -> str:
    """How a process ended: "was killed by SIGKILL", "ended with status 1"."""
    return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"


class _Connection(http.client.HTTPConnection):
    """HTTP over a connected socket."""

    def __init__(self, connected: socket.socket) -> None:
        super().__init__("localhost")
        connected.settimeout(ANSWER_SECONDS)
        self.sock = connected


def _exchange(connected: socket.socket, request: OperatorRequest) -> Answer:
    """Blocks: for a thread."""
    connection = _Connection(connected)
    try:
        connection.request(request.method, request.target, request.body or None, request.headers)
        response = connection.getresponse()
        headers = {name.lower(): value for name, value in response.getheaders()}
        return Answer(response.status, headers, response.read())
    finally:
        connection.close()
