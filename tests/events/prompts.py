"""Prompts on their way through the proxy."""

from pdproxy.legs.shape import shape
from pdproxy.request import ClientRequest, Endpoint, HeldBody, Json, SubRequest


def sub_request(endpoint: Endpoint, body: Json, name: str = "r", arrived: float = 0.0) -> SubRequest:
    """A request of one prompt, whose body may hold parsed values."""
    model = str(body.get("model", "tiny"))
    request = ClientRequest(name, endpoint, HeldBody(body), (), model, False, 0, arrived, 99.0, lambda: False)
    return SubRequest(request, HeldBody(body), shape(endpoint, body), name)
