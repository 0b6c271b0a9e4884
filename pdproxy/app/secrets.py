"""What lies in files because it must not lie in settings: credentials, certificates."""

import ssl
from pathlib import Path

from pdproxy.errors import SettingsError
from pdproxy.request import Headers
from pdproxy.settings import Upstream


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
