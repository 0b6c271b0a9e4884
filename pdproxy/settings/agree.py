"""What settings must be together."""

from pathlib import Path
from urllib.parse import urlsplit

from pdproxy.errors import SettingsError
from pdproxy.settings.choices import Credential, Finding, OtelExport
from pdproxy.settings.sections import Discovery, Limits, Listen, NodeEntry, Settings, Upstream


def agree(settings: Settings) -> None:
    """Return if the settings go together.

    Raises:
        SettingsError: naming those that do not, and what to change.
    """
    _listen(settings.listen)
    _limits(settings.limits)
    _upstream(settings.upstream)
    _nodes(settings.nodes)
    _discovery(settings.discovery)
    if settings.otel.export is OtelExport.OTLP:
        _url("otel.endpoint", settings.otel.endpoint)
    for key, path in _files(settings).items():
        if path is not None and not path.is_file():
            raise SettingsError(f"{key}: there is no file {path}.")


def _listen(listen: Listen) -> None:
    for key, host in (("listen.host", listen.host), ("listen.admin_host", listen.admin_host)):
        if not host:
            raise SettingsError(f"{key} must be an address; 0.0.0.0 is all of the machine's.")
    if listen.port and listen.port == listen.admin_port:
        raise SettingsError(
            f"listen.port and listen.admin_port are both {listen.port}: clients and operators need a port each."
        )
    if (listen.tls_certificate is None) != (listen.tls_key is None):
        raise SettingsError("listen.tls_certificate and listen.tls_key go together: set both, or neither.")


def _limits(limits: Limits) -> None:
    if limits.held_bytes < limits.body_bytes:
        raise SettingsError(
            f"limits.held_bytes ({limits.held_bytes}) is less than limits.body_bytes ({limits.body_bytes}):"
            " the largest body would never fit. Raise the one, or lower the other."
        )


def _upstream(upstream: Upstream) -> None:
    if upstream.credential is Credential.REPLACE and upstream.credential_file is None:
        raise SettingsError("upstream.credential is replace: name the file in upstream.credential_file.")


def _nodes(nodes: tuple[NodeEntry, ...]) -> None:
    seen: set[tuple[str, str]] = set()
    for node in nodes:
        _url(f"the {node.role} node", node.url)
        if (node.url, node.role) in seen:
            raise SettingsError(f"the {node.role} node {node.url} is there twice; use weight to give it more.")
        seen.add((node.url, node.role))


def _discovery(discovery: Discovery) -> None:
    for role, kind in (("prefill", discovery.prefill), ("decode", discovery.decode)):
        needed = _needed(kind, role)
        if needed and not getattr(discovery, needed):
            raise SettingsError(f"discovery.{role} is {kind}: that needs discovery.{needed}.")
    if discovery.api:
        _url("discovery.api", discovery.api)


def _needed(kind: Finding, role: str) -> str:
    """The setting without which nothing can be found; "" where there is none."""
    match kind:
        case Finding.FILE:
            return "file"
        case Finding.DNS:
            return f"{role}_name"
        case Finding.KUBERNETES:
            return f"{role}_selector"
        case Finding.STATIC:
            return ""


def _url(what: str, url: str) -> None:
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, or too large
        usable = False
    if not usable or url.strip() != url or " " in url:
        raise SettingsError(f"{what}: {url!r} is not an address such as http://10.0.0.1:8000.")
    if parts.username is not None or parts.query or parts.fragment:
        raise SettingsError(f"{what}: an address has no credentials, query or fragment.")


def _files(settings: Settings) -> dict[str, Path | None]:
    return {
        "listen.admin_token_file": settings.listen.admin_token_file,
        "listen.tls_certificate": settings.listen.tls_certificate,
        "listen.tls_key": settings.listen.tls_key,
        "upstream.credential_file": settings.upstream.credential_file,
        "upstream.ca_file": settings.upstream.ca_file,
        "keys.file": settings.keys.file,
        "discovery.file": settings.discovery.file,
    }
