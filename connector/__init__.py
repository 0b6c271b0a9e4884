"""vLLM KV connector for hand-overs from prefill to decode nodes: signed tickets, verified reads, exact counters.

Load it into a vLLM node with ``kv_connector_module_path: pdproxy_connector.nixl_connector`` and
``kv_connector: NixlConnector``; `nixl_connector` is the map of the package.
"""

__version__ = "0.1.0"
