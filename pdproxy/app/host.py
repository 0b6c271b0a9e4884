"""What the proxy takes from the machine it runs on: discovery sources, secrets and TLS files."""

import dataclasses
import ssl
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pdproxy.clock import Clock
from pdproxy.errors import SettingsError
from pdproxy.nodes.discovery.dns import DnsSource, Resolver, SystemResolver
from pdproxy.nodes.discovery.file import FileSource
from pdproxy.nodes.discovery.source import Source, Template
from pdproxy.nodes.node import Role
from pdproxy.request import Headers
from pdproxy.settings import Discovery, DiscoveryKind, Upstream

if TYPE_CHECKING:
    from pdproxy.nodes.discovery.kubernetes import Api, KubernetesSource


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

    def __init__(self, discovery: Discovery, clock: Clock, around: HostEnvironment) -> None:
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
        in_file = frozenset(role for role, kind in kinds.items() if kind is DiscoveryKind.FILE)
        if in_file and self._discovery.file is not None:
            yield FileSource(self._discovery.file, self._clock, self._discovery.file_interval, in_file)
        for role, kind in kinds.items():
            if kind is DiscoveryKind.DNS:
                yield self._dns(role)
            elif kind is DiscoveryKind.KUBERNETES:
                yield self._kubernetes(role)

    def _dns(self, role: Role) -> DnsSource:
        said = self._discovery
        name = {Role.PREFILL: said.prefill_name, Role.DECODE: said.decode_name}[role]
        port, template = said.dns_port or None, self._template(role)
        return DnsSource(self._around.resolver, name, port, template, self._clock, said.dns_interval)

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


def read_secret(path: Path | None, setting: str) -> str:
    """A file's one word; "" without a file.

    Raises:
        SettingsError: it cannot be read, or is empty, or holds several words.
    """
    if path is None:
        return ""
    try:
        words = path.read_text().split()
    except OSError as error:
        raise SettingsError(f"{setting}: {path} cannot be read: {error.strerror}.") from error
    if len(words) != 1:
        raise SettingsError(f"{setting}: {path} must hold one word, and holds {len(words)}.")
    return words[0]


def own_credential(upstream: Upstream) -> str:
    """The operator's credential for the nodes; "" where none is set.

    Raises:
        SettingsError: the file is unusable.
    """
    return read_secret(upstream.credential_file, "upstream.credential_file")


def own_headers(credential: str) -> Headers:
    """What the proxy's own questions to nodes (health, preflight, releases) carry."""
    return (("authorization", f"Bearer {credential}"),) if credential else ()


def node_tls(upstream: Upstream) -> ssl.SSLContext:
    """How https nodes are trusted.

    Raises:
        SettingsError: the file of authorities is unusable.
    """
    return tls(upstream.ca_file, "upstream.ca_file")


def check_pair(certificate: Path | None, key: Path | None) -> None:
    """Whether the clients' port can be served with them; None for both is plain HTTP.

    Raises:
        SettingsError: they are no certificate and its key, or the key needs a password.
    """
    if certificate is None or key is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password=_no_password)
    except OSError as error:
        text = f"listen.tls_certificate, listen.tls_key: {certificate} and {key} are no certificate and its key"
        raise SettingsError(f"{text}, in PEM and without a password: {error}.") from error


def _no_password() -> str:
    """Else a terminal is asked for it."""
    return "none"


def tls(authorities: Path | None, what: str) -> ssl.SSLContext:
    """Trust in the authorities of a PEM file; None for the system's.

    Raises:
        SettingsError: the file is unusable.
    """
    try:
        return ssl.create_default_context(cafile=authorities)
    except OSError as error:
        raise SettingsError(f"{what}: {authorities} is not usable: {error}.") from error
