"""The prefill node's side channel: vLLM's handshake and our questions after a read, on one TCP address.

It runs in the scheduler's process, since the lease table is there, in a thread of its own. vLLM's own listener ends
at the first packet that it cannot read, and hangs the start when its port is taken; this one counts the packet and
goes on, and says which port. It speaks ZMQ's protocol without ZMQ (see `zmtp`, `tcp_server`), whose memory a stranger
can fill.

Where there are ticket keys, only a node that has one gets an answer (see `proof`): no verdicts, and none of the NIXL
metadata, which is what it takes to read this node's memory. Without keys both go to whoever can connect.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence

from connector.config import SideChannelError
from connector.messages import (
    CHALLENGE_BYTES,
    LONGEST_QUESTION,
    PROPERTY,
    Handshake,
    MetadataQuestion,
    QuestionBatch,
    QuestionRefusal,
    ReplySigner,
    Verdict,
    read_request,
    write_clock,
    write_refusal,
    write_reply,
)
from connector.stats import Counters
from connector.tcp_server import BACKLOG, CloseReason, Limits, TcpServer
from connector.zmtp import Zmtp

JudgeRead = Callable[[str, str, str], Verdict]
"""(engine id, request id, nonce) → verdict; called in the listener's thread."""

NEEDS_KEY = (
    "refused: the prefill node has ticket keys, and the question was not signed with one; "
    "give both nodes the same PDPROXY_TICKET_KEYS or pdproxy_key_file, and both this project's connector"
)
NO_SUCH_RANK = "refused: the prefill node has no worker of this rank"


class Listener:
    """Answers on `host:port` from `start` to `stop`; port 0 takes a free one, see `port`.

    `encoded`: by (pipeline rank, tensor rank), the msgpack of vLLM's `NixlHandshakePayload` of each worker.
    `engine_id`: whose they are. `keys`: ticket keys; none: everybody is answered.
    """

    def __init__(
        self,
        host: str,
        port: int,
        encoded: Mapping[tuple[int, int], bytes],
        judge: JudgeRead,
        accounts: Counters,
        *,
        engine_id: str = "",
        keys: Sequence[bytes] = (),
        limits: Limits | None = None,
    ) -> None:
        self.host, self.port = host, port
        self.incarnation = secrets.token_hex(8)
        self._encoded = dict(encoded)
        self._judge = judge
        self._accounts = accounts
        self._engine_id = engine_id
        self._keys = tuple(keys)
        self._limits = limits or Limits()
        self._server: TcpServer | None = None

    def start(self) -> None:
        """Bind and answer. Raises SideChannelError, at once, when the address cannot be had."""
        listening = _listen(self.host, self.port)
        self.port = listening.getsockname()[1]
        self._server = TcpServer(listening, self._begin, self._closed, self._limits)
        self._server.start()

    def stop(self) -> None:
        """Stop answering and give the address back. May be called twice, and before `start`."""
        if self._server is not None:
            self._server.stop()
            self._server = None

    def _begin(self) -> _Connection:
        return _Connection(self, self._keys)

    def _closed(self, reason: CloseReason) -> None:
        self._accounts.side_channel_closed(reason.value)

    def refuse(self, reason: QuestionRefusal) -> None:
        """Count a question that gets no usable answer."""
        self._accounts.side_channel_refused(reason.value)

    def junk(self) -> None:
        """Count a message that says nothing we know."""
        self._accounts.junk("side_channel")

    def reply(self, request: Handshake | MetadataQuestion | QuestionBatch) -> Sequence[bytes]:
        """The frames that answer a request of somebody who may ask."""
        match request:
            case QuestionBatch(number, questions):
                verdicts = [self._judge(asked.engine_id, asked.request_id, asked.nonce) for asked in questions]
                return [write_reply(number, self.incarnation, verdicts)]
            case MetadataQuestion(number, engine_id, pp_rank, tp_rank):
                return [write_reply(number, self.incarnation, self._introduction(engine_id, pp_rank, tp_rank))]
            case Handshake(pp_rank, tp_rank):
                payload = self._encoded.get((pp_rank, tp_rank))
                # vLLM's decode side estimates the clocks' offset from this: it must be the scheduler process's clock.
                return [payload or write_refusal(NO_SUCH_RANK), write_clock(time.perf_counter())]

    def _introduction(self, engine_id: str, pp_rank: int, tp_rank: int) -> bytes | str:
        if engine_id != self._engine_id:
            return QuestionRefusal.ANOTHER_ENGINE.value
        return self._encoded.get((pp_rank, tp_rank), QuestionRefusal.NO_SUCH_RANK.value)


class _Connection:
    """One connection to the listener (`tcp_server.Conversation`)."""

    def __init__(self, listener: Listener, keys: Sequence[bytes]) -> None:
        self._listener = listener
        self._keys = keys
        self._challenge = secrets.token_bytes(CHALLENGE_BYTES)
        self._answerer: ReplySigner | None = None
        self._last = 0
        self.trusted = False
        self.zmtp = Zmtp(b"ROUTER", LONGEST_QUESTION, {PROPERTY: self._challenge} if keys else None)

    def answer(self, frames: tuple[bytes, ...]) -> None:
        """Deal with one message: a delimiter, the request, and its MAC where there is one."""
        request = read_request(frames[1]) if len(frames) in (2, 3) and not frames[0] else None
        if request is None:
            self._listener.junk()
            return
        refused = self._refusal(request, frames) if self._keys else None
        if refused is None:
            self._send(self._listener.reply(request))
        else:
            self._listener.refuse(refused)
            self._send(self._say(request, refused))

    def _refusal(
        self, request: Handshake | MetadataQuestion | QuestionBatch, frames: Sequence[bytes]
    ) -> QuestionRefusal | None:
        if len(frames) == 2:
            return QuestionRefusal.UNSIGNED
        if not self._prover().genuine(frames[1], frames[2]):
            return QuestionRefusal.BAD_SIGNATURE
        if isinstance(request, Handshake) or request.number <= self._last:
            return QuestionRefusal.REPLAYED
        self._last, self.trusted = request.number, True
        return None

    def _prover(self) -> ReplySigner:
        if self._answerer is None:
            self._answerer = ReplySigner(self._keys, self._challenge, (self.zmtp.peer or {}).get(PROPERTY, b""))
        return self._answerer

    def _say(self, request: Handshake | MetadataQuestion | QuestionBatch, refused: QuestionRefusal) -> list[bytes]:
        if isinstance(request, Handshake):
            return [write_refusal(NEEDS_KEY), write_clock(time.perf_counter())]
        return [write_reply(request.number, self._listener.incarnation, refused.value)]

    def _send(self, reply: Sequence[bytes]) -> None:
        if self._keys and len(reply) == 1:
            self.zmtp.send([b"", *self._prover().sign(reply[0])])
        else:
            self.zmtp.send([b"", *reply])


def ensure_free(host: str, port: int) -> None:
    """Check early, before a model is loaded, that `Listener` could bind. Raises SideChannelError."""
    _listen(host, port).close()


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises SideChannelError."""
    listening = None
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host, port, _family(host), socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listening.bind(address)
        listening.listen(BACKLOG)
    except OSError as error:
        if listening is not None:
            listening.close()
        raise SideChannelError(_sentence(host, port, error)) from error
    listening.setblocking(False)
    return listening


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _sentence(host: str, port: int, error: OSError) -> str:
    return (
        f"The KV side channel cannot listen on {host}:{port} ({error}). Another node may be using the port: "
        "give this one its own VLLM_NIXL_SIDE_CHANNEL_PORT (data-parallel ranks take the ports that follow it)."
    )
