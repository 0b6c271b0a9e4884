"""Drives client requests through their lives: the one door from intake to the nodes."""

from pdproxy.drive.means import Means
from pdproxy.drive.reply import Reply, ReplyStream
from pdproxy.request import ClientRequest, Headers

__all__ = ["Orchestrator", "Reply", "ReplyStream"]


class Orchestrator:
    """Answers requests with the nodes of the pool.

    Args:
        means: the transport, the pool, the metrics, the clock and the operator's terms.
    """

    def __init__(self, means: Means) -> None:
        self._means = means

    async def answer(self, request: ClientRequest) -> Reply:
        """The reply to a request for a generating endpoint.

        A streamed reply comes back as soon as its first event is here. An upstream error that is the client's own comes
        back as a `Reply` with the node's status and body. Cancelling the awaiting task, or `aclose` on the reply's
        stream, means that the client has gone: legs end, hand-overs are released, load is given back.

        Raises:
            ClientError: no such model (404), nothing can serve it now (503), all tries failed (502), too late (504).
        """
        raise NotImplementedError

    async def forward(self, method: str, path: str, headers: Headers, body: bytes, model: str) -> Reply:
        """The reply of one suitable node to a request that the proxy does not understand (embeddings, tokenize, …).

        Args:
            path: with its query string, as the client sent it, already judged by intake to be allowed.
            model: which pool; "" for any.

        Raises:
            ClientError: as `answer`.
        """
        raise NotImplementedError

    async def aclose(self) -> None:
        """Wait, within the release deadline, for the releases that are still under way."""
        raise NotImplementedError
