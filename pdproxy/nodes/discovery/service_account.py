"""The service account that Kubernetes puts into a pod."""

from collections.abc import Mapping
from pathlib import Path

from pdproxy.errors import SettingsError

MOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


class ServiceAccount:
    """The mounted files.

    Args:
        mount: where they are.
    """

    def __init__(self, mount: Path = MOUNT) -> None:
        self._mount = mount

    @property
    def authorities(self) -> Path:
        """PEM certificates that the API server's certificate is checked against."""
        return self._mount / "ca.crt"

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
    """The API server as a pod's environment names it.

    Raises:
        SettingsError: it does not.
    """
    host, port = environment.get("KUBERNETES_SERVICE_HOST"), environment.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        raise SettingsError("KUBERNETES_SERVICE_HOST is not set: Kubernetes discovery works inside a cluster only")
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
