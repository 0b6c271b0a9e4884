"""Which paths there are for clients, and what the proxy answers by itself: the models, its OpenAPI document, errors."""

import functools
import importlib.resources
import urllib.parse

from pdproxy import __version__
from pdproxy.errors import ClientError
from pdproxy.nodes.node import Role, Snapshot, State
from pdproxy.request import Endpoint, Json, write_json

GENERATING = {endpoint.value: endpoint for endpoint in Endpoint}
"""The endpoints whose requests the proxy understands."""

FORWARDED = frozenset(
    {"/v1/embeddings", "/pooling", "/classify", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"}
    | {"/tokenize", "/detokenize", "/v1/messages/count_tokens", "/v1/audio/transcriptions", "/v1/audio/translations"}
)
"""What one node answers by itself. A list, for a node has further endpoints that are its operator's alone
(``/reset_prefix_cache``, ``/sleep``, ``/v1/load_lora_adapter``, …)."""

OPERATOR = frozenset(["/health", "/ready", "/metrics"])
"""What the clients' port shows of the operators'."""

OPENAPI = "/openapi.json"
_MODELS = "/v1/models"
_LISTED = (State.UP, State.PROBING, State.DOWN, State.DRAINING, State.TERMINATING)


@functools.cache
def openapi_document() -> bytes:
    """The OpenAPI document, JSON."""
    import yaml  # not before somebody asks: the start is shorter without

    text = importlib.resources.files("pdproxy.intake").joinpath("openapi.yaml").read_text(encoding="utf-8")
    document = yaml.safe_load(text)
    document["info"]["version"] = __version__
    return write_json(document)


def is_of_models(path: str) -> bool:
    """Whether `models_document` answers it."""
    return path == _MODELS or path.startswith(f"{_MODELS}/")


def models_document(path: str, snapshot: Snapshot) -> bytes:
    """All models, or the one that the path names, JSON; a `ClientError` 404 where there is none of this name."""
    cards = model_cards(snapshot)
    if path == _MODELS:
        return write_json({"object": "list", "data": list(cards.values())})
    name = urllib.parse.unquote(path.removeprefix(f"{_MODELS}/"))
    if name not in cards:
        text = f"The model {name[:100]!r} is not served here: see {_MODELS}."
        raise ClientError(404, text, code="model_not_found")
    return write_json(cards[name])


def model_cards(snapshot: Snapshot) -> dict[str, Json]:
    """OpenAI's model cards, by name: the models of the decode nodes, adapters included."""
    nodes = [view.node for view in snapshot.nodes if view.node.role is Role.DECODE and view.state in _LISTED]
    names = dict.fromkeys(name for node in nodes for name in (node.model, *node.aliases) if name)
    return {name: {"id": name, "object": "model", "created": 0, "owned_by": "pdproxy"} for name in names}


def unknown_path(method: str, path: str) -> ClientError:
    """The error for a path or method that is not served here."""
    if path in GENERATING or path in FORWARDED:
        return _wrong_method(method, path, "POST")
    if path == _MODELS or path in OPERATOR:
        return _wrong_method(method, path, "GET, HEAD")
    if path.startswith(f"{Endpoint.RESPONSES}/"):
        text = "Responses are not kept here: send 'store': false and the whole conversation with each request."
        return ClientError(404, text, code="not_stored")
    text = f"There is no {path[:100]} here. Generating endpoints: {', '.join(GENERATING)}; also {_MODELS}."
    return ClientError(404, text, code="unknown_url")


def _wrong_method(method: str, path: str, right: str) -> ClientError:
    text = f"{path} takes {right}, not {method[:20]}."
    return ClientError(405, text, code="method_not_allowed", headers=(("allow", right),))
