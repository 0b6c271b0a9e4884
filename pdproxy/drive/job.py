"""One prompt's share of a client's request."""

import dataclasses

from pdproxy.request import ClientRequest, Endpoint, Headers, Json, Shape


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """What has to be answered.

    Attributes:
        request: the client's.
        body: of one prompt.
        shape: of ``body``.
        name: the request id; with the prompt's number where there are several.
    """

    request: ClientRequest
    body: Json
    shape: Shape
    name: str

    @property
    def endpoint(self) -> Endpoint:
        """Which API."""
        return self.request.endpoint

    @property
    def headers(self) -> Headers:
        """What both legs send on: the client's headers, and the request id by which node logs can be matched."""
        kept = tuple((name, value) for name, value in self.request.headers if name != "x-request-id")
        return (*kept, ("x-request-id", self.name))
