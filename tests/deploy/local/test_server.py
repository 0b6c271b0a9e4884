"""An engine that is forked from its server shares neither the server's port nor its signals."""

import inspect
import os
import signal
import socket
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path

import pytest

from deploy.local.server import network_sockets, part_from_server


def in_child(wanted: int) -> bool:
    """Whether a child that parts from this process says so many network sockets are left, and no pipe for signals."""
    child = os.fork()
    if not child:
        part_from_server()
        os._exit(0 if (len(network_sockets()), signal.set_wakeup_fd(-1)) == (wanted, -1) else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_port_that_listens_after_the_fork_is_the_server_s_alone() -> None:
    """vLLM has bound it when the engine is forked. It is refused once the server is gone, whatever the engine does."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        with socket.socket() as server:
            server.bind(("127.0.0.1", 0))
            address = server.getsockname()
            child = os.fork()
            if not child:
                part_from_server()
                theirs.send(b"parted")
                theirs.recv(1)
                os._exit(0)
            server.listen()
            socket.create_connection(address).close()
            assert ours.recv(6) == b"parted"
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address)
        ours.send(b"?")
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_nothing_else_is_lost() -> None:
    """A pipe, a file and a unix socket stay; a signal to the engine does not wake the server."""
    left, right = socket.socketpair()
    left.setblocking(False)
    before = signal.set_wakeup_fd(left.fileno(), warn_on_full_buffer=False)
    with closing(left), closing(right), socket.socket() as port:
        assert port.fileno() in network_sockets()
        assert left.fileno() not in network_sockets()
        assert in_child(wanted=0)
    signal.set_wakeup_fd(before)


@pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM's source")
def test_vllm_asks_by_this_name_how_to_start_engines() -> None:
    """Without importing it."""
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    source = (Path(spec.origin).parent / "v1" / "engine" / "utils.py").read_text()
    [manager] = [part for part in source.split("\nclass ") if part.startswith("CoreEngineProcManager")]
    assert "context = get_mp_context()" in inspect.cleandoc(manager)
