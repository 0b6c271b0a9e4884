"""A cheap sign of progress: whether an engine that has requests still steps. Its HTTP server may answer without it."""

import dataclasses

_RUNNING = "vllm:num_requests_running"

_MOVING = (
    _RUNNING,
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:iteration_tokens_total_count",
    "vllm:generation_tokens_total",
    "vllm:prompt_tokens_total",
)
"""Series that the engine core's own reports move (vLLM 0.32, `v1/metrics/loggers.py`): with every step of a decode,
and, by the cache usage, with every chunk of a long prefill."""


@dataclasses.dataclass(frozen=True, slots=True)
class Vitals:
    """One reading.

    Attributes:
        running: requests that the engine is computing.
        trace: changes whenever the engine makes a step that counts.
    """

    running: float
    trace: tuple[str, ...]


def read_vitals(body: bytes) -> Vitals | None:
    """What a ``/metrics`` answer says; None where the engine's statistics are off."""
    lines = [line for line in body.decode("utf-8", "replace").splitlines() if line.startswith(_MOVING)]
    running = [line for line in lines if line.startswith((_RUNNING + "{", _RUNNING + " "))]
    if not running:
        return None
    try:
        return Vitals(sum(float(line.rpartition(" ")[2]) for line in running), tuple(lines))
    except ValueError:
        return None


@dataclasses.dataclass(frozen=True, slots=True)
class Stillness:
    """Since when (monotonic seconds) an engine has shown the same reading with requests running."""

    vitals: Vitals
    since: float

    def seconds(self, now: float) -> float:
        """How long it has been still; 0 for one that has nothing to do."""
        return now - self.since if self.vitals.running > 0 else 0.0


def observed(before: Stillness | None, vitals: Vitals, now: float) -> Stillness:
    """What a new reading makes of the one before."""
    return before if before is not None and before.vitals == vitals else Stillness(vitals, now)
