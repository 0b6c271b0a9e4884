"""One child connector, and what can be known of it from its class."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata

from connector.multi.settings import ChildSettings


@dataclass(frozen=True, slots=True)
class Child:
    """`number`: its place in the operator's list. `consumes`: it may be given tickets (its own `kv_role`)."""

    number: int
    settings: ChildSettings
    connector: KVConnectorBase_V1
    consumes: bool = True

    @property
    def completes_hybrid_hits(self) -> bool:
        """Whether it can load onto a local hit of attention alone: it brings the state. A prefill node's never does."""
        return self.consumes and bool(self.connector.supports_divergent_local_hybrid_hits)

    @property
    def hands_over(self) -> bool:
        """Whether it moves requests between nodes, by tickets, each of which is for one load and rearmed by itself."""
        return hands_over(type(self.connector))

    def preempted(self, request_ids: Sequence[str], metadata: KVConnectorMetadata | None) -> None:
        """Tell it, in the signature that it has, that these requests were preempted."""
        if wants_ids(type(self.connector)):
            self.connector.handle_preemptions(set(request_ids))
        elif metadata is not None:
            self.connector.handle_preemptions(metadata)


def hands_over(connector_class: type[Any]) -> bool:
    """Whether a class of connectors has a handshake with other nodes."""
    return connector_class.get_handshake_metadata is not KVConnectorBase_V1.get_handshake_metadata


def wants_ids(connector_class: type[Any]) -> bool:
    """Whether a class's `handle_preemptions` takes request ids, as it did before it took metadata."""
    _, *parameters = inspect.signature(connector_class.handle_preemptions).parameters
    return bool(parameters) and "req" in parameters[0]
