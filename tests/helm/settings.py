"""The proxy's settings, as its pods would read them."""

from pathlib import Path

from pdproxy.settings.load import load
from pdproxy.settings.model import Settings
from tests.helm.engine import Manifest, Manifests, only_container


def pod_of(manifests: Manifests) -> Manifest:
    """The pod template of the proxy."""
    pod: Manifest = manifests.one("Deployment")["spec"]["template"]
    return pod


def loaded(manifests: Manifests, there: Path) -> Settings:
    """The settings that the proxy would read; the mounted secrets' files lie in ``there``. Raises SettingsError."""
    container = only_container(pod_of(manifests))
    for name in ("access/node.key", "access/admin.token", "keys/api.keys", "nodes/ca.crt"):
        (there / name).parent.mkdir(exist_ok=True)
        (there / name).write_text("word\n")
    [text] = [each["data"]["pdproxy.yaml"] for each in manifests.of("ConfigMap") if "pdproxy.yaml" in each["data"]]
    (there / "pdproxy.yaml").write_text(text.replace("/etc/pdproxy", str(there)))
    return load(None, there / "pdproxy.yaml", {each["name"]: each["value"] for each in container["env"]})
