"""Wait until servers answer, and say meanwhile how it goes."""

import http.client
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from http import HTTPStatus

POLL_S = 0.25
TELL_EVERY_S = 5.0
PROBE_TIMEOUT_S = 5.0

Say = Callable[[str], None]
Probe = Callable[[str], bool]


class NotReadyError(Exception):
    """Something did not come up in time."""


def fetch(url: str, headers: Mapping[str, str] | None = None) -> bytes | None:
    """Return the body of a GET that gave 200, else None. Goes straight there, whatever proxy the environment names."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        asked = urllib.request.Request(url, headers=dict(headers or {}))
        with opener.open(asked, timeout=PROBE_TIMEOUT_S) as response:
            body: bytes = response.read()
            return body if response.status == HTTPStatus.OK else None
    except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError):
        return None


def answers(url: str) -> bool:
    """Whether a GET of `url` gives 200."""
    return fetch(url) is not None


class Clock:
    """Real time, in seconds; tests bring their own."""

    def now(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


def await_ready(
    urls: Mapping[str, str],
    *,
    within: float,
    still_alive: Callable[[], None],
    say: Say,
    probe: Probe = answers,
    clock: Clock | None = None,
) -> None:
    """Return when every URL has answered once; `urls` maps the name to tell to the URL to ask.

    `still_alive` is called before each round and raises if waiting has become pointless. Raises NotReadyError after
    `within` seconds.
    """
    clock = clock or Clock()
    began = told = clock.now()
    waiting = dict(urls)
    while waiting:
        still_alive()
        for name in [name for name, url in waiting.items() if probe(url)]:
            del waiting[name]
            say(f"{name} is up after {clock.now() - began:.0f} s")
        if not waiting:
            return
        if clock.now() - began > within:
            raise NotReadyError(f"not up after {within:.0f} s: {', '.join(waiting)}")
        if clock.now() - told >= TELL_EVERY_S:
            told = clock.now()
            say(f"waiting for {' and '.join(waiting)} ({told - began:.0f} s) …")
        clock.sleep(POLL_S)
