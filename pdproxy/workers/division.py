"""The limits of the settings, divided among workers."""

from pdproxy.errors import SettingsError
from pdproxy.settings.model import Limits, Settings


def share_of(settings: Settings, worker: int) -> Settings:
    """The settings of one worker, counted from 0: what the operator limits for the proxy is divided.

    Numbers that cannot be divided evenly are rounded down, and the first workers get one more: all shares together are
    what the operator set. `limits.concurrency` and `limits.key_concurrency` are at least 1 for each worker. What limits
    one request (its body, its head, its wait) is the same for each.

    Raises:
        SettingsError: the largest body would not fit into the share of `limits.held_bytes`.
    """
    limits, workers = settings.limits, settings.listen.workers
    shares = {
        "concurrency": max(1, _share(limits.concurrency, worker, workers)),
        "queue": _share(limits.queue, worker, workers),
        "held_bytes": _share(limits.held_bytes, worker, workers),
        "key_concurrency": limits.key_concurrency and max(1, _share(limits.key_concurrency, worker, workers)),
        "decode_fill": limits.decode_fill / workers,
    }
    _check_bodies(limits, workers)
    return settings.model_copy(update={"limits": limits.model_copy(update=shares)})


def _share(limit: int, worker: int, workers: int) -> int:
    return limit // workers + (worker < limit % workers)


def _check_bodies(limits: Limits, workers: int) -> None:
    if limits.held_bytes // workers < limits.body_bytes:
        raise SettingsError(
            f"limits.held_bytes ({limits.held_bytes}) divided among {workers} workers is less than limits.body_bytes"
            f" ({limits.body_bytes}): the largest body would never fit. Raise the one to {limits.body_bytes * workers},"
            f" lower the other to {limits.held_bytes // workers}, or have fewer workers."
        )
