"""The node's own routes: `POST /v1/pdproxy/streams/…` (`streams`), and `GET /v1/pdproxy/prompts` with
what only an API server knows of how prompts are made:

    200 {"chat_template": DIGEST}    as the part of the fingerprint, of the template that this server uses

A vLLM endpoint plugin: loaded where `VLLM_PLUGINS` names it (`pdproxy_connector,pdproxy_endpoints`, for the variable
filters all plugins). Under /v1, since vLLM's `--api-key` guards that.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from fastapi import FastAPI
from fastapi.responses import JSONResponse
from starlette.routing import Route
from vllm.plugins.endpoint_plugins.interface import EndpointPlugin

from . import alive_route
from .config import ENDPOINT_PLUGIN, ConfigError
from .fingerprint import NONE
from .node_fingerprint import tokenizer_source
from .resume_order import node_secret
from .streams import HANDLERS, PREFIX, StreamRoute
from .tokenizer_files import ChatArguments, chat_template_part
from .vllm_version import require_tested

if TYPE_CHECKING:
    from argparse import Namespace

    from starlette.datastructures import State
    from vllm.engine.protocol import EngineClient

log = logging.getLogger("vllm.pdproxy.endpoints")

PROMPTS_ROUTE = "/v1/pdproxy/prompts"


class NodeRoutes(EndpointPlugin):
    """The plugin."""

    name = ENDPOINT_PLUGIN
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self._streams = StreamRoute()
        self._chat_template = NONE

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes, that of `alive_route` too."""
        alive_route.attach(app)
        app.add_api_route(PROMPTS_ROUTE, self._prompts, methods=["GET"])
        app.router.routes += [Route(PREFIX + path, self._streams, methods=["POST"]) for path in HANDLERS]

    async def init_state(self, engine_client: EngineClient | None, state: State, args: Namespace) -> None:  # noqa: ARG002 - vLLM names the arguments
        """Read the chat template, and serve streams if the engine has a KV connector: one that only computes for others
        is asked, too, where no decode node is left (`policy.on_no_decode`).

        Raises ConfigError, which ends the node, for a node with a KV connector whose vLLM is not tested.
        """
        transfers = engine_client is not None and engine_client.vllm_config.kv_transfer_config is not None
        if engine_client is not None:
            if transfers:
                require_tested(engine_client.vllm_config.kv_transfer_config.kv_connector_extra_config)
            source = tokenizer_source(engine_client.vllm_config)
            self._chat_template = chat_template_part(source, ChatArguments.of(args))
        self._streams.secret = _secret(os.environ) if transfers else None

    async def _prompts(self) -> JSONResponse:
        return JSONResponse({"chat_template": self._chat_template})


def _secret(environ: Mapping[str, str]) -> bytes | None:
    """None, and a line in the log, on a node whose engine would refuse every order."""
    try:
        return node_secret(environ)
    except ConfigError as error:
        log.warning("This node has no %s: %s", PREFIX, error)
        return None
