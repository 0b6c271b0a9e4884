"""What goes in and out of the nodes' endpoints."""

import re
import urllib.parse
from typing import Annotated

import pydantic

from pdproxy.nodes.node import Bars, Binding, Capacity, Node, NodeView, Role, State

_BASE_URL = re.compile(r"https?://([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:(?P<port>[0-9]{1,5}))?/?")


class NewNode(pydantic.BaseModel):
    """A node to take in."""

    model_config = pydantic.ConfigDict(extra="forbid")

    url: str
    role: Role
    name: Annotated[str, pydantic.Field(pattern=r"^[A-Za-z0-9._:\[\]-]{0,128}$")] = ""
    """Empty takes the address's host and port."""
    model: str = ""
    aliases: tuple[str, ...] = ()
    weight: Annotated[float, pydantic.Field(gt=0, le=1000, allow_inf_nan=False)] = 1.0

    @pydantic.field_validator("url")
    @classmethod
    def _is_base(cls, url: str) -> str:
        return base_url(url)

    def node(self) -> Node:
        """The node that the pool takes in."""
        name = self.name or urllib.parse.urlsplit(self.url).netloc
        return Node(name, self.url, self.role, self.model, self.aliases, self.weight)


class NodeCapacity(pydantic.BaseModel):
    """What a node's cache holds: attention tokens, sequences by the state groups, sequences of the greatest length."""

    tokens: int
    sequences: int | None
    longest: int
    binding: Binding


class NodeStatus(pydantic.BaseModel):
    """A node as it stands."""

    name: str
    url: str
    role: Role
    state: State
    model: str
    aliases: tuple[str, ...]
    weight: float
    share: float
    active: int
    cohort: str
    fingerprint: dict[str, str]
    """What the bytes of its KV cache depend on, by part; ``all``, which the cohort ends with, is their digest."""
    reason: str
    barred: tuple[str, ...]
    """With whom it exchanges no tickets, for they failed the known-answer test; a sentence for each."""
    capacity: NodeCapacity | None


class NodeList(pydantic.BaseModel):
    """All nodes."""

    nodes: list[NodeStatus]


def status(view: NodeView, bars: Bars) -> NodeStatus:
    """One node for the operator."""
    node = view.node
    return NodeStatus(
        name=node.name,
        url=node.url,
        role=node.role,
        state=view.state,
        model=node.model,
        aliases=node.aliases,
        weight=node.weight,
        share=view.share,
        active=view.active,
        cohort=node.cohort,
        fingerprint=dict(node.fingerprint),
        reason=view.reason,
        barred=bars.of(node.name),
        capacity=_capacity(node.capacity),
    )


def _capacity(told: Capacity | None) -> NodeCapacity | None:
    if told is None:
        return None
    return NodeCapacity(tokens=told.tokens, sequences=told.sequences, longest=told.longest, binding=told.binding)


def base_url(url: str) -> str:
    """The base address without a trailing slash.

    Raises:
        ValueError: it is no http(s) base address.
    """
    parts = _BASE_URL.fullmatch(url)
    if parts is None or int(parts["port"] or 1) not in range(1, 65536):
        raise ValueError("must be a base address such as http://10.0.0.1:8000")
    return url.rstrip("/")
