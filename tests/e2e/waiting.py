"""A decode leg that is sent before its ticket, and the delivery of that ticket, by hand."""

import secrets
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.e2e.conftest import REQUEST_TIMEOUT_S
from tests.e2e.legs import Completion, Params, complete
from tests.e2e.metrics_reader import PATIENCE_S, read

ROUTE = "/v1/pdproxy/tickets"
WAITING = "pdproxy_connector_waiting_requests"


def wait_params(wait: str, seconds: float = 60) -> Params:
    """What a decode leg without a ticket carries."""
    return {"pdproxy_wait": {"id": wait, "seconds": seconds}}


def deliver(url: str, wait: str, ticket: Params | None) -> httpx.Response:
    """Bring a ticket, or word that there is none."""
    return post(url, {"id": wait, "kv_transfer_params": ticket})


def post(url: str, body: Any) -> httpx.Response:
    """Whatever is sent to the route."""
    return httpx.post(f"{url}{ROUTE}", json=body, timeout=REQUEST_TIMEOUT_S, trust_env=False)


@dataclass
class Sent:
    """A decode leg that waits."""

    url: str
    prompt: str
    seconds: float = 60
    wait: str = field(default_factory=lambda: secrets.token_urlsafe(18))
    answer: Future[Completion] = field(default_factory=Future)

    def deliver(self, ticket: Params | None) -> None:
        """Bring its ticket."""
        answer = deliver(self.url, self.wait, ticket)
        assert (answer.status_code, answer.json()) == (202, {"id": self.wait})

    def done(self) -> Completion:
        """Its answer."""
        return self.answer.result(REQUEST_TIMEOUT_S)


@contextmanager
def sent(url: str, *prompts: str, seconds: float = 60) -> Iterator[list[Sent]]:
    """Decode legs that have reached the engine, and wait there."""
    legs = [Sent(url, prompt, seconds) for prompt in prompts]
    with ThreadPoolExecutor(len(legs)) as threads:
        for leg in legs:
            leg.answer = threads.submit(complete, url, leg.prompt, params=wait_params(leg.wait, seconds))
        until(url, WAITING, len(legs))
        yield legs


def until(url: str, name: str, value: float) -> None:
    """Wait until a gauge has this value; AssertionError when it has not within PATIENCE_S."""
    limit = time.monotonic() + PATIENCE_S
    while (found := read(url, name)) != value:
        assert time.monotonic() < limit, f"{name} is {found:g}, not {value:g}"
        time.sleep(0.02)
