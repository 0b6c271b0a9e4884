"""Whether the nodes have joined their proxy, as its operators' port tells."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from deploy.local.readiness import fetch

UP = "up"
REFUSED = "refused"


class NodeRefusedError(Exception):
    """The proxy does not take a node; the message holds its reason."""


@dataclass(frozen=True)
class Standing:
    """One node as the proxy sees it. `state` is the proxy's word; `reason` is empty where there is nothing to say."""

    name: str
    state: str
    reason: str


def parse(body: bytes) -> list[Standing]:
    """Read the answer of `GET /nodes`."""
    return [Standing(node["name"], node["state"], node["reason"]) for node in json.loads(body)["nodes"]]


def all_up(nodes: Sequence[Standing]) -> bool:
    """Whether all serve. Raises NodeRefusedError for one that never will."""
    for node in nodes:
        if node.state == REFUSED:
            raise NodeRefusedError(f"the proxy refuses node {node.name}: {node.reason}")
    return bool(nodes) and all(node.state == UP for node in nodes)


def all_joined(url: str, token: str = "") -> bool:
    """Whether `GET url` (the proxy's `/nodes`) says that all nodes serve; `token`: that of its operators' port.

    Raises NodeRefusedError.
    """
    body = fetch(url, {"authorization": f"Bearer {token}"} if token else {})
    return body is not None and all_up(parse(body))
