"""``GET /v1/models``, from what the pool knows."""

import json

from pdproxy.nodes.node import NodeView, Role, Snapshot, State
from pdproxy.request import Json

_SERVING = (State.UP, State.PROBING, State.DOWN, State.DRAINING)


def listing(snapshot: Snapshot) -> bytes:
    """OpenAI's list of models: those of the decode nodes, adapters included."""
    views = [view for view in snapshot.nodes if view.node.role is Role.DECODE and view.state in _SERVING]
    names = dict.fromkeys(name for view in views for name in _names(view) if name)
    return json.dumps({"object": "list", "data": [_card(name) for name in names]}).encode()


def single(snapshot: Snapshot, name: str) -> bytes | None:
    """One model's card; None when it is not served here."""
    data = json.loads(listing(snapshot))["data"]
    found = next((card for card in data if card["id"] == name), None)
    return None if found is None else json.dumps(found).encode()


def _names(view: NodeView) -> tuple[str, ...]:
    return (view.node.model, *view.node.aliases)


def _card(name: str) -> Json:
    return {"id": name, "object": "model", "created": 0, "owned_by": "pdproxy"}
