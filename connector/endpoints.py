"""The node's own routes: `POST /v1/pdproxy/streams/…` (`streams`), and the one by which a proxy delivers a ticket to
requests that wait for it, `POST /v1/pdproxy/tickets`:

    {"id": ID, "kv_transfer_params": {...the ticket...}}   or null in its place: there is no ticket, compute now
    202 {"id": ID}    handed to the engine, to each data-parallel rank that this API server drives; the one that has the
                      request acts
    400               a bad body, in OpenAI's error shape
    404               no decode node (so too the streams), or a node that did not load this plugin

And what only an API server knows of how prompts are made, `GET /v1/pdproxy/prompts`, of prefill nodes too:

    200 {"chat_template": DIGEST}    as the part of the fingerprint, of the template that this server uses

A vLLM endpoint plugin: loaded where `VLLM_PLUGINS` names it (`pdproxy_connector,pdproxy_endpoints`, for the variable
filters all plugins). Under /v1, since vLLM's `--api-key` guards that. To the engine the delivery is a stand-in for a
request, which ends at once and computes nothing (`transfer_params`).
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.routing import Route
from vllm.plugins.endpoint_plugins.interface import EndpointPlugin

from connector import alive_route
from connector.config import ENDPOINT_PLUGIN, ConfigError
from connector.fingerprint import NONE
from connector.node_fingerprint import tokenizer_source
from connector.resume_order import node_secret
from connector.streams import HANDLERS, PREFIX, StreamRoute, error_response
from connector.tokenizer_files import ChatArguments, chat_template_part
from connector.transfer_params import DELIVER, is_id
from connector.vllm_version import require_tested

if TYPE_CHECKING:
    from argparse import Namespace

    from starlette.datastructures import State
    from vllm.config import VllmConfig
    from vllm.engine.protocol import EngineClient

log = logging.getLogger("vllm.pdproxy.endpoints")

ROUTE = "/v1/pdproxy/tickets"
PROMPTS_ROUTE = "/v1/pdproxy/prompts"
MOST_BYTES = 4 << 20
"""Of a body. A ticket has some 10 bytes for each of the prompt's blocks."""


class BadDeliveryError(Exception):
    """The body is not a delivery; the message says why."""


class TicketRoute(EndpointPlugin):
    """The plugin."""

    name = ENDPOINT_PLUGIN
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self._engine: EngineClient | None = None
        self._streams = StreamRoute()
        self._chat_template = NONE

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes, that of `alive_route` too."""
        alive_route.attach(app)
        app.add_api_route(ROUTE, self._deliver, methods=["POST"], status_code=202)
        app.add_api_route(PROMPTS_ROUTE, self._prompts, methods=["GET"])
        app.router.routes += [Route(PREFIX + path, self._streams, methods=["POST"]) for path in HANDLERS]

    async def init_state(self, engine_client: EngineClient | None, state: State, args: Namespace) -> None:  # noqa: ARG002 - vLLM names the arguments
        """Keep the engine's client, if it is a decode node's, and read the chat template.

        Raises ConfigError, which ends the node, for a decode node whose vLLM is not tested.
        """
        decodes = engine_client is not None and _decodes(engine_client.vllm_config)
        if engine_client is not None:
            if decodes:
                require_tested(engine_client.vllm_config.kv_transfer_config.kv_connector_extra_config)
            source = tokenizer_source(engine_client.vllm_config)
            self._chat_template = chat_template_part(source, ChatArguments.of(args))
        self._engine = engine_client if decodes else None
        self._streams.secret = _secret(os.environ) if decodes else None

    async def _prompts(self) -> JSONResponse:
        return JSONResponse({"chat_template": self._chat_template})

    async def _deliver(self, request: Request) -> JSONResponse:
        if self._engine is None:
            return error_response(404, "NotFoundError", "this node does not decode for others")
        try:
            wait, ticket = parse(await _body(request))
            await deliver(self._engine, wait, ticket)
        except BadDeliveryError as error:
            return error_response(400, "BadRequestError", str(error))
        return JSONResponse({"id": wait}, status_code=202)


async def deliver(engine_client: EngineClient, wait: str, ticket: dict[str, Any] | None) -> None:
    """Hand a delivery to every rank. Raises BadDeliveryError for a ticket that cannot be sent to an engine."""
    params = {DELIVER: {"id": wait, "ticket": ticket}}
    for rank in range(number_of_ranks(engine_client.vllm_config)):
        try:
            await engine_client.notify_kv_transfer_request_rejected(
                f"pdproxy-delivery-{uuid4().hex}", params, data_parallel_rank=rank
            )
        except (OverflowError, RecursionError):
            raise BadDeliveryError("the ticket has numbers too large, or is nested too deep") from None


def number_of_ranks(vllm_config: VllmConfig) -> int:
    """How many engines this API server drives: with a load balancer of the operator's only its own host's."""
    if vllm_config.parallel_config.local_engines_only:
        return int(vllm_config.parallel_config.data_parallel_size_local)
    return int(vllm_config.parallel_config.data_parallel_size)


def parse(body: bytes) -> tuple[str, dict[str, Any] | None]:
    """The id and the ticket. Raises BadDeliveryError."""
    try:
        raw = json.loads(body)
    except (ValueError, RecursionError):
        raise BadDeliveryError("the body is not JSON") from None
    if not isinstance(raw, dict) or not is_id(raw.get("id")):
        raise BadDeliveryError("id is not 16 to 128 letters, digits, - or _")
    ticket = raw.get("kv_transfer_params", ...)
    if ticket is not None and not isinstance(ticket, dict):
        raise BadDeliveryError("kv_transfer_params is neither an object nor null")
    return raw["id"], ticket


async def _body(request: Request) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MOST_BYTES:
            raise BadDeliveryError(f"the body is longer than {MOST_BYTES} bytes")
    return bytes(body)


def _secret(environ: Mapping[str, str]) -> bytes | None:
    """None, and a line in the log, on a node whose engine would refuse every order."""
    try:
        return node_secret(environ)
    except ConfigError as error:
        log.warning("This node has no %s: %s", PREFIX, error)
        return None


def _decodes(vllm_config: VllmConfig) -> bool:
    transfer = vllm_config.kv_transfer_config
    return transfer is not None and bool(transfer.is_kv_consumer)
