"""Resume orders: the output token ids that a request already has, because another node has produced them. Pure.

    kv_transfer_params = {"pdproxy_resume": {"token_ids": [...], "mac": HEX}, ...a ticket, or nothing...}

The node's own API server makes an order for a stream that it continues, and its engine acts on it (`resumed_requests`):
the request goes on as if it had produced these tokens itself and had then been preempted. Any client can write
`kv_transfer_params`, and must not put words into an engine's mouth, past stop strings, grammars and limits. So an order
carries an HMAC over the engine's own request id and the ids; the id has random bits that no client chooses
(`InputProcessor.assign_request_id`), so that an order is good for one request.

The secret is one node's: an environment variable that vLLM's plugin entry point sets before any other process of the
node is started (`config.register`), unless the operator has. Where a node's processes do not inherit each other's
environment (several hosts, Ray), the operator sets it, or the ticket keys' variable, from which it is derived.
"""

import hashlib
import hmac
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from .config import SECRET_VARIABLE, SHORTEST_KEY, ConfigError, set_node_secret
from .ticket_fields import Refusal, RefusalReason

KEY = "pdproxy_resume"
"""The key of the order in `kv_transfer_params`."""
LARGEST_ID = (1 << 31) - 1
MOST_IDS = 1 << 24

_DOMAIN = b"pdproxy resume order\n"


def node_secret(environ: Mapping[str, str]) -> bytes:
    """The secret that signs this node's orders.

    Raises ConfigError where `config.register` has not run, or the operator's own is too short.
    """
    secret = environ.get(SECRET_VARIABLE, "").encode()
    if len(secret) < SHORTEST_KEY:
        raise ConfigError(
            f"{SECRET_VARIABLE} has fewer than {SHORTEST_KEY} characters, or VLLM_PLUGINS leaves out the plugin "
            "pdproxy_connector, which sets it: without it no stream can be resumed on this node."
        )
    return secret


def engine_secret(environ: Mapping[str, str]) -> bytes:
    """The same for an engine. One that inherited none makes one that nobody knows, and refuses all orders. Raises
    ConfigError for one that is too short."""
    own = dict(environ)
    set_node_secret(own)
    return node_secret(own)


def sign(secret: bytes, request_id: str, token_ids: Sequence[int]) -> dict[str, Any]:
    """The order for the request that the engine will know by this id. Raises ValueError for ids that no order has."""
    if not _are_ids(list(token_ids)):
        raise ValueError(f"an order has up to {MOST_IDS} whole numbers from 0 to {LARGEST_ID}")
    return {"token_ids": list(token_ids), "mac": _mac(secret, request_id, token_ids)}


def verify(secret: bytes, request_id: str, params: Any) -> list[int] | Refusal | None:
    """The output token ids that `kv_transfer_params` order this request to have. None: they hold no order. Never
    raises.

    Whoever gets a Refusal must end the request: computed without its order it would answer from the start in a stream
    whose reader wants the rest.
    """
    if not isinstance(params, dict) or KEY not in params:
        return None
    order = params[KEY]
    if not isinstance(order, dict):
        return Refusal(RefusalReason.NOT_AN_OBJECT, f"{KEY} is not an object")
    token_ids, mac = order.get("token_ids"), order.get("mac")
    if not _are_ids(token_ids) or not isinstance(mac, str) or not mac.isascii():
        return Refusal(RefusalReason.BAD_FIELD, f"{KEY} has no list of token ids, or no mac")
    if not hmac.compare_digest(_mac(secret, request_id, token_ids), mac):
        return Refusal(RefusalReason.BAD_SIGNATURE, f"{KEY} was not made by this node for this request")
    return list(token_ids)


def without_order(params: Any) -> Any:
    """`kv_transfer_params` without their order, for whatever else is in them; None where nothing is."""
    if not isinstance(params, dict) or KEY not in params:
        return params
    return {name: value for name, value in params.items() if name != KEY} or None


def _are_ids(values: Any) -> TypeGuard[list[int]]:
    if not isinstance(values, list) or len(values) > MOST_IDS:
        return False
    return all(type(value) is int and 0 <= value <= LARGEST_ID for value in values)


def _mac(secret: bytes, request_id: str, token_ids: Sequence[int]) -> str:
    """Over the domain, the request id with its length before it, and the ids, four bytes each."""
    name = request_id.encode("utf-8", "surrogatepass")
    message = _DOMAIN + len(name).to_bytes(4, "big") + name + array("I", token_ids).tobytes()
    return hmac.new(secret, message, hashlib.sha256).hexdigest()
