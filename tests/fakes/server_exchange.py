"""The server's side of an exchange where nothing is written to the socket directly: all goes by ASGI's messages."""

from collections.abc import Callable

from pdproxy.request import Headers


class WithoutDirectWrites:
    """Answers every direct write with False, as the server does where it cannot; its client stays."""

    def take_body(self) -> bytes | None:
        return None

    def write_head(self, status: int, headers: Headers) -> bool:
        return False

    def write_whole(self, status: int, headers: Headers, body: bytes) -> bool:
        return False

    def write_end(self) -> bool:
        return False

    def tell_when_left(self, on_left: Callable[[], None] | None) -> None:
        """Nobody leaves."""
