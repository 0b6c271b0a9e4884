"""Which paths clients may use, and with which methods."""

from pdproxy.errors import ClientError
from pdproxy.request import Endpoint

GENERATING = {endpoint.value: endpoint for endpoint in Endpoint}
"""The endpoints that the proxy understands."""

PASSED_ON = frozenset(
    {"/v1/embeddings", "/pooling", "/classify", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"}
    | {"/tokenize", "/detokenize", "/v1/messages/count_tokens", "/v1/audio/transcriptions", "/v1/audio/translations"}
)
"""What one node answers by itself. A list, for a node has further endpoints that are its operator's alone
(``/reset_prefix_cache``, ``/sleep``, ``/v1/load_lora_adapter``, …)."""

OPERATOR = frozenset(["/health", "/ready", "/metrics"])
"""What the clients' port shows of the operators'."""


def unknown(method: str, path: str) -> ClientError:
    """The error for a path or method that nothing here serves."""
    if path in GENERATING or path in PASSED_ON:
        return _wrong_method(method, path, "POST")
    if path == "/v1/models" or path in OPERATOR:
        return _wrong_method(method, path, "GET, HEAD")
    if path.startswith(f"{Endpoint.RESPONSES}/"):
        text = "Responses are not kept here: send 'store': false and the whole conversation with each request."
        return ClientError(404, text, code="not_stored")
    text = f"There is no {path[:100]} here. Generating endpoints: {', '.join(GENERATING)}; also /v1/models."
    return ClientError(404, text, code="unknown_url")


def _wrong_method(method: str, path: str, right: str) -> ClientError:
    return ClientError(
        405, f"{path} takes {right}, not {method[:20]}.", code="method_not_allowed", headers=(("allow", right),)
    )
