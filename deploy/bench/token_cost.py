"""Instructions of one token of a stream in the proxy: ``python -m deploy.bench.token_cost``.

They are counted with a journal and without; needs valgrind. What the node's socket gives goes through connection, leg
reader and the client's writer into a socket that takes everything; the event loop's reading and writing, and what the
kernel does, are left out, and a relay is replaced by the clock that it reads. Both scans of `pdproxy.stream.scan` are
counted, the compiled one where it was built.
"""

import asyncio
import math
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from deploy.local.paths import ROOT
from pdproxy.clock import SystemClock
from pdproxy.orchestration.leg_reader import LegReader
from pdproxy.request import Endpoint, Shape
from pdproxy.server.response_writer import ClientExchange, ResponseWriter, WriteFlow
from pdproxy.stream.journal import Journal
from pdproxy.stream.scan import PYTHON, Scan, compiled
from pdproxy.stream.transcript import Transcript
from pdproxy.transport.h1_client import ConnectionPool, H1Response
from pdproxy.transport.h1_connection import H1Connection
from pdproxy.transport.h1_messages import Origin
from pdproxy.transport.port import Timeouts

TOKENS = 2000
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = (
    b'data: {"id":"cmpl-1234567890abcdef1234567890abcdef","object":"text_completion","created":1790000000,'
    b'"model":"bench","choices":[{"index":0,"text":" word%d","logprobs":null,"finish_reason":null}]}\n\n'
)
RECORD = b": pdproxy [1,[[[0,[%d]]]]]\n\n"
_TOTAL = re.compile(r"I\s+refs:\s+([\d,]+)")


class Socket(asyncio.Transport):
    """Takes everything at once."""

    def __init__(self) -> None:
        super().__init__({"socket": socket.socket()})

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Nobody reads it."""

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """There is no buffer."""


class BegunExchange(ClientExchange):
    """An exchange whose response's head is out."""

    def __init__(self, client: asyncio.Transport) -> None:
        self._writer, self.flow = ResponseWriter(client, lambda: False, 60.0), WriteFlow(client)
        self.disconnected = self.response_complete = False
        self.chunked_encoding = True


def chunk(number: int, *, journal: bool) -> bytes:
    """A token as a node sends it."""
    content = EVENT % (number % 1000) + (RECORD % (number % 5000) if journal else b"")
    return b"%x\r\n%b\r\n" % (len(content), content)


async def stream(tokens: int, scan: Scan, *, journal: bool) -> None:
    """So many tokens of one stream, after the first ones."""
    connection = H1Connection(Origin("http", "node", 80), lambda _: None)
    connection.connection_made(Socket())
    asked = asyncio.ensure_future(connection.exchange("POST", b"", b"x", Timeouts(), math.inf))
    await asyncio.sleep(0)
    connection.data_received(HEAD + chunk(0, journal=journal))
    await asked
    clock, shape = SystemClock(), Shape(1, stream=True)
    response = H1Response(connection, ConnectionPool(clock))
    transcript = Transcript(Endpoint.COMPLETIONS, shape)
    reader = LegReader(response, transcript, journal=Journal() if journal else None, scan=scan)
    await reader.read_first()
    exchange = BegunExchange(Socket())
    sink, chunk_sink = exchange.sink, exchange.chunk_sink
    assert sink is not None
    piping = asyncio.ensure_future(reader.pipe_to(sink, lambda _: clock.now() > 0.0, chunk_sink))
    await asyncio.sleep(0)
    pieces = [chunk(number, journal=journal) for number in range(1, 1001)]
    for number in range(tokens + 2):
        connection.data_received(pieces[number % 1000])
    piping.cancel()


def instructions(language: str, tokens: int, *, journal: bool) -> int:
    """The count for a whole process that passes so many tokens on."""
    words = [sys.executable, "-m", "deploy.bench.token_cost", language, str(tokens), str(int(journal))]
    with TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        valgrind = ["valgrind", "--tool=cachegrind", "--cache-sim=no", "--cachegrind-out-file=/dev/null"]
        subprocess.run([*valgrind, f"--log-file={log}", *words], cwd=ROOT, check=True, env={"PYTHONHASHSEED": "0"})
        found = _TOTAL.search(log.read_text(encoding="utf-8"))
    return int(found[1].replace(",", "")) if found else 0


def main() -> int:
    """Print a line for each scan, with a journal and without; the process's exit status."""
    scans = {scan.language: scan for scan in (PYTHON, compiled()) if scan is not None}
    if len(sys.argv) > 1:
        language, tokens, journaled = sys.argv[1:]
        asyncio.run(stream(int(tokens), scans[language], journal=journaled == "1"))
        return 0
    if shutil.which("valgrind") is None:
        print("error: valgrind is not installed", file=sys.stderr)
        return 1
    instructions(PYTHON.language, 0, journal=False)  # compiles the bytecode that is not there yet
    for language in scans:
        for journal in (True, False):
            first, last = (instructions(language, tokens, journal=journal) for tokens in (0, TOKENS))
            told = "with a journal" if journal else "without"
            print(f"scan in {language:8} {told:16} {(last - first) / TOKENS:8,.0f} instructions a token", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
