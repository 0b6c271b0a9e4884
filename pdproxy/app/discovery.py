"""Where nodes are found besides the settings: a source for each role that wants one."""

import dataclasses
import ssl
from collections.abc import Iterable, Mapping

from pdproxy.app.secrets import tls
from pdproxy.clock import Clock
from pdproxy.nodes.discovery.account import ServiceAccount, api_address
from pdproxy.nodes.discovery.dns import DnsSource, Name, Resolver, SystemResolver
from pdproxy.nodes.discovery.file import FileSource
from pdproxy.nodes.discovery.kubernetes import KubernetesSource, Query
from pdproxy.nodes.discovery.source import Source, Template
from pdproxy.nodes.node import Role
from pdproxy.settings import Discovery, Finding
from pdproxy.transport.http import HttpTransport


@dataclasses.dataclass(frozen=True, slots=True)
class Surroundings:
    """What the machine offers to look things up with.

    Attributes:
        environment: the process's.
        account: of the pod, where it is one.
        resolver: of names.
    """

    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    account: ServiceAccount = dataclasses.field(default_factory=ServiceAccount)
    resolver: Resolver = dataclasses.field(default_factory=SystemResolver)


class Sources:
    """What the settings ask for, as sources to follow; whoever makes one must `aclose` it.

    Raises:
        SettingsError: Kubernetes is asked for, and this is no pod that may ask it.
    """

    def __init__(self, discovery: Discovery, clock: Clock, around: Surroundings) -> None:
        self._discovery = discovery
        self._clock = clock
        self._around = around
        self._api: HttpTransport | None = None
        self.all: tuple[Source, ...] = tuple(self._made())

    async def aclose(self) -> None:
        """Close the connections to the API server. Not before the sources have been left."""
        if self._api is not None:
            await self._api.aclose()

    def _made(self) -> Iterable[Source]:
        kinds = {Role.PREFILL: self._discovery.prefill, Role.DECODE: self._discovery.decode}
        in_file = frozenset(role for role, kind in kinds.items() if kind is Finding.FILE)
        if in_file and self._discovery.file is not None:
            yield FileSource(self._discovery.file, self._clock, self._discovery.file_interval, in_file)
        for role, kind in kinds.items():
            if kind is Finding.DNS:
                yield self._dns(role)
            elif kind is Finding.KUBERNETES:
                yield self._kubernetes(role)

    def _dns(self, role: Role) -> DnsSource:
        said = self._discovery
        name = Name({Role.PREFILL: said.prefill_name, Role.DECODE: said.decode_name}[role], said.dns_port or None)
        return DnsSource(self._around.resolver, name, self._template(role), self._clock, said.dns_interval)

    def _kubernetes(self, role: Role) -> KubernetesSource:
        said, account = self._discovery, self._around.account
        api = said.api.rstrip("/") or api_address(self._around.environment)
        if self._api is None:
            self._api = HttpTransport(self._clock, self._trust(api))
        selector = {Role.PREFILL: said.prefill_selector, Role.DECODE: said.decode_selector}[role]
        query = Query(api, said.namespace or account.namespace(), selector, said.port_name)
        return KubernetesSource(self._api, query, self._template(role), account.token, self._clock)

    def _trust(self, api: str) -> ssl.SSLContext | None:
        """The API server's certificate is signed by the cluster's own authority, nodes' ones perhaps by another."""
        if not api.startswith("https:"):
            return None
        return tls(self._around.account.authorities, "the service account's ca.crt")

    def _template(self, role: Role) -> Template:
        return Template(role, self._discovery.scheme)
