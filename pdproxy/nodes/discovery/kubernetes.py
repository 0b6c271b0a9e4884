"""Nodes behind a Kubernetes service, by watching its EndpointSlices with lightkube (the extra ``kubernetes``).

Why not lightkube alone, as of its version 1.0: it watches again at once, for ever, when a server ends its watches; it
waits for ever on a connection whose other end vanished; it asks for no bookmarks; after 410 Gone it goes on from now,
and what was deleted meanwhile would stay; and it does not read why a watch is refused. `_ApiTransport` and
`KubernetesSource` do those five things; requests, TLS, tokens, pages and JSON are lightkube's.
"""

import contextlib
import dataclasses
import logging
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import cast

import httpx2
import lightkube
from lightkube.config.client_adapter import verify_cluster
from lightkube.config.models import Cluster, User
from lightkube.core.client import LabelSelector
from lightkube.resources.discovery_v1 import EndpointSlice

from pdproxy.clock import Clock
from pdproxy.nodes.discovery.endpoint_slices import EndpointSlices, Lost
from pdproxy.nodes.discovery.source import DiscoveryError, Nodes, Template, TerminatingNode

_LOG = logging.getLogger(__name__)

_PAGE = 500
"""Slices in one answer, so that a large list needs no large buffer."""
_FIRST_PAUSE = 1.0
"""Seconds after a watch's end; doubles with each failure in a row."""
_LONGEST_PAUSE = 30.0
_GONE = 410
_GARBLED = (ValueError, AttributeError)
"""Errors of lightkube for an answer of another shape; AttributeError for an event without metadata."""
_TROUBLE = (httpx2.HTTPError, lightkube.ConfigError, Lost, *_GARBLED)
"""ConfigError: the token's file is gone."""


@dataclasses.dataclass(frozen=True, slots=True)
class Api:
    """Where an API server is.

    Attributes:
        url: its base address.
        token_file: of the service account; read again when the server refuses it. None sends none.
        authorities: PEM certificates that an https server's one is checked against; None takes the system's.
    """

    url: str
    token_file: Path | None = None
    authorities: Path | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Query:
    """EndpointSlices with these labels (``selector``), and in them the port of this name; "" for the first one."""

    namespace: str
    selector: str
    port: str = ""


class KubernetesSource:
    """Lists once, then watches; resumes where a watch broke off, and lists again when the server has lost its place.

    To be closed (`aclose`), after `watch` was left.

    Args:
        watch_seconds: how long the server is asked to keep one watch open.
        slack: seconds after which an overdue end means that the connection is dead; also for each wait of a list.
    """

    def __init__(
        self, api: Api, query: Query, template: Template, clock: Clock, watch_seconds: int = 240, slack: float = 30.0
    ) -> None:
        self._query = query
        self._template = template
        self._watch_seconds = watch_seconds
        cluster = Cluster(server=api.url, certificate_auth=None if api.authorities is None else str(api.authorities))
        user = User(token_file=None if api.token_file is None else str(api.token_file))
        self._transport = _ApiTransport(cluster, clock, watch_seconds + slack)
        self._client = lightkube.AsyncClient(
            lightkube.KubeConfig.from_one(cluster=cluster, user=user),
            timeout=httpx2.Timeout(slack, connect=5.0),
            trust_env=False,
            transport=self._transport,
        )
        self._slices = EndpointSlices(query.port)
        # A label that exists is written as its name alone, and so is a whole selector.
        self._labels: LabelSelector = {query.selector: None}

    @property
    def where(self) -> str:
        """See `Source`."""
        return f"EndpointSlices {self._query.selector} in {self._query.namespace}"

    async def list(self) -> Nodes:
        """See `Source`."""
        try:
            await self._list()
        except _TROUBLE as error:
            raise DiscoveryError(_sentence(error)) from error
        return tuple(node for node in self._nodes() if not isinstance(node, TerminatingNode))

    async def watch(self) -> AsyncGenerator[Nodes, None]:
        """See `Source`."""
        last: Nodes | None = None
        while True:
            try:
                async with contextlib.aclosing(self._list_and_watch()) as steps:
                    async for _ in steps:
                        self._transport.failures = 0
                        nodes = self._nodes()
                        if nodes != last:
                            last = nodes
                            yield nodes
            except _TROUBLE as error:
                self._transport.back_off()
                if _must_list(error):
                    self._slices.version = ""
                _LOG.warning("watching %s: %s", self.where, _sentence(error))

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def _list_and_watch(self) -> AsyncGenerator[None, None]:
        """List if need be, then watch; yields whenever the slices may have changed."""
        if not self._slices.version:
            await self._list()
            yield
        events = self._client.watch(
            EndpointSlice,
            namespace=self._query.namespace,
            labels=self._labels,
            server_timeout=self._watch_seconds,
            resource_version=self._slices.version,
        )
        # Typed as an iterable, it is a generator: left alone it would close its answer only when it is collected.
        async with contextlib.aclosing(cast(AsyncGenerator[tuple[str, EndpointSlice], None], events)) as opened:
            async for event, changed in opened:
                self._slices.apply(event, changed)
                yield

    async def _list(self) -> None:
        pages = self._client.list(EndpointSlice, namespace=self._query.namespace, labels=self._labels, chunk_size=_PAGE)
        found = [each async for each in pages]
        self._slices.replace(found, pages.resourceVersion)

    def _nodes(self) -> Nodes:
        ready = (self._template.node_at(host, port) for host, port in self._slices.addresses())
        going = (self._template.terminating(host, port) for host, port in self._slices.terminating())
        return (*ready, *going)


class _ApiTransport(httpx2.AsyncHTTPTransport):
    """Paces requests, for servers that end or refuse all watches at once, and completes the requests for watches; see
    the module's docstring. ``failures``: in a row.
    """

    def __init__(self, cluster: Cluster, clock: Clock, longest_silence: float) -> None:
        super().__init__(verify=verify_cluster(cluster, User(), str, trust_env=False))
        self._clock = clock
        self._longest_silence = longest_silence
        self._pause = 0.0
        self.failures = 0

    def back_off(self) -> None:
        """Before the next request, wait twice as long as after the failure before."""
        self._pause = min(_FIRST_PAUSE * 2.0 ** min(self.failures, 16), _LONGEST_PAUSE)
        self.failures += 1

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        pause, self._pause = self._pause, 0.0
        if pause:
            await self._clock.sleep(pause)
        if "watch" in request.url.params:
            self._pause = _FIRST_PAUSE  # however the watch ends
            request.url = request.url.copy_merge_params({"allowWatchBookmarks": "true"})
            request.extensions = {
                **request.extensions, "timeout": {**request.extensions["timeout"], "read": self._longest_silence}
            }  # fmt: skip
        response = await super().handle_async_request(request)
        if response.is_error:
            await response.aread()
            response.headers.setdefault("content-type", "")  # lightkube takes it for granted
        return response


def _must_list(error: Exception) -> bool:
    """Whether the watch cannot be resumed. A broken connection is no reason; what is garbled would come again."""
    if isinstance(error, httpx2.HTTPStatusError):
        # Without a response of its own it came inside of a watch, as the server's message that it cannot go on.
        response: httpx2.Response | None = error.response
        return response is None or response.status_code == _GONE
    return isinstance(error, (Lost, *_GARBLED))


def _sentence(error: Exception) -> str:
    if isinstance(error, httpx2.HTTPStatusError):
        response: httpx2.Response | None = error.response
        if response is not None:
            return f"the API server answers {response.status_code}: {response.text[:500]}"
        return f"the watch cannot go on, listing again: {error}"
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
