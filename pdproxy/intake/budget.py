"""How many bytes of request bodies are held at once: memory is bounded, however many requests wait or run."""

from types import TracebackType
from typing import Self

from pdproxy.errors import ClientError
from pdproxy.intake.admission import Rejection
from pdproxy.observe.metrics import Metrics


class Budget:
    """Bytes for all requests together.

    Args:
        most: at once.
        metrics: told of every change.
    """

    def __init__(self, most: int, metrics: Metrics) -> None:
        self._most = most
        self._metrics = metrics
        self._held = 0

    def share(self) -> "Share":
        """For one request."""
        return Share(self)

    def take(self, size: int) -> None:
        """So many bytes more are held.

        Raises:
            ClientError: 429 with Retry-After: there is no room for them.
        """
        if self._held + size > self._most:
            self._metrics.rejected(Rejection.BODIES_FULL)
            raise _full()
        self._change(size)

    def give(self, size: int) -> None:
        """So many bytes less."""
        self._change(-size)

    def _change(self, size: int) -> None:
        self._held += size
        self._metrics.body_bytes_are(self._held)


class Share:
    """What one request holds; given back at the end of the context."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._size = 0

    def reach(self, size: int) -> None:
        """The body has so many bytes by now. What its head promises does not count: promises cost nothing.

        Raises:
            ClientError: as `Budget.take`.
        """
        self._budget.take(size - self._size)
        self._size = size

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._budget.give(self._size)
        self._size = 0


def _full() -> ClientError:
    return ClientError(
        429,
        "The requests that are here take up all the room there is for them: try again later.",
        kind="rate_limit_error",
        code=Rejection.BODIES_FULL,
        # What is left of the body would otherwise be read as the next request.
        headers=(("retry-after", "1"), ("connection", "close")),
    )
