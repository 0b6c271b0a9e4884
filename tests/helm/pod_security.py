"""Which PodSecurity level a pod needs: as much of Kubernetes' standards as the chart's pods touch.

https://kubernetes.io/docs/concepts/security/pod-security-standards/
"""

from collections.abc import Iterator

from tests.helm.engine import Manifest

ANYBODY_MAY_ADD = {
    *("AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "MKNOD", "NET_BIND_SERVICE"),
    *("SETFCAP", "SETGID", "SETPCAP", "SETUID", "SYS_CHROOT"),
}
"""Capabilities that `baseline` lets a container add."""
PLAIN_VOLUMES = {
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "persistentVolumeClaim",
    "projected",
    "secret",
}
"""Kinds of volumes that `restricted` allows."""


def level(pod: Manifest) -> str:
    """The strictest level that takes a pod: ``restricted``, ``baseline`` or ``privileged``."""
    if any(_beyond_baseline(pod)):
        return "privileged"
    return "baseline" if any(_beyond_restricted(pod)) else "restricted"


def _containers(pod: Manifest) -> list[Manifest]:
    return [*pod["spec"]["containers"], *pod["spec"].get("initContainers", [])]


def _beyond_baseline(pod: Manifest) -> Iterator[bool]:
    spec = pod["spec"]
    yield any(spec.get(host) for host in ("hostNetwork", "hostPID", "hostIPC"))
    yield any("hostPath" in volume for volume in spec.get("volumes", []))
    for container in _containers(pod):
        context = container.get("securityContext", {})
        yield bool(context.get("privileged"))
        yield not set(context.get("capabilities", {}).get("add", [])) <= ANYBODY_MAY_ADD
        yield any("hostPort" in port for port in container.get("ports", []))


def _beyond_restricted(pod: Manifest) -> Iterator[bool]:
    spec = pod["spec"]
    whole = spec.get("securityContext", {})
    yield any(not volume.keys() - {"name"} <= PLAIN_VOLUMES for volume in spec.get("volumes", []))
    for container in _containers(pod):
        context = {**whole, **container.get("securityContext", {})}
        capabilities = context.get("capabilities", {})
        yield context.get("allowPrivilegeEscalation") is not False
        yield context.get("runAsNonRoot") is not True or context.get("runAsUser") == 0
        yield context.get("seccompProfile", {}).get("type") not in ("RuntimeDefault", "Localhost")
        yield capabilities.get("drop") != ["ALL"] or not set(capabilities.get("add", [])) <= {"NET_BIND_SERVICE"}
