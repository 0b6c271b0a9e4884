"""Where nodes are found besides the settings: a source for each role that wants one."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from pdproxy.app.secrets import tls
from pdproxy.clock import Clock
from pdproxy.errors import SettingsError
from pdproxy.nodes.discovery.dns import DnsSource, Name, Resolver, SystemResolver
from pdproxy.nodes.discovery.file import FileSource
from pdproxy.nodes.discovery.service_account import ServiceAccount, api_address
from pdproxy.nodes.discovery.source import Source, Template
from pdproxy.nodes.node import Role
from pdproxy.settings import Discovery, Finding

if TYPE_CHECKING:
    from pdproxy.nodes.discovery.kubernetes import Api, KubernetesSource


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
        SettingsError: Kubernetes is asked for, and this is no pod that may ask it, or its client is not installed.
    """

    def __init__(self, discovery: Discovery, clock: Clock, around: Surroundings) -> None:
        self._discovery = discovery
        self._clock = clock
        self._around = around
        self._watching: list[KubernetesSource] = []
        self.all: tuple[Source, ...] = tuple(self._made())

    async def aclose(self) -> None:
        """Close the connections to the API server. Not before the sources have been left."""
        for source in self._watching:
            await source.aclose()

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

    def _kubernetes(self, role: Role) -> "KubernetesSource":
        try:
            from pdproxy.nodes.discovery.kubernetes import KubernetesSource, Query  # heavy, and an extra
        except ModuleNotFoundError as error:
            raise SettingsError(
                f"discovery.{role} is 'kubernetes', and the package {error.name} is missing: "
                "pip install 'pdproxy[kubernetes]' brings it (the proxy's image has it)."
            ) from error
        said = self._discovery
        selector = {Role.PREFILL: said.prefill_selector, Role.DECODE: said.decode_selector}[role]
        api = self._api()
        query = Query(said.namespace or self._around.account.namespace(), selector, said.port_name)
        source = KubernetesSource(api, query, self._template(role), self._clock)
        self._watching.append(source)
        return source

    def _api(self) -> "Api":
        """The API server's certificate is signed by the cluster's own authority, nodes' ones perhaps by another."""
        from pdproxy.nodes.discovery.kubernetes import Api

        account = self._around.account
        url = self._discovery.api.rstrip("/") or api_address(self._around.environment)
        if not url.startswith("https:"):
            return Api(url, account.token)
        tls(account.authorities, "the service account's ca.crt")  # a file that cannot be used ends the start
        return Api(url, account.token, account.authorities)

    def _template(self, role: Role) -> Template:
        return Template(role, self._discovery.scheme)
