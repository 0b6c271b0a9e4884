"""Several connectors on one node, chosen by what each load saves: tiers beside prefill/decode hand-overs.

Load it with `kv_connector: MultiConnector` and `kv_connector_module_path: connector.tiers`;
`connector.tiers.multi_connector` is the map, `connector.tiers.children` shows what to configure.
"""

from .multi_connector import WeightedMultiConnector

MultiConnector = WeightedMultiConnector
"""Under the name that vLLM's own code knows: only so does it look into the children's configuration."""

__all__ = ["MultiConnector", "WeightedMultiConnector"]
