"""How many files, sockets among them, the process may have open."""

import contextlib
import resource

ENOUGH = 1 << 20


def allow_many() -> None:
    """Raise the soft limit as far as may be: a stream takes up to three sockets, and 1,024 is the usual limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = ENOUGH if hard == resource.RLIM_INFINITY else min(hard, ENOUGH)
    if soft == resource.RLIM_INFINITY or soft >= most:
        return
    with contextlib.suppress(OSError, ValueError):  # a kernel with a lower limit of its own: then it stays
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
