"""Our connector without the comparison of fingerprints: it reads from nodes whose bytes mean something else.

A node loads this module instead of `connector.nixl_connector`. A test can then show what finds a difference when the
fingerprint is not compared, or does not list it. Everything else is unchanged.
"""

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlBaseConnector

from connector.config import from_vllm
from connector.fingerprint import Fingerprint
from connector.nixl_connector import NixlConnector as Comparing
from connector.scheduler import ConnectorScheduler
from deploy.local.node import NodeSpec

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


def trusting(spec: NodeSpec) -> NodeSpec:
    """The same node, which accepts tickets of any fingerprint. Its own tickets and metrics stay honest."""
    return replace(spec, connector_module=__name__)


class _Scheduler(ConnectorScheduler):
    def set_fingerprint(self, fingerprint: Fingerprint) -> None:
        super().set_fingerprint(fingerprint)
        self._validator = replace(self._validator, expected=replace(self._validator.expected, fingerprint=None))


class NixlConnector(Comparing):
    """The connector with a scheduler side that compares no fingerprints."""

    def __init__(self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig") -> None:
        if role != KVConnectorRole.SCHEDULER:
            super().__init__(vllm_config, role, kv_cache_config)
            return
        NixlBaseConnector.__init__(self, vllm_config, role, kv_cache_config)
        config = from_vllm(vllm_config.kv_transfer_config, os.environ)
        self.connector_scheduler = _Scheduler(vllm_config, self.engine_id, kv_cache_config, config)
