"""The prefill node's side channel: vLLM's handshake and our question after a read, on one ZMQ address.

It runs in the scheduler's process, since the lease table is there, in a thread of its own. vLLM's own listener ends
at the first packet that it cannot read, and hangs the start when its port is taken; this one counts the packet and
goes on, and says which port.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing

import msgspec
import zmq

from connector.accounts import Accounts
from connector.errors import SideChannelError
from connector.lease import Verdict
from connector.question import LONGEST_MESSAGE, Batch, Handshake, read_answer, read_request, write_answer, write_batch

Judge = Callable[[str, str, str], Verdict]
"""(engine id, request id, nonce) → verdict; called in the listener's thread."""

POLL_MS = 200
PING = 0


def tcp(host: str, port: int) -> str:
    """A ZMQ address; IPv6 addresses are put in brackets."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


class Listener:
    """Answers on `host:port` from `start` to `stop`.

    `encoded`: by (pipeline rank, tensor rank), the msgpack of vLLM's `NixlHandshakePayload` of each worker.
    """

    def __init__(
        self, host: str, port: int, encoded: Mapping[tuple[int, int], bytes], judge: Judge, accounts: Accounts
    ) -> None:
        self._host, self._port = host, port
        self._encoded = dict(encoded)
        self._judge = judge
        self._accounts = accounts
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Bind and answer. Raises SideChannelError, at once, when the address cannot be had."""
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        router = context.socket(zmq.ROUTER)
        router.linger = 0
        router.maxmsgsize = LONGEST_MESSAGE
        router.ipv6 = ":" in self._host
        try:
            router.bind(tcp(self._host, self._port))
        except zmq.ZMQError as error:
            context.destroy(linger=0)
            raise SideChannelError(_sentence(self._host, self._port, error)) from error
        self._thread = threading.Thread(
            target=self._serve, args=(context, router), name="pdproxy_side_channel", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Stop answering and give the address back. May be called twice, and before `start`."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _serve(self, context: zmq.Context[zmq.Socket[bytes]], router: zmq.Socket[bytes]) -> None:
        try:
            while not self._stopping.is_set():
                if router.poll(POLL_MS):
                    self._answer(router, router.recv_multipart())
        finally:
            context.destroy(linger=0)

    def _answer(self, router: zmq.Socket[bytes], frames: Sequence[bytes]) -> None:
        reply = self._reply(frames[2]) if len(frames) == 3 and not frames[1] else None
        if reply is None:
            self._accounts.junk("side_channel")
            return
        router.send_multipart([frames[0], b"", *reply], flags=zmq.NOBLOCK)

    def _reply(self, message: bytes) -> list[bytes] | None:
        request = read_request(message)
        if isinstance(request, Batch):
            verdicts = [self._judge(asked.engine_id, asked.request_id, asked.nonce) for asked in request.questions]
            return [write_answer(request.number, verdicts)]
        if isinstance(request, Handshake):
            payload = self._encoded.get((request.pp_rank, request.tp_rank))
            # vLLM's decode side estimates the clocks' offset from this; it must be the scheduler process's clock.
            return None if payload is None else [payload, msgspec.msgpack.encode(time.perf_counter())]
        return None


def ensure_free(host: str, port: int) -> None:
    """Check early, before a model is loaded, that `Listener` could bind. Raises SideChannelError."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        probe = context.socket(zmq.ROUTER)
        probe.ipv6 = ":" in host
        probe.bind(tcp(host, port))
    except zmq.ZMQError as error:
        raise SideChannelError(_sentence(host, port, error)) from error
    finally:
        context.destroy(linger=0)


def ping(host: str, port: int, timeout: float) -> None:
    """Whether a side channel of ours answers at `host:port` within `timeout` seconds.

    Raises ConnectionError when nobody listens (at once, where the host refuses) or nobody answers.
    """
    started = time.monotonic()
    try:
        with closing(socket.create_connection((host, port), timeout)):
            pass
    except OSError as error:
        raise ConnectionError(f"nobody listens on the side channel {host}:{port}: {error}") from error
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        dealer = context.socket(zmq.DEALER)
        dealer.ipv6 = ":" in host
        dealer.connect(tcp(host, port))
        dealer.send_multipart([b"", write_batch(PING, ())])
        left = max(0.001, timeout - (time.monotonic() - started))
        if not dealer.poll(int(left * 1000)) or read_answer(dealer.recv_multipart()[-1]) is None:
            raise ConnectionError(f"the side channel {host}:{port} did not answer within {timeout:g} s")
    finally:
        context.destroy(linger=0)


def _sentence(host: str, port: int, error: zmq.ZMQError) -> str:
    return (
        f"The KV side channel cannot listen on {host}:{port} ({error}). Another node may be using the port: "
        "give this one its own VLLM_NIXL_SIDE_CHANNEL_PORT (data-parallel ranks take the ports that follow it)."
    )
