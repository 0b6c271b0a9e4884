"""The node's own route, by which a proxy asks whether all of the node's processes run: `GET /v1/pdproxy/alive`.

    200 {"processes": n}    all engine cores and workers that were found have answered (`liveness`)
    504                     one has not for `PATIENCE` s: it is stopped. A proxy does not wait so long

Of the plugin in `endpoints`, which prefill nodes load too.
"""

from __future__ import annotations

import asyncio
import os

from fastapi import FastAPI
from fastapi.responses import JSONResponse

from .config import NODE_ID
from .liveness import SOCKETS, answers, listening

ROUTE = "/v1/pdproxy/alive"
PATIENCE = 10.0
"""Seconds."""


def attach(app: FastAPI, patience: float = PATIENCE) -> None:
    """Add the route."""

    async def alive() -> JSONResponse:
        names = listening(os.environ.get(NODE_ID, ""), SOCKETS)
        try:
            async with asyncio.timeout(patience):
                answered = await asyncio.gather(*map(answers, names))
        except TimeoutError:
            return JSONResponse({"processes": len(names), "error": "not all of them answer"}, status_code=504)
        return JSONResponse({"processes": sum(answered)})

    app.add_api_route(ROUTE, alive, methods=["GET"])
