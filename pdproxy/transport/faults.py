"""Where the errors of sockets, TLS and httptools become `NodeFault`; httpx's do in `httpx_transport`.

::

    while connecting    OSError: this process has no socket or memory left             → BUSY
                        OSError (refused, unreachable, name not found, TLS, time out)  → REFUSED
                        UnicodeError (a host name that IDNA cannot encode)             → REFUSED
    while exchanging    OSError, or the end of the connection                          → RESET
                        httptools' errors, `ProtocolError`: what came is not HTTP      → RESET
"""

import errno
import os
import socket
import ssl

import httptools

from pdproxy.errors import Fault, NodeFault

CONNECTING: tuple[type[Exception], ...] = (OSError, UnicodeError)
"""Errors of `create_connection`: `TimeoutError`, `socket.gaierror` and `ssl.SSLError` are OSErrors."""

_OWN_LIMITS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
"""Too many open files, or no memory: no node could be reached."""

_REFUSED = f"[Errno {errno.ECONNREFUSED}]"
"""Stands also in the one error that asyncio makes of those of several addresses, which has no number."""

PARSING: tuple[type[Exception], ...] = (httptools.HttpParserError, httptools.HttpParserUpgrade)
"""Errors of `feed_data`."""


class ProtocolError(Exception):
    """The bytes on a connection are not an HTTP/1.1 response that is accepted."""


def while_connecting(error: Exception, where: str) -> NodeFault:
    """No connection: nothing of the request reached the node. BUSY where this process is out of sockets or memory."""
    ours = isinstance(error, OSError) and error.errno in _OWN_LIMITS
    silent = not (ours or isinstance(error, ssl.SSLError) or _REFUSED in str(error))
    return NodeFault(Fault.BUSY if ours else Fault.REFUSED, f"{where}: {_words(error)}", silent=silent)


def while_exchanging(error: Exception | None, where: str) -> NodeFault:
    """A connection that broke, or that was closed (``None``), before the response ended."""
    return NodeFault(Fault.RESET, f"{where}: {_words(error) if error else 'closed before the answer ended'}")


def timeout_fault(fault: Fault, where: str, seconds: float | None = None) -> NodeFault:
    """HEADERS_TIMEOUT or STALL: nothing came for some seconds; None: the whole exchange did not end in time."""
    why = "the answer did not end in time" if seconds is None else f"nothing came for {seconds:g} s"
    return NodeFault(fault, f"{where}: {why}", silent=fault is Fault.HEADERS_TIMEOUT)


def _words(error: Exception) -> str:
    """The error for an operator: no Python in it."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted ({error.verify_message}): upstream.ca_file names the authorities"
    if isinstance(error, ssl.SSLError):
        return f"the TLS handshake failed ({error})"
    if isinstance(error, socket.gaierror):
        return f"its host name cannot be resolved ({error.strerror})"
    if isinstance(error, TimeoutError) and error.errno is None:
        return "no connection in time"
    if isinstance(error, OSError) and error.errno is not None:
        return os.strerror(error.errno).lower()
    return str(error) or type(error).__name__
