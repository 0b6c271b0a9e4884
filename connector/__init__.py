"""vLLM KV connector for hand-overs from prefill to decode nodes: signed tickets, verified reads, exact counters.

Load it into a vLLM node with ``kv_connector_module_path: connector.nixl_connector`` and
``kv_connector: NixlConnector``; `connector.nixl_connector` is the map of the package.
"""
