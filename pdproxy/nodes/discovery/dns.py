"""Nodes behind a DNS name: every address of a headless service, or every service that SRV records list."""

import asyncio
from collections.abc import AsyncGenerator, Iterable
from typing import TYPE_CHECKING, Protocol

from pdproxy.clock import Clock
from pdproxy.nodes.discovery.source import DiscoveryError, Nodes, Template, poll

if TYPE_CHECKING:
    from dns.asyncresolver import Resolver as Stub


class Resolver(Protocol):
    """Looks names up. Both methods raise `DiscoveryError` where the look-up fails."""

    async def addresses(self, name: str) -> tuple[str, ...]:
        """The name's addresses, sorted; empty when it has none."""
        ...

    async def services(self, name: str) -> tuple[tuple[str, int], ...]:
        """Host and port of the name's SRV records of the best (lowest) priority, sorted; empty when it has none."""
        ...


class SystemResolver:
    """The resolver that this machine is configured to use.

    Addresses are looked up by the system itself, which alone knows /etc/hosts and nsswitch.conf. It has no call for SRV
    records: dnspython asks the configured name servers for those, each within the search domains.

    Args:
        configuration: the file with name servers and search domains.
        port: of the name servers.
        timeout: seconds for a look-up of services, repetitions included.
    """

    def __init__(self, configuration: str = "/etc/resolv.conf", port: int = 53, timeout: float = 5.0) -> None:
        self._configuration = configuration
        self._port = port
        self._timeout = timeout

    async def addresses(self, name: str) -> tuple[str, ...]:
        """See `Resolver`."""
        try:
            found = await asyncio.get_running_loop().getaddrinfo(name, None)
        except (OSError, UnicodeError) as error:  # UnicodeError: it is no name at all
            raise DiscoveryError(str(error)) from error
        return tuple(sorted({str(entry[4][0]) for entry in found}))

    async def services(self, name: str) -> tuple[tuple[str, int], ...]:
        """See `Resolver`. Lost datagrams are sent again; what does not fit into one is asked for over TCP."""
        from dns.exception import DNSException  # here, so that only look-ups of services pay for it
        from dns.rdtypes.IN.SRV import SRV
        from dns.resolver import NXDOMAIN, LifetimeTimeout

        try:
            stub = await asyncio.to_thread(self._stub)
            answer = await stub.resolve(name, "SRV", search=True, raise_on_no_answer=False)
        except NXDOMAIN:
            return ()
        except LifetimeTimeout as error:  # its own text differs each time, and would be logged each time
            raise DiscoveryError(f"no name server answered within {self._timeout:g} s") from error
        except DNSException as error:
            raise DiscoveryError(str(error) or type(error).__name__) from error
        records = ((each.priority, each.target.to_text(True), each.port) for each in answer if isinstance(each, SRV))
        return best_services(records)

    def _stub(self) -> "Stub":
        """A new one each time: the configuration may have changed."""
        from dns.asyncresolver import Resolver

        stub = Resolver(self._configuration)
        stub.port = self._port
        stub.lifetime = self._timeout
        return stub


def best_services(records: Iterable[tuple[int, str, int]]) -> tuple[tuple[str, int], ...]:
    """Host and port, sorted, of the records (priority, host, port) of the lowest priority.

    RFC 2782: the host "." stands for a service that is not there.
    """
    there = [record for record in records if record[1] not in ("", ".")]
    lowest = min((priority for priority, _, _ in there), default=0)
    return tuple(sorted({(host, port) for priority, host, port in there if priority == lowest}))


class DnsSource:
    """Looks a name up again and again.

    Args:
        port: of the nodes, at the name's addresses; None looks SRV records up, which have ports themselves.
        interval: seconds between two look-ups, whatever the records' times to live.
    """

    def __init__(
        self,
        resolver: Resolver,
        name: str,
        port: int | None,
        template: Template,
        clock: Clock,
        interval: float = 10.0,
    ) -> None:
        self._resolver = resolver
        self._name = name
        self._port = port
        self._template = template
        self._clock = clock
        self._interval = interval

    @property
    def where(self) -> str:
        """See `Source`."""
        return f"the name {self._name}"

    def watch(self) -> AsyncGenerator[Nodes, None]:
        """See `Source`. A name without records keeps its last nodes: a name server that lost its data looks like a
        service with no ready node, and active health tells the two apart."""
        return poll(self.where, self._list_some, self._clock, self._interval)

    async def list(self) -> Nodes:
        """See `Source`."""
        if self._port is not None:
            addresses = await self._resolver.addresses(self._name)
            return tuple(self._template.node_at(address, self._port) for address in addresses)
        return tuple(self._template.node_at(host, port) for host, port in await self._resolver.services(self._name))

    async def _list_some(self) -> Nodes:
        nodes = await self.list()
        if not nodes:
            raise DiscoveryError("it has no records")
        return nodes
