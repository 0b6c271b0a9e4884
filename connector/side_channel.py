"""A node's side channel: answers vLLM's handshake and our questions after a read, on one TCP address.

It runs in the scheduler's process, since the lease table is there, in a thread of its own. vLLM's own listener ends
at the first packet that it cannot read, and hangs the start when its port is taken; this one counts the packet and
goes on, and names the port. It speaks ZMQ's protocol without ZMQ (see `zmtp`, `tcp_server`), whose memory an attacker
can fill. The messages and their signatures are described in `messages`.

Where there are ticket keys, only a node that has one gets an answer: no verdicts, and none of the NIXL metadata, which
is what it takes to read this node's memory. Without keys every node that can connect gets both.

`metadata_relay` is for a decode node's worker: the same listener, for one handshake (see `worker_base`).
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from .config import SideChannelError
from .counters import Counters
from .messages import (
    CHALLENGE_BYTES,
    LONGEST_QUESTION,
    PROPERTY,
    Handshake,
    MetadataQuestion,
    QuestionBatch,
    QuestionRefusal,
    ReplySigner,
    ReturnBatch,
    SideRequest,
    Verdict,
    read_request,
    write_clock,
    write_refusal,
    write_reply,
)
from .tcp_server import BACKLOG, CloseReason, ServerLimits, TcpServer
from .zmtp import Zmtp

VerifyRead = Callable[[str, str, str], Verdict]
"""(engine id, request id, nonce) → verdict; called in the listener's thread."""

TakeBack = Callable[[str, str, str], Verdict]
"""(engine id, request id, nonce) of a ticket that is given back → whether its blocks were held until now; called in the
listener's thread."""

LOOPBACK = "127.0.0.1"
NEEDS_KEY = (
    "refused: the prefill node has ticket keys, and the question was not signed with one; "
    "give both nodes the same PDPROXY_TICKET_KEYS or pdproxy_key_file, and both this project's connector"
)
NO_SUCH_RANK = "refused: the prefill node has no worker of this rank"


class Listener:
    """Answers on `host:port` from `start` to `stop`; port 0 takes a free one, see `port`.

    `payloads`: by (pipeline rank, tensor rank), the msgpack of vLLM's `NixlHandshakePayload` of each worker of
    `engine_id`. `keys`: ticket keys, which may change; without any, every question is answered. `take_back`: None where
    nothing is leased.
    """

    def __init__(
        self,
        host: str,
        port: int,
        payloads: Mapping[tuple[int, int], bytes],
        verify: VerifyRead,
        counters: Counters,
        *,
        engine_id: str = "",
        keys: Sequence[bytes] = (),
        take_back: TakeBack | None = None,
        limits: ServerLimits | None = None,
    ) -> None:
        self.host, self.port = host, port
        self._take_back = take_back or verify
        self.incarnation = secrets.token_hex(8)
        self._payloads = dict(payloads)
        self._verify = verify
        self._counters = counters
        self._engine_id = engine_id
        self._keys = keys
        self._limits = limits or ServerLimits()
        self._server: TcpServer | None = None

    def start(self) -> None:
        """Bind and answer. Raises SideChannelError, at once, when the address cannot be had."""
        listening = _listen(self.host, self.port)
        self.port = listening.getsockname()[1]
        self._server = TcpServer(listening, self._make_handler, self._on_closed, self._limits)
        self._server.start()

    def stop(self) -> None:
        """Stop answering and give the address back. May be called twice, and before `start`."""
        if self._server is not None:
            self._server.stop()
            self._server = None

    def _make_handler(self) -> _QuestionHandler:
        return _QuestionHandler(self, self._keys)

    def _on_closed(self, reason: CloseReason) -> None:
        self._counters.side_channel_closed(reason.value)

    def count_refusal(self, reason: QuestionRefusal) -> None:
        """Count a question that gets no usable answer."""
        self._counters.side_channel_refused(reason.value)

    def count_junk(self) -> None:
        """Count a message that is none of ours."""
        self._counters.junk("side_channel")

    def reply(self, request: SideRequest) -> Sequence[bytes]:
        """The frames that answer a request that may be answered."""
        match request:
            case QuestionBatch(number, questions):
                verdicts = [self._verify(asked.engine_id, asked.request_id, asked.nonce) for asked in questions]
                return [write_reply(number, self.incarnation, verdicts)]
            case ReturnBatch(number, questions):
                verdicts = [self._take_back(asked.engine_id, asked.request_id, asked.nonce) for asked in questions]
                return [write_reply(number, self.incarnation, verdicts)]
            case MetadataQuestion(number, engine_id, pp_rank, tp_rank):
                return [write_reply(number, self.incarnation, self._metadata(engine_id, pp_rank, tp_rank))]
            case Handshake(pp_rank, tp_rank):
                payload = self._payloads.get((pp_rank, tp_rank))
                # vLLM's decode side estimates the clocks' offset from this: it must be the scheduler process's clock.
                return [payload or write_refusal(NO_SUCH_RANK), write_clock(time.perf_counter())]

    def _metadata(self, engine_id: str, pp_rank: int, tp_rank: int) -> bytes | str:
        if engine_id != self._engine_id:
            return QuestionRefusal.ANOTHER_ENGINE.value
        return self._payloads.get((pp_rank, tp_rank), QuestionRefusal.NO_SUCH_RANK.value)


class _QuestionHandler:
    """One connection to the listener (`tcp_server.ConnectionHandler`)."""

    def __init__(self, listener: Listener, keys: Sequence[bytes]) -> None:
        self._listener = listener
        self._keys = keys
        self._challenge = secrets.token_bytes(CHALLENGE_BYTES)
        self._signer: ReplySigner | None = None
        self._last_number = 0
        self.trusted = False
        self.zmtp = Zmtp(b"ROUTER", LONGEST_QUESTION, {PROPERTY: self._challenge} if keys else None)

    def answer(self, frames: tuple[bytes, ...]) -> None:
        """Answer one message: a delimiter, the request, and its MAC where there is one."""
        request = read_request(frames[1]) if len(frames) in (2, 3) and not frames[0] else None
        if request is None:
            self._listener.count_junk()
            return
        refusal = self._check(request, frames) if self._keys else None
        if refusal is None:
            self._send(self._listener.reply(request))
        else:
            self._listener.count_refusal(refusal)
            self._send(self._refuse(request, refusal))

    def _check(self, request: SideRequest, frames: Sequence[bytes]) -> QuestionRefusal | None:
        """Why the request is not answered; None for one that is signed and new."""
        if len(frames) == 2:
            return QuestionRefusal.UNSIGNED
        if not self._reply_signer().genuine(frames[1], frames[2]):
            return QuestionRefusal.BAD_SIGNATURE
        if isinstance(request, Handshake) or request.number <= self._last_number:
            return QuestionRefusal.REPLAYED
        self._last_number, self.trusted = request.number, True
        return None

    def _reply_signer(self) -> ReplySigner:
        if self._signer is None:
            self._signer = ReplySigner(self._keys, self._challenge, (self.zmtp.peer or {}).get(PROPERTY, b""))
        return self._signer

    def _refuse(self, request: SideRequest, refusal: QuestionRefusal) -> list[bytes]:
        if isinstance(request, Handshake):
            return [write_refusal(NEEDS_KEY), write_clock(time.perf_counter())]
        return [write_reply(request.number, self._listener.incarnation, refusal.value)]

    def _send(self, reply: Sequence[bytes]) -> None:
        if self._keys and len(reply) == 1:
            self.zmtp.send([b"", *self._reply_signer().sign(reply[0])])
        else:
            self.zmtp.send([b"", *reply])


@contextmanager
def metadata_relay(payloads: Mapping[tuple[int, int], bytes]) -> Iterator[int]:
    """A side channel on this host alone that answers handshakes with `payloads`; its port. Raises SideChannelError."""
    listener = Listener(LOOPBACK, 0, payloads, lambda *_: Verdict.UNKNOWN, Counters())
    listener.start()
    try:
        yield listener.port
    finally:
        listener.stop()


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
