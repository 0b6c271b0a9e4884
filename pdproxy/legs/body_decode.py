"""The decode leg's body: what the client sent, the ticket, and what we ask for on top."""

from pdproxy.request import Addition, Endpoint, Json


def decode_body(
    endpoint: Endpoint, body: Json, ticket: Json | None, additions: frozenset[Addition]
) -> dict[str, object]:
    """What the client sent, with the ticket in it (None: compute here) and our additions.

    Args:
        endpoint: which API the body is for.
        body: scrubbed; or what `continuation_body` made.
        ticket: the prefill leg's ``kv_transfer_params``, passed on unchanged.
        additions: see `Shape.additions`. Only completions and chat know them.
    """
    leg = dict(body)
    own = body.get("kv_transfer_params")
    if ticket is not None:
        leg["kv_transfer_params"] = {**own, **ticket} if isinstance(own, dict) else dict(ticket)
    if endpoint in (Endpoint.COMPLETIONS, Endpoint.CHAT):
        _add(leg, additions)
    return leg


def _add(leg: dict[str, object], additions: frozenset[Addition]) -> None:
    if Addition.TOKEN_IDS in additions:
        leg["return_token_ids"] = True
    if Addition.USAGE in additions:
        options = leg.get("stream_options")
        leg["stream_options"] = {**(options if isinstance(options, dict) else {}), "include_usage": True}
