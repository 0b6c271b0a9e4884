"""Which paths there are for clients, and what the proxy answers by itself: the models, its OpenAPI document, errors."""

import functools
import importlib.resources
import urllib.parse
from collections.abc import Mapping, Sequence

from pdproxy import __version__
from pdproxy.errors import ClientError
from pdproxy.legs.form import FORM
from pdproxy.nodes.node import PoolState, Role, State
from pdproxy.request import Endpoint, Fields, Json, media_type, write_json
from pdproxy.settings.types import MetricsPort

GENERATING = {endpoint.value: endpoint for endpoint in Endpoint}
"""The endpoints whose requests the proxy understands."""

AUDIO = frozenset({"/v1/audio/transcriptions", "/v1/audio/translations"})
"""Paths whose bodies are forms with a file."""
BODILESS = frozenset({"/version", "/tokenizer_info", "/ping"})
_POST = frozenset({"POST"})
_GET = frozenset({"GET"})
SCRUBBED = frozenset(
    {"/v1/chat/completions/batch", "/invocations", "/generative_scoring", "/v1/systemone", "/v1/decisions"}
    | {"/cohere/v2/chat"}
)
"""Forwarded paths whose bodies reach the engine's parameters: what only nodes may set is taken out of them."""
FORWARDED: Mapping[str, frozenset[str]] = {
    **dict.fromkeys(SCRUBBED, _POST),
    **dict.fromkeys(("/v1/embeddings", "/v2/embed", "/pooling", "/classify"), _POST),
    **dict.fromkeys(("/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"), _POST),
    **dict.fromkeys(("/tokenize", "/detokenize", "/v1/messages/count_tokens"), _POST),
    **dict.fromkeys(AUDIO, _POST),
    **dict.fromkeys(("/version", "/tokenizer_info"), _GET),
    "/ping": _GET | _POST,
}
"""Paths that one node answers by itself, with the methods that vLLM serves there."""

_ADMINISTRATION = "it changes or stops the node for everybody"
_WEIGHTS = "it changes the model's weights for everybody"
_OF_THE_NODE = "it tells of one node, of which clients know nothing; operators ask the node itself"
_SCALE_OUT = "it belongs between a router and its nodes: it takes and tells token ids and transfer parameters unchecked"
_OURS = "it belongs between this proxy and its nodes"
WITHHELD: Mapping[str, str] = {
    **dict.fromkeys(("/sleep", "/wake_up", "/release_kv_cache_memory", "/pause", "/resume"), _ADMINISTRATION),
    **dict.fromkeys(("/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache"), _ADMINISTRATION),
    **dict.fromkeys(("/abort_requests", "/collective_rpc", "/fault_tolerance/apply"), _ADMINISTRATION),
    **dict.fromkeys(("/scale_elastic_ep", "/start_profile", "/stop_profile"), _ADMINISTRATION),
    **dict.fromkeys(("/v1/load_lora_adapter", "/v1/unload_lora_adapter"), _ADMINISTRATION),
    **dict.fromkeys(("/init_weight_transfer_engine", "/shutdown_weight_transfer_engine"), _WEIGHTS),
    **dict.fromkeys(("/start_weight_update", "/start_draft_weight_update", "/finish_weight_update"), _WEIGHTS),
    **dict.fromkeys(("/update_weights", "/update_weight_version", "/weight_checker", "/weight_info"), _WEIGHTS),
    **dict.fromkeys(("/is_sleeping", "/is_paused", "/is_scaling_elastic_ep", "/fault_tolerance/status"), _OF_THE_NODE),
    **dict.fromkeys(("/load", "/server_info", "/get_world_size", "/kv_event_sources", "/readyz"), _OF_THE_NODE),
    **dict.fromkeys(("/docs", "/redoc", "/docs/oauth2-redirect", "/static"), _OF_THE_NODE),
    **dict.fromkeys(("/inference/v1/generate", "/inference/v1/abort_requests", "/cohere/v2/chat/render"), _SCALE_OUT),
    **{f"{endpoint}/render": _SCALE_OUT for endpoint in Endpoint},
    **dict.fromkeys(("/v1/completions/derender", "/v1/chat/completions/derender"), _SCALE_OUT),
    **dict.fromkeys(("/v1/pdproxy/streams", "/v1/pdproxy/alive"), _OURS),
    "/v1/responses/{response_id}": "responses are not kept between requests",
    "/v1/responses/{response_id}/cancel": "responses are not kept between requests",
    "/v1/realtime": "websockets are not served here",
}
"""Paths of nodes that clients do not reach, each with the reason. A path in neither list is withheld too."""
REALTIME = "/v1/realtime"

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


def models_document(path: str, pool_state: PoolState) -> bytes:
    """All models, or the one that the path names, JSON; a `ClientError` 404 where there is none of this name."""
    cards = model_cards(pool_state)
    if path == _MODELS:
        return write_json({"object": "list", "data": list(cards.values())})
    name = urllib.parse.unquote(path.removeprefix(f"{_MODELS}/"))
    if name not in cards:
        text = f"The model {name[:100]!r} is not served here: see {_MODELS}."
        raise ClientError(404, text, code="model_not_found")
    return write_json(cards[name])


def model_cards(pool_state: PoolState) -> dict[str, Json]:
    """The models of the decode nodes by name, adapters included: the cards are the first node's that has one.

    The longest sequence is the shortest that any node allows, for any of them may get the request.
    """
    nodes = [view.node for view in pool_state.nodes if Role.DECODE in view.node.roles and view.state in _LISTED]
    names = dict.fromkeys(name for node in nodes for name in (node.model, *node.aliases) if name)
    return {name: _merged_card(name, [node.cards[name] for node in nodes if name in node.cards]) for name in names}


def _merged_card(name: str, cards: Sequence[Json]) -> Json:
    if not cards:
        return {"id": name, "object": "model", "created": 0, "owned_by": "vllm"}
    lengths = [length for card in cards if isinstance(length := card.get("max_model_len"), int)]
    return {**cards[0], "max_model_len": min(lengths)} if lengths else cards[0]


def check_media_type(path: str, fields: Fields) -> None:
    """Check that a request's body is declared as JSON, as vLLM does (0.32, `validate_json_request`).

    A web page can post any other type to another origin without asking first (a preflight, which is refused here).

    Raises:
        ClientError: 400, vLLM's status.
    """
    declared = media_type(fields.get("content-type"))
    if declared == "application/json" or path in BODILESS or (path in AUDIO and declared == FORM):
        return
    allowed = f"'{FORM}'" if path in AUDIO else "'application/json'"
    text = f"Unsupported Media Type: Only {allowed} is allowed: say so in the header Content-Type."
    raise ClientError(400, text, code="unsupported_media_type")


def unknown_path(method: str, path: str, shown: frozenset[str]) -> ClientError:
    """The error for a path or method that is not served here; ``shown``: the operators' paths that are."""
    if path in GENERATING:
        return _wrong_method(method, path, "POST")
    if path in FORWARDED:
        return _wrong_method(method, path, ", ".join(sorted(FORWARDED[path])))
    if path == METRICS and path not in shown:
        text = "Metrics are served at the operators' port (listen.admin_port); listen.metrics: both has them here too."
        return ClientError(404, text, code="metrics_elsewhere")
    if path == REALTIME:
        text = f"Websockets are not served here, and so {REALTIME} is not: use {Endpoint.CHAT} with `stream`."
        return ClientError(501, text, kind="not_implemented", code="no_websockets")
    if path in WITHHELD:
        text = f"{path} is not served here: {WITHHELD[path]}."
        return ClientError(404, text, code="withheld")
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
