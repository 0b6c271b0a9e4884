"""The vLLM KV connector that cannot be wrong: signed tickets, verified reads, honest accounts.

Load it into a stock vLLM node with ``kv_connector_module_path: connector.nixl_connector`` and
``kv_connector: NixlConnector``; see `connector.nixl_connector` for who calls whom.
"""
