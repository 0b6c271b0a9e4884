"""Connections that NetworkPolicies let through, as Kubernetes defines it: enough of it for the chart's own."""

import dataclasses
from collections.abc import Iterable, Mapping

from tests.helm.engine import Manifest

Labels = Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class Pod:
    """Labels of a pod and of its namespace. The policies' own namespace is ``home``."""

    labels: Labels
    home: bool = True
    namespace: Labels = dataclasses.field(default_factory=dict)


def allowed(policies: Iterable[Manifest], source: Pod, target: Pod, port: int, protocol: str = "TCP") -> bool:
    """Whether ``source`` may connect to ``target``: both the one's egress and the other's ingress must let it."""
    policies = list(policies)
    out = _side(policies, "Egress", source, target, port, protocol)
    return out and _side(policies, "Ingress", target, source, port, protocol)


def _side(policies: list[Manifest], kind: str, subject: Pod, peer: Pod, port: int, protocol: str) -> bool:
    specs = [policy["spec"] for policy in policies if kind in policy["spec"]["policyTypes"]]
    mine = [spec for spec in specs if subject.home and _matches(spec["podSelector"], subject.labels)]
    rules = [rule for spec in mine for rule in spec.get(kind.lower(), [])]
    direction = "from" if kind == "Ingress" else "to"
    return not mine or any(
        _port_fits(rule.get("ports"), port, protocol) and _peer_fits(rule.get(direction), peer) for rule in rules
    )


def _port_fits(ports: list[Manifest] | None, port: int, protocol: str) -> bool:
    return ports is None or any(
        each["protocol"] == protocol and each["port"] <= port <= (each.get("endPort") or each["port"]) for each in ports
    )


def _peer_fits(peers: list[Manifest] | None, pod: Pod) -> bool:
    return not peers or any(_is_peer(peer, pod) for peer in peers)


def _is_peer(peer: Manifest, pod: Pod) -> bool:
    if "namespaceSelector" not in peer and not pod.home:
        return False
    return _matches(peer.get("namespaceSelector", {}), pod.namespace) and _matches(
        peer.get("podSelector", {}), pod.labels
    )


def _matches(selector: Manifest, labels: Labels) -> bool:
    assert selector.keys() <= {"matchLabels"}, "this reads only labels"
    wanted: Labels = selector.get("matchLabels", {})
    return wanted.items() <= labels.items()
