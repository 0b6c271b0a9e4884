"""Listing and changing nodes while the proxy runs."""

from typing import Annotated

from fastapi import APIRouter, Query

from pdproxy.admin.bodies import NewNode, NodeList, NodeStatus, status
from pdproxy.admin.desk import Desk
from pdproxy.nodes.drain import After

Seconds = Annotated[float | None, Query(ge=0, le=86400, allow_inf_nan=False)]


def router(desk: Desk) -> APIRouter:
    """The endpoints under /nodes; who may use them is the application's matter."""
    routes = APIRouter()

    @routes.get("/nodes")
    async def list_nodes() -> NodeList:
        """Every node as it stands."""
        now = desk.pool.snapshot()
        return NodeList(nodes=[status(view, now.bars) for view in now.nodes])

    @routes.post("/nodes", status_code=201)
    async def add_node(new: NewNode) -> NodeStatus:
        """Take a node in; it serves once its preflight is passed."""
        node = new.node()
        desk.pool.add(node)
        return status(desk.pool.view(node.name), desk.pool.bars)

    @routes.get("/nodes/{name}")
    async def show_node(name: str) -> NodeStatus:
        """One node as it stands."""
        return status(desk.pool.view(name), desk.pool.bars)

    @routes.delete("/nodes/{name}", status_code=202)
    async def remove_node(name: str, seconds: Seconds = None) -> NodeStatus:
        """Drain the node, then forget it; ``seconds=0`` makes running streams leave at once."""
        desk.drainer.start(name, desk.drain_seconds if seconds is None else seconds, After.REMOVE)
        return status(desk.pool.view(name), desk.pool.bars)

    @routes.post("/nodes/{name}/drain", status_code=202)
    async def drain_node(name: str, seconds: Seconds = None) -> NodeStatus:
        """No new requests from now on; running ones end or move elsewhere within ``seconds``."""
        desk.drainer.start(name, desk.drain_seconds if seconds is None else seconds, After.KEEP)
        return status(desk.pool.view(name), desk.pool.bars)

    @routes.post("/nodes/{name}/rejoin", status_code=202)
    async def rejoin_node(name: str) -> NodeStatus:
        """End a drain: the node passes its preflight again, then serves."""
        desk.drainer.stop(name)
        desk.pool.rejoin(name)
        return status(desk.pool.view(name), desk.pool.bars)

    return routes
