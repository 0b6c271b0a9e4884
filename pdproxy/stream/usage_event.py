"""The usage event of a stream that only the proxy asked for. Pure."""

import re

from pdproxy.finish_reasons import FINISH_REASON

_USAGE_EVENT = b'"choices":[]'
_FINGERPRINT = re.compile(rb',"system_fingerprint":"[^"\\]*"')
_END = b"}\n\n"


class UsageEventFilter:
    """Takes the usage event out of a stream of one choice whose ``stream_options.include_usage`` is ours.

    vLLM writes ``system_fingerprint`` into the last event: the usage event, or without one the event with the finish
    reason. So the latter is held back until the usage event is here, and gets the fingerprint.
    """

    __slots__ = ("held",)

    def __init__(self) -> None:
        self.held = b""
        """The bytes that are held back; empty for nothing."""

    def is_usage_event(self, data: bytes) -> bool:
        return data.find(_USAGE_EVENT) >= 0

    def feed(self, data: bytes, seen: bytes) -> bytes:
        """The bytes that the client may see now; ``seen`` is what it shall see of the event that has this data."""
        if data.find(FINISH_REASON) >= 0:
            self.held += seen
            return b""
        return self.flush() + seen if self.held else seen

    def on_usage_event(self, data: bytes) -> bytes:
        """The bytes that were held back, with the usage event's fingerprint."""
        found, held = _FINGERPRINT.search(data), self.flush()
        if found is None or not held.endswith(_END) or _FINGERPRINT.search(held) is not None:
            return held
        return held.removesuffix(_END) + found.group() + _END

    def flush(self) -> bytes:
        held, self.held = self.held, b""
        return held
