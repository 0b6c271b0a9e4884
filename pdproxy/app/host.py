"""The proxy's host: discovery sources, secrets and TLS files."""

import asyncio
import dataclasses
import functools
import importlib
import ssl
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pdproxy.app.files import FileWatcher
from pdproxy.clock import Clock
from pdproxy.credential import Secret, read_secret
from pdproxy.errors import SettingsError
from pdproxy.intake.auth import ApiKeys, read_keys
from pdproxy.nodes.discovery.dns import DnsSource, Resolver, SystemResolver
from pdproxy.nodes.discovery.source import NodeSource, Template
from pdproxy.nodes.node import BOTH, DECODE, PREFILL, Roles
from pdproxy.observe.labels import WatchedSetting
from pdproxy.observe.metrics import Metrics
from pdproxy.settings.model import Discovery, Settings, Upstream
from pdproxy.settings.types import DiscoveryKind, kind_of_node
from pdproxy.transport.h1_client import H1Transport
from pdproxy.transport.port import HttpRequest, HttpResponse, Timeouts

if TYPE_CHECKING:
    from pdproxy.nodes.discovery.kubernetes import Api, KubernetesSource
    from pdproxy.transport.httpx_transport import HttpxTransport


class ServiceAccount:
    """The files of the service account that Kubernetes mounts into a pod."""

    def __init__(self, mount: Path = Path("/var/run/secrets/kubernetes.io/serviceaccount")) -> None:
        self._mount = mount
        self.authorities = mount / "ca.crt"
        """PEM certificates that the API server's certificate is checked against."""

    @property
    def token(self) -> Path | None:
        """Where the token is, which the kubelet replaces about every hour; None where there is none."""
        path = self._mount / "token"
        return path if path.exists() else None

    def namespace(self) -> str:
        """The pod's own namespace.

        Raises:
            SettingsError: there is no service account.
        """
        try:
            return (self._mount / "namespace").read_text(encoding="ascii").strip()
        except OSError as error:
            raise SettingsError(
                "no Kubernetes service account is mounted: name the namespace, and run in a pod whose "
                "automountServiceAccountToken is not false"
            ) from error


def api_address(environment: Mapping[str, str]) -> str:
    """The Kubernetes API server, from a pod's environment variables.

    Raises:
        SettingsError: they do not name it.
    """
    host, port = environment.get("KUBERNETES_SERVICE_HOST"), environment.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        raise SettingsError("KUBERNETES_SERVICE_HOST is not set: Kubernetes discovery works inside a cluster only")
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"


@dataclasses.dataclass(frozen=True, slots=True)
class HostEnvironment:
    """The process's environment variables, its pod's service account (if it runs in one), and its DNS resolver."""

    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    account: ServiceAccount = dataclasses.field(default_factory=ServiceAccount)
    resolver: Resolver = dataclasses.field(default_factory=SystemResolver)


class Sources:
    """The discovery sources that the settings ask for. To be closed (`aclose`).

    Raises:
        SettingsError: Kubernetes is asked for, and this is no pod that may ask it, or its client is not installed.
    """

    def __init__(self, discovery: Discovery, clock: Clock, host: HostEnvironment) -> None:
        self._discovery = discovery
        self._clock = clock
        self._host = host
        self._watching: list[KubernetesSource] = []
        self.all: tuple[NodeSource, ...] = tuple(self._sources())

    async def aclose(self) -> None:
        """Close the connections to the API server. Not before the sources are no longer watched."""
        for source in self._watching:
            await source.aclose()

    def _sources(self) -> Iterable[NodeSource]:
        settings = self._discovery
        kinds = {PREFILL: settings.prefill, DECODE: settings.decode, BOTH: settings.node}
        in_file = frozenset(role for roles, kind in kinds.items() if kind is DiscoveryKind.FILE for role in roles)
        if in_file and settings.file is not None:
            from pdproxy.nodes.discovery.file import FileSource  # its model takes 3 % of all imports

            yield FileSource(settings.file, self._clock, settings.file_interval, in_file)
        for roles, kind in kinds.items():
            if kind is DiscoveryKind.DNS:
                yield self._dns(roles)
            elif kind is DiscoveryKind.KUBERNETES:
                yield self._kubernetes(roles)

    def _dns(self, roles: Roles) -> DnsSource:
        settings = self._discovery
        names = {PREFILL: settings.prefill_name, DECODE: settings.decode_name, BOTH: settings.node_name}
        port, template = settings.dns_port or None, Template(roles, settings.scheme)
        return DnsSource(self._host.resolver, names[roles], port, template, self._clock, settings.dns_interval)

    def _kubernetes(self, roles: Roles) -> "KubernetesSource":
        try:
            from pdproxy.nodes.discovery.kubernetes import KubernetesSource, Query  # heavy, and an extra
        except ModuleNotFoundError as error:
            raise SettingsError(
                f"discovery.{kind_of_node(roles)} is 'kubernetes', and the package {error.name} is missing: "
                "pip install 'pdproxy[kubernetes]' brings it (the proxy's image has it)."
            ) from error
        settings = self._discovery
        selectors = {PREFILL: settings.prefill_selector, DECODE: settings.decode_selector, BOTH: settings.node_selector}
        api = self._api()
        query = Query(settings.namespace or self._host.account.namespace(), selectors[roles], settings.port_name)
        source = KubernetesSource(api, query, Template(roles, settings.scheme), self._clock)
        self._watching.append(source)
        return source

    def _api(self) -> "Api":
        """The API server's certificate is signed by the cluster's own authority, nodes' ones perhaps by another."""
        from pdproxy.nodes.discovery.kubernetes import Api

        account = self._host.account
        url = self._discovery.api.rstrip("/") or api_address(self._host.environment)
        if not url.startswith("https:"):
            return Api(url, account.token)
        tls(account.authorities, "the service account's ca.crt")  # a file that cannot be used ends the start
        return Api(url, account.token, account.authorities)


class Secrets:
    """The secrets of clients, operators and the proxy itself, as the files of the settings have them now.

    Raises:
        SettingsError: one of these files cannot be used.
    """

    def __init__(self, settings: Settings, files: FileWatcher, metrics: Metrics) -> None:
        self._metrics = metrics
        self.keys, self.admin_token, self.credential = ApiKeys(), Secret(), Secret()
        path = settings.keys.file
        files.add(WatchedSetting.KEYS, (path,), lambda: self._accept(read_keys(path)))
        for secret, setting, file in (
            (self.admin_token, WatchedSetting.ADMIN_TOKEN, settings.listen.admin_token_file),
            (self.credential, WatchedSetting.CREDENTIAL, settings.upstream.credential_file),
        ):
            files.add(setting, (file,), functools.partial(_replace, secret, file, setting))

    def _accept(self, keys: ApiKeys) -> None:
        self.keys.replace(keys)
        for name in sorted(keys.names()):
            self._metrics.keys.series(name)


def _replace(secret: Secret, path: Path | None, setting: WatchedSetting) -> None:
    secret.replace(read_secret(path, setting))


class PreflightTransport:
    """An `HttpxTransport` that is made for the first request: httpx takes a tenth of the start, before which no port is
    open. See `port.Transport`.
    """

    def __init__(self, ssl_context: ssl.SSLContext) -> None:
        self._ssl_context = ssl_context
        self._made: HttpxTransport | None = None
        self._making = asyncio.Lock()

    def trust(self, ssl_context: ssl.SSLContext) -> None:
        """Check the certificates of https nodes by this from now on."""
        self._ssl_context = ssl_context
        if self._made is not None:
            self._made.trust(ssl_context)

    async def send(self, request: HttpRequest, timeouts: Timeouts) -> HttpResponse:
        """See `HttpxTransport.send`."""
        return await (self._made or await self._make()).send(request, timeouts)

    async def aclose(self) -> None:
        """Close every connection."""
        if self._made is not None:
            await self._made.aclose()

    async def _make(self) -> "HttpxTransport":
        """In a thread: the event loop goes on meanwhile."""
        async with self._making:
            if self._made is None:
                await asyncio.to_thread(importlib.import_module, "pdproxy.transport.httpx_transport")
                from pdproxy.transport.httpx_transport import HttpxTransport

                self._made = HttpxTransport(self._ssl_context)
            return self._made


def transports(
    upstream: Upstream, clock: Clock, files: FileWatcher, metrics: Metrics
) -> tuple[H1Transport, PreflightTransport]:
    """For requests and for the preflight; both check certificates by what the file of authorities holds now."""
    authorities = upstream.ca_file
    context = tls(authorities, WatchedSetting.AUTHORITIES, upstream.server_name)
    both = H1Transport(clock, context, metrics.resent), PreflightTransport(context)

    def trust() -> None:
        context = tls(authorities, WatchedSetting.AUTHORITIES, upstream.server_name)
        for transport in both:
            transport.trust(context)

    if authorities is not None:
        files.add(WatchedSetting.AUTHORITIES, (authorities,), trust)
    return both


def check_pair(certificate: Path | None, key: Path | None) -> None:
    """Check that the clients' port can be served with a certificate and its key; None for both is plain HTTP.

    Raises:
        SettingsError: they are no certificate and its key, or the key needs a password.
    """
    if certificate is None or key is None:
        return
    try:
        # Without a password here, a terminal would be asked for one.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="none")
    except OSError as error:
        text = f"listen.tls_certificate, listen.tls_key: {certificate} and {key} are no certificate and its key"
        raise SettingsError(f"{text}, in PEM and without a password: {error}.") from error


def renew_pair(context: ssl.SSLContext, certificate: Path, key: Path) -> None:
    """Have a server's context use what the two files hold now, for connections that begin from now on.

    Raises:
        SettingsError: as `check_pair`, which comes first: a load that fails may leave the context without a key.
    """
    check_pair(certificate, key)
    try:
        context.load_cert_chain(certificate, key, password="none")
    except OSError as error:  # they changed between the two, and will be read again
        raise SettingsError(f"listen.tls_certificate, listen.tls_key: {error}.") from error


class NamedServerContext(ssl.SSLContext):
    """A client's TLS context that asks every server for a certificate of one name, whatever address it is reached by.

    Pods have addresses that no certificate can know beforehand. asyncio and httpx both name the server here. The
    system's authorities, where they are wanted, are loaded for the first connection: that takes a twentieth of the
    start, and most nodes speak plain HTTP.
    """

    server_name = ""
    wants_default_certs = False

    def wrap_bio(
        self,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
        server_side: bool = False,
        server_hostname: str | bytes | None = None,
        session: ssl.SSLSession | None = None,
    ) -> ssl.SSLObject:
        """See `ssl.SSLContext.wrap_bio`."""
        if self.wants_default_certs:
            self.load_default_certs()
            self.wants_default_certs = False
        return super().wrap_bio(incoming, outgoing, server_side, self.server_name or server_hostname, session)


def tls(authorities: Path | None, setting: str, server_name: str = "") -> ssl.SSLContext:
    """A client's TLS context with the authorities of a PEM file; None for the system's.

    ``server_name``: what certificates must hold; empty is the host of each address.

    Raises:
        SettingsError: the file is unusable.
    """
    context = NamedServerContext(ssl.PROTOCOL_TLS_CLIENT)
    context.server_name = server_name
    if authorities is None:
        context.wants_default_certs = True
        return context
    try:
        context.load_verify_locations(authorities)
    except OSError as error:
        raise SettingsError(f"{setting}: {authorities} is not usable: {error}.") from error
    return context
