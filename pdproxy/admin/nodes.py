"""The routes under /nodes: the nodes as they stand, adding, draining and removing them."""

import dataclasses
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated

import msgspec
import pydantic
from fastapi import APIRouter, Query

from pdproxy.admin.context import AdminContext
from pdproxy.nodes.cache_advice import cache_report, first_of_cohorts
from pdproxy.nodes.drain import AfterDrain
from pdproxy.nodes.node import Bars, Node, NodeView, Role, State
from pdproxy.nodes.pool import DuplicateNode
from pdproxy.request import Json
from pdproxy.settings.types import NodeRoles, NodeUrl, with_roles

Seconds = Annotated[float | None, Query(ge=0, le=86400, allow_inf_nan=False)]


class NewNode(pydantic.BaseModel):
    """A node to add."""

    model_config = pydantic.ConfigDict(extra="forbid")

    url: NodeUrl
    roles: NodeRoles = tuple(Role)
    name: Annotated[str, pydantic.Field(pattern=r"^[A-Za-z0-9._:\[\]-]{0,128}$")] = ""
    """Empty takes the address's host and port."""
    model: str = ""
    aliases: tuple[str, ...] = ()
    weight: Annotated[float, pydantic.Field(gt=0, le=1000, allow_inf_nan=False)] = 1.0

    _roles = pydantic.model_validator(mode="before")(with_roles)

    def to_node(self) -> Node:
        """The node for the pool."""
        parts = urllib.parse.urlsplit(self.url)
        name = self.name or f"{parts.netloc}{parts.path.replace('/', '-')}"
        return Node(name, self.url, self.roles, self.model, self.aliases, self.weight)


class ChangedNode(pydantic.BaseModel):
    """Changes to a node."""

    model_config = pydantic.ConfigDict(extra="forbid")

    roles: NodeRoles


Status = dict[str, object]
"""A node as the operator sees it, as JSON."""


def status(view: NodeView, bars: Bars, caches: Sequence[Json] = ()) -> Status:
    """One node as it stands. ``caches``: how much is known of what its data-parallel ranks have cached."""
    node = view.node
    return {
        "name": node.name,
        "url": node.url,
        "roles": node.roles,
        "state": view.state,
        "model": node.model,
        "aliases": node.aliases,
        "weight": node.weight,
        "share": view.share,
        "active": view.active,
        # What the decode legs of this proxy take of its capacity, as the queue counts.
        "footprint": msgspec.structs.asdict(view.footprint),
        "cohort": node.cohort,
        # What the bytes of its KV cache depend on, by part; "all", which the cohort ends with, is their digest.
        "fingerprint": dict(node.fingerprint),
        # A node that serves has none: the last fault that it had is no state of it.
        "reason": "" if view.state is State.UP else view.reason,
        # A sentence for each node with which it exchanges no tickets: the two failed the known-answer test, or the
        # tickets between them were of no use.
        "barred": _barred_from(node.name, bars),
        "caches": caches,
        "capacity": None if node.capacity is None else dataclasses.asdict(node.capacity),
    }


def _barred_from(name: str, bars: Bars) -> tuple[str, ...]:
    pairs = tuple(
        f"no tickets with {decode if name == prefill else prefill}: {why}"
        for (prefill, decode), why in bars.pairs.items()
        if name in (prefill, decode)
    )
    return (f"no tickets with any node: {bars.nodes[name]}", *pairs) if name in bars.nodes else pairs


def scrape_targets(node: Node) -> list[dict[str, object]]:
    """Where a node's own metrics are, as Prometheus asks for it (`http_sd_configs`): once for each role, so that each
    has its series."""
    parts = urllib.parse.urlsplit(node.url)
    path = parts.path.rstrip("/") + "/metrics"
    labels = {"node": node.name, "__scheme__": parts.scheme, "__metrics_path__": path}
    return [{"targets": [parts.netloc], "labels": {"role": role, **labels}} for role in node.roles]


def node_routes(context: AdminContext) -> APIRouter:
    """The routes; `guarded_app` guards them."""
    routes, pool = APIRouter(), context.pool

    def with_cache(view: NodeView, bars: Bars, first: Mapping[str, Node]) -> Status:
        name = view.node.name
        # What its prefix cache can do, and advice where a setting makes hits rare: sentences, as `pdproxy check` has.
        report = cache_report(view.node, first, context.events(name))
        return {**status(view, bars, context.caches(name)), "prefix_cache": dataclasses.asdict(report)}

    def shown(name: str) -> Status:
        first = first_of_cohorts(view.node for view in pool.state().nodes)
        return with_cache(pool.view(name), pool.bars, first)

    @routes.get("/nodes")
    async def list_nodes() -> dict[str, object]:
        """Every node as it stands, their cohorts, and what waits for room on them."""
        now = pool.state()
        first = first_of_cohorts(view.node for view in now.nodes)
        nodes = [with_cache(view, now.bars, first) for view in now.nodes]
        cohorts = [dataclasses.asdict(cohort) for cohort in context.cohorts.report()]
        return {"nodes": nodes, "cohorts": cohorts, "queue": dataclasses.asdict(context.queue())}

    @routes.get("/nodes/{name}")
    async def show_node(name: str) -> Status:
        """One node as it stands."""
        return shown(name)

    _change_routes(routes, context, shown)
    return routes


def _change_routes(routes: APIRouter, context: AdminContext, shown: Callable[[str], Status]) -> None:
    """Add the routes that change something; ``shown``: the status of a node."""
    pool = context.pool

    def drained(name: str, seconds: float | None, after: AfterDrain) -> Status:
        context.drainer.start(name, context.drain_seconds if seconds is None else seconds, after)
        return shown(name)

    @routes.post("/nodes", status_code=201)
    async def add_node(new: NewNode) -> Status:
        """Add a node; it serves once its preflight is passed."""
        node = new.to_node()
        there = next((view.name for view in pool.state().nodes if view.node.url == node.url), None)
        if there is not None:
            raise DuplicateNode(there)  # one server is one node, whatever its roles
        pool.add(node)
        return shown(node.name)

    @routes.patch("/nodes/{name}", status_code=202)
    async def change_node(name: str, changed: ChangedNode) -> Status:
        """Ask the node for other things from now on; for a new role it is tested first. Running requests go on."""
        pool.change_roles(name, changed.roles)
        return shown(name)

    @routes.delete("/nodes/{name}", status_code=202)
    async def remove_node(name: str, seconds: Seconds = None) -> Status:
        """Drain the node, then forget it; ``seconds=0`` makes running streams leave at once."""
        return drained(name, seconds, AfterDrain.REMOVE)

    @routes.post("/nodes/{name}/drain", status_code=202)
    async def drain_node(name: str, seconds: Seconds = None) -> Status:
        """No new requests from now on; running ones end or move elsewhere within ``seconds``."""
        return drained(name, seconds, AfterDrain.KEEP)

    @routes.post("/nodes/{name}/forget", status_code=202)
    async def forget_kept(name: str) -> dict[str, int]:
        """Make the node forget the conversations that it keeps, with its next request; how many these are."""
        pool.view(name)
        keeping = None if context.orchestration is None else context.orchestration.keeping
        return {"forgotten": 0 if keeping is None else keeping.forget(name)}

    @routes.post("/nodes/{name}/rejoin", status_code=202)
    async def rejoin_node(name: str) -> Status:
        """End a drain: the node passes its preflight again, then serves."""
        context.drainer.stop(name)
        pool.rejoin(name)
        return shown(name)
