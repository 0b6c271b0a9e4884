"""Hooks that schemathesis loads: generated requests name the served model and ask for few tokens."""

import schemathesis

from deploy.local.node import SERVED_NAME

FEW = 4
LIMITS = ("max_tokens", "max_output_tokens")


@schemathesis.hook
def map_body(context: schemathesis.HookContext, body: object) -> object:
    """The same body for the served model. Requests with random model names would not reach a node."""
    if not isinstance(body, dict) or not isinstance(body.get("model"), str):
        return body
    limits = {name: body.get(name, FEW) for name in LIMITS}
    short = {name: min(most, FEW) if isinstance(most, int) else most for name, most in limits.items()}
    return {**body, **short, "model": SERVED_NAME}
