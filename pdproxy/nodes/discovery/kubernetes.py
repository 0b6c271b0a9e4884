"""Nodes behind a Kubernetes service, by watching its EndpointSlices; straight to the API, with the service account."""

import contextlib
import dataclasses
import logging
import urllib.parse
from collections.abc import AsyncGenerator, AsyncIterator, Callable

from pdproxy.clock import Clock
from pdproxy.errors import Fault, NodeFault
from pdproxy.nodes.discovery.slices import Book, Gone, Lines
from pdproxy.nodes.discovery.source import Changes, DiscoveryError, Nodes, Template
from pdproxy.transport.port import Incoming, Outgoing, Patience, Transport

_LOG = logging.getLogger(__name__)

_LARGEST_LIST = 256 * 1024 * 1024


@dataclasses.dataclass(frozen=True, slots=True)
class Query:
    """What to watch.

    Attributes:
        api: base address of the API server.
        namespace: where the service lives.
        selector: of labels, such as ``kubernetes.io/service-name=prefill``.
        port: the name of the port that nodes serve HTTP on; "" for the first.
    """

    api: str
    namespace: str
    selector: str
    port: str = ""

    def url(self, **more: str) -> str:
        """The address of the list, or with ``watch`` of the watch."""
        path = f"/apis/discovery.k8s.io/v1/namespaces/{urllib.parse.quote(self.namespace, safe='')}/endpointslices"
        return f"{self.api}{path}?{urllib.parse.urlencode({'labelSelector': self.selector, **more})}"


@dataclasses.dataclass(frozen=True, slots=True)
class WatchRules:
    """Times in seconds.

    Attributes:
        lasts: how long the server is asked to keep one watch open.
        slack: after which an overdue end means that the connection is dead.
        first_pause: after a watch's end; doubles with each failure in a row.
        longest_pause: where the doubling ends.
    """

    lasts: int = 240
    slack: float = 30.0
    first_pause: float = 1.0
    longest_pause: float = 30.0


class KubernetesSource:
    """Lists once, then watches; resumes where a watch broke off, and lists again when the server has lost its place.

    Args:
        token: reads the service account's token, which is replaced from time to time; "" sends none.
    """

    def __init__(
        self,
        transport: Transport,
        query: Query,
        template: Template,
        token: Callable[[], str],
        clock: Clock,
        rules: WatchRules | None = None,
    ) -> None:
        self._transport = transport
        self._query = query
        self._template = template
        self._token = token
        self._clock = clock
        self._rules = rules or WatchRules()
        self._book = Book(query.port)
        self._failures = 0

    @property
    def place(self) -> str:
        """See `Source`."""
        return f"EndpointSlices {self._query.selector} in {self._query.namespace}"

    async def list(self) -> Nodes:
        """See `Source`."""
        try:
            await self._list()
        except (Gone, NodeFault) as error:
            raise DiscoveryError(str(error)) from error
        return self._nodes()

    async def watch(self) -> AsyncGenerator[Nodes, None]:
        """See `Source`."""
        known = Changes()
        while True:
            try:
                async with contextlib.aclosing(self._follow()) as changes:
                    async for _ in changes:
                        nodes = self._nodes()
                        if known.is_new(nodes):
                            yield nodes
            except Gone as gone:
                self._failed(f"the watch lost its place, listing again: {gone}")
                self._book.version = ""
            except NodeFault as fault:
                self._failed(str(fault))
                if fault.fault is Fault.INVALID_BODY:  # it would only come again
                    self._book.version = ""
            await self._pause()

    async def _follow(self) -> AsyncGenerator[None, None]:
        """List if need be, then watch until the watch ends; yields whenever the book may have changed."""
        if not self._book.version:
            await self._list()
            self._failures = 0
            yield
        url = self._query.url(
            watch="1",
            allowWatchBookmarks="true",
            resourceVersion=self._book.version,
            timeoutSeconds=str(self._rules.lasts),
        )
        async with self._get(url, stall=self._rules.lasts + self._rules.slack) as incoming:
            lines = Lines()
            async for piece in incoming.chunks():
                for event in lines.feed(piece):
                    self._book.told(event)
                self._failures = 0
                yield

    def _nodes(self) -> Nodes:
        return tuple(self._template.node(host, port) for host, port in self._book.addresses())

    async def _list(self) -> None:
        async with self._get(self._query.url(), stall=self._rules.slack) as incoming:
            self._book.listed(await incoming.read(_LARGEST_LIST))

    @contextlib.asynccontextmanager
    async def _get(self, url: str, stall: float) -> AsyncIterator[Incoming]:
        token = self._token()
        headers = (("accept", "application/json"), *((("authorization", f"Bearer {token}"),) if token else ()))
        incoming = await self._transport.send(Outgoing("GET", url, headers), Patience(headers=30.0, stall=stall))
        try:
            await _judge(incoming)
            yield incoming
        finally:
            await incoming.aclose()

    def _failed(self, why: str) -> None:
        self._failures += 1
        _LOG.warning("watching %s: %s", self.place, why)

    async def _pause(self) -> None:
        """Also after a watch that ended as it should: a server that ends all of them at once is not to be hammered."""
        doubled = self._rules.first_pause * 2.0 ** min(max(self._failures - 1, 0), 16)
        await self._clock.sleep(min(doubled, self._rules.longest_pause))


async def _judge(incoming: Incoming) -> None:
    if incoming.status == 410:
        raise Gone("410")
    if incoming.status != 200:
        why = (await incoming.read(65536)).decode("utf-8", "replace")[:500]
        fault = Fault.CLIENT_ERROR if incoming.status < 500 else Fault.SERVER_ERROR
        raise NodeFault(fault, f"the API server answers {incoming.status}: {why}", status=incoming.status)
