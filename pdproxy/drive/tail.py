"""The usage event that we asked for and the client did not: taken out again, with what vLLM moves into it.

vLLM 0.32 puts ``system_fingerprint`` on the usage event where one follows, else on the event with the finish reason.
So that event waits for the usage event, which comes in the same breath, and gets the fingerprint back. Pure.
"""

import re

_FINISH = b'"finish_reason":"'
_USAGE = b'"choices":[],'
_FINGERPRINT = re.compile(rb',"system_fingerprint":"[^"\\]*"')
_END = b"}\n\n"


class Tail:
    """For one stream of one choice whose ``stream_options.include_usage`` is ours."""

    def __init__(self) -> None:
        self._kept = b""

    @property
    def keeps(self) -> bool:
        """Something is kept back."""
        return bool(self._kept)

    def ours(self, data: bytes) -> bool:
        """Whether an event is the usage event."""
        return _USAGE in data

    def keep(self, data: bytes, seen: bytes) -> bytes:
        """What the client may see now, ``seen`` being what it shall see of an event."""
        if _FINISH in data:
            self._kept += seen
            return b""
        return self.flush() + seen if self._kept else seen

    def close(self, data: bytes) -> bytes:
        """The usage event has come: what was kept, with the fingerprint that belongs to it."""
        found, kept = _FINGERPRINT.search(data), self.flush()
        if found is None or not kept.endswith(_END) or _FINGERPRINT.search(kept) is not None:
            return kept
        return kept.removesuffix(_END) + found.group() + _END

    def flush(self) -> bytes:
        """What was kept."""
        kept, self._kept = self._kept, b""
        return kept
