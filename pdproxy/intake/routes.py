"""Which paths there are for clients, and what the proxy answers by itself: the models, its OpenAPI document, errors."""

import functools
import importlib.resources
import urllib.parse

from pdproxy import __version__
from pdproxy.errors import ClientError
from pdproxy.nodes.node import Role, Snapshot, State
from pdproxy.request import Endpoint, Headers, Json, header, write_json
from pdproxy.settings.types import MetricsPort

GENERATING = {endpoint.value: endpoint for endpoint in Endpoint}
"""The endpoints whose requests the proxy understands."""

FORWARDED = frozenset(
    {"/v1/embeddings", "/pooling", "/classify", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"}
    | {"/tokenize", "/detokenize", "/v1/messages/count_tokens", "/v1/audio/transcriptions", "/v1/audio/translations"}
)
"""What one node answers by itself. A list, for a node has further endpoints that are its operator's alone
(``/reset_prefix_cache``, ``/sleep``, ``/v1/load_lora_adapter``, …)."""

AUDIO = frozenset({"/v1/audio/transcriptions", "/v1/audio/translations"})
"""Of these the bodies are forms with a file."""

METRICS = "/metrics"
_FOR_BALANCERS = frozenset({"/health", "/ready"})


def shown_to_clients(metrics: MetricsPort) -> frozenset[str]:
    """The operators' paths that the clients' port has too: what load balancers ask for, and metrics where the settings
    say so. All others (nodes, plans, the live page) are at the operators' port alone.
    """
    return _FOR_BALANCERS | {METRICS} if metrics is MetricsPort.BOTH else _FOR_BALANCERS


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


def check_media_type(path: str, headers: Headers) -> None:
    """Check that a request's body is declared as JSON, as vLLM does (0.32, `validate_json_request`).

    A web page can post any other type to another origin without asking first (a preflight, which is refused here).

    Raises:
        ClientError: 400, vLLM's status.
    """
    declared = header(headers, "content-type") or ""
    if declared == "application/json":
        return
    media_type = declared.lower().partition(";")[0]
    if media_type == "application/json" or (path in AUDIO and media_type == "multipart/form-data"):
        return
    allowed = "'multipart/form-data'" if path in AUDIO else "'application/json'"
    text = f"Unsupported Media Type: Only {allowed} is allowed: say so in the header Content-Type."
    raise ClientError(400, text, code="unsupported_media_type")


def unknown_path(method: str, path: str, shown: frozenset[str]) -> ClientError:
    """The error for a path or method that is not served here; ``shown``: the operators' paths that are."""
    if path in GENERATING or path in FORWARDED:
        return _wrong_method(method, path, "POST")
    if path == METRICS and path not in shown:
        text = "Metrics are served at the operators' port (listen.admin_port); listen.metrics: both has them here too."
        return ClientError(404, text, code="metrics_elsewhere")
    if path == _MODELS or path in shown:
        return _wrong_method(method, path, "GET, HEAD")
    if path.startswith(f"{Endpoint.RESPONSES}/"):
        text = "Responses are not kept here: send 'store': false and the whole conversation with each request."
        return ClientError(404, text, code="not_stored")
    text = f"There is no {path[:100]} here. Generating endpoints: {', '.join(GENERATING)}; also {_MODELS}."
    return ClientError(404, text, code="unknown_url")


def _wrong_method(method: str, path: str, right: str) -> ClientError:
    text = f"{path} takes {right}, not {method[:20]}."
    return ClientError(405, text, code="method_not_allowed", headers=(("allow", right),))
