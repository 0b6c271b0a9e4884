"""Every error of sockets, TLS and httptools becomes a `NodeFault`."""

import asyncio
import errno
import inspect
import socket
import ssl

import httptools.parser.errors
import pytest

from pdproxy.errors import Fault
from pdproxy.transport.faults import CONNECTING, PARSING, timeout_fault, while_connecting, while_exchanging


def errors_in(*modules: object) -> list[type[Exception]]:
    found = {
        each
        for module in modules
        for name, each in inspect.getmembers(module, inspect.isclass)
        if issubclass(each, Exception) and not name.startswith("_")
    }
    return sorted(found, key=lambda each: each.__qualname__)


@pytest.mark.parametrize("error", errors_in(socket, ssl))
def test_whatever_a_socket_or_tls_raises_is_mapped(error: type[Exception]) -> None:
    assert issubclass(error, CONNECTING)


@pytest.mark.parametrize("error", errors_in(httptools.parser.errors))
def test_whatever_the_parser_raises_is_mapped(error: type[Exception]) -> None:
    assert issubclass(error, PARSING)


def test_the_lists_are_not_empty() -> None:
    assert len(errors_in(socket, ssl)) >= 5
    assert len(errors_in(httptools.parser.errors)) >= 5


def test_timeouts_of_asyncio_are_mapped() -> None:
    assert issubclass(asyncio.TimeoutError, CONNECTING)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_a_lack_of_sockets_or_memory_is_busy(number: int) -> None:
    assert while_connecting(OSError(number, "none left"), "node:1").fault is Fault.BUSY
    assert while_connecting(OSError(errno.EHOSTUNREACH, "no way"), "node:1").fault is Fault.REFUSED


SEVERAL = (
    "Multiple exceptions: [Errno 111] Connect call failed ('::1', 1), [Errno 111] Connect call failed ('127.0.0.1', 1)"
)


@pytest.mark.parametrize(
    ("error", "silent"),
    [
        (ConnectionRefusedError(errno.ECONNREFUSED, "Connect call failed"), False),
        (OSError(SEVERAL), False),
        (ssl.SSLError("no"), False),
        (OSError(errno.EHOSTUNREACH, "no way"), True),
        (socket.gaierror(-2, "Name or service not known"), True),
        (TimeoutError(), True),
    ],
)
def test_a_host_that_refuses_is_there_and_one_of_which_nothing_comes_is_silent(error: Exception, silent: bool) -> None:
    assert while_connecting(error, "node:1").silent is silent
    assert timeout_fault(Fault.HEADERS_TIMEOUT, "node:1", 5).silent
    assert not timeout_fault(Fault.STALL, "node:1", 5).silent


def test_a_fault_says_where_and_what() -> None:
    refused = while_connecting(ConnectionRefusedError(111, "Connect call failed ('10.0.0.1', 1)"), "node:1")
    assert (refused.fault, refused.detail) == (Fault.REFUSED, "node:1: connection refused")
    assert while_exchanging(None, "node:1").fault is Fault.RESET
    assert while_exchanging(ConnectionResetError("gone"), "node:1").detail == "node:1: gone"
    assert timeout_fault(Fault.STALL, "node:1", 2.5).detail == "node:1: nothing came for 2.5 s"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (TimeoutError(), "no connection in time"),
        (TimeoutError(110, "x"), "connection timed out"),
        (OSError(errno.EHOSTUNREACH, "x"), "no route to host"),
        (OSError(errno.EMFILE, "x"), "too many open files"),
        (OSError("Multiple exceptions: a, b"), "Multiple exceptions: a, b"),
        (
            socket.gaierror(-2, "unknown"),
            "its host name cannot be resolved (unknown)",
        ),
        (
            ssl.SSLError(1, "[SSL: WRONG_VERSION_NUMBER] wrong"),
            f"the TLS handshake failed ({ssl.SSLError(1, '[SSL: WRONG_VERSION_NUMBER] wrong')})",
        ),
        (UnicodeError("label too long"), "label too long"),
        (ConnectionError(), "ConnectionError"),
    ],
)
def test_errors_are_put_in_plain_words(error: Exception, words: str) -> None:
    """For operators, who need not know how an exception is written."""
    assert while_connecting(error, "node:1").detail.removeprefix("node:1: ") == words


def test_an_untrusted_certificate_names_the_setting() -> None:
    error = ssl.SSLCertVerificationError(1, "x")
    error.verify_message = "self-signed certificate"
    detail = while_connecting(error, "node:1").detail
    assert detail.startswith("node:1: its certificate is not trusted (self-signed certificate): upstream.ca_file ")
