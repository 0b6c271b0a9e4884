"""Waits until the proxy says that this node may go, then for tickets that it gave out to be read: before SIGTERM."""

import json
import os
import socket
import sys
import time
import urllib.error
import urllib.parse
import urllib.request

EVERY = 2.0
"""Seconds between two questions."""
AGREEING = 3
"""Answers in a row that say it may go: each may come from another proxy, which may not have heard yet what follows."""
SILENT = 60.0
"""Seconds without an answer after which there is no proxy to wait for."""


def say(text: str) -> None:
    """Put a line into the container's log, which a preStop's own output does not reach."""
    line = f"pdproxy preStop: {text}\n"
    try:
        with open("/proc/1/fd/1", "w") as log:
            log.write(line)
    except OSError:
        sys.stdout.write(line)


def ask(operators: str, port: str) -> "tuple[bool, str]":
    """Whether it may go, and why. Of several machines all ask for their leader, which is the node for the proxy.

    Raises OSError or ValueError where no proxy says so.
    """
    name = os.environ.get("LWS_LEADER_ADDRESS") or os.environ["POD_IP"]
    host = socket.getaddrinfo(name, None)[0][4][0]
    url = f"{operators}/may-leave?{urllib.parse.urlencode({'host': host, 'port': port})}"
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            said = json.load(answer)
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return True, "the proxy is of a version that nodes do not ask"
        raise
    return bool(said["leave"]), str(said["why"])


def wait(operators: str, port: str, most: float) -> str:
    """Return why the node goes now."""
    began = heard = time.monotonic()
    agreed, told = 0, ""
    while time.monotonic() - began < most:
        try:
            leave, why = ask(operators, port)
            heard = time.monotonic()
        except (OSError, ValueError, KeyError, TypeError) as error:
            leave, why = False, f"no answer: {error}"
            if time.monotonic() - heard >= SILENT:
                return why
        agreed = agreed + 1 if leave else 0
        if agreed == AGREEING:
            return why
        if not leave and why != told:
            say(f"waits: {why}")
            told = why
        time.sleep(EVERY)
    return f"it has waited {most:g} s"


def main(operators: str, port: str, most: str, leave: str) -> None:
    """``most``, ``leave``: seconds to wait for an answer, and after it."""
    say(f"goes: {wait(operators, port, float(most))}")
    time.sleep(float(leave))


if __name__ == "__main__":
    main(*sys.argv[1:])
