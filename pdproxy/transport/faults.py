"""The one place where foreign errors become `NodeFault`.

What can reach us from below, and what it means:

::

    while connecting    OSError that says that we have no socket left              → BUSY
                        OSError (refused, unreachable, name not found, TLS, time out)  → REFUSED
                        UnicodeError (a host name that IDNA cannot encode)             → REFUSED
    while exchanging    OSError, or the end of the connection                          → RESET
                        httptools' errors, `ProtocolError`: what came is not HTTP            → RESET
"""

import errno
import os
import socket
import ssl

import httptools

from pdproxy.errors import Fault, NodeFault

CONNECTING: tuple[type[Exception], ...] = (OSError, UnicodeError)
"""What `create_connection` raises: `TimeoutError`, `socket.gaierror` and `ssl.SSLError` are OSErrors."""

_OWN_LIMITS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
"""Of open files or memory: no node would be reached."""

PARSING: tuple[type[Exception], ...] = (httptools.HttpParserError, httptools.HttpParserUpgrade)
"""What `feed_data` raises."""


class ProtocolError(Exception):
    """What came on a connection is not an HTTP/1.1 answer that we accept."""


def while_connecting(error: Exception, where: str) -> NodeFault:
    """A connection that never stood: nothing of the request reached the node. Our own lack is no fault of the node."""
    ours = isinstance(error, OSError) and error.errno in _OWN_LIMITS
    return NodeFault(Fault.BUSY if ours else Fault.REFUSED, f"{where}: {_words(error)}")


def while_exchanging(error: Exception | None, where: str) -> NodeFault:
    """A connection that broke, or that ended (``None``), before the answer did."""
    return NodeFault(Fault.RESET, f"{where}: {_words(error) if error else 'closed before the answer ended'}")


def timeout_fault(fault: Fault, seconds: float, where: str) -> NodeFault:
    """Nothing came for too long: HEADERS_TIMEOUT or STALL."""
    return NodeFault(fault, f"{where}: nothing came for {seconds:g} s")


def deadline_fault(fault: Fault, where: str) -> NodeFault:
    """An answer that has not ended when the exchange must have, however lively it is."""
    return NodeFault(fault, f"{where}: the answer did not end in time")


def _words(error: Exception) -> str:
    """What happened, for an operator who reads no Python."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted ({error.verify_message}): upstream.ca_file names the authorities"
    if isinstance(error, ssl.SSLError):
        return f"no TLS with it ({error})"
    if isinstance(error, socket.gaierror):
        return f"its name leads nowhere ({error.strerror})"
    if isinstance(error, TimeoutError) and error.errno is None:
        return "no connection in the time that there is for it"
    if isinstance(error, OSError) and error.errno is not None:
        return os.strerror(error.errno).lower()
    return str(error) or type(error).__name__
