"""Keys, tokens and certificates that are read again when their files change, so that they rotate without a restart."""

import asyncio
import dataclasses
import hashlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from pdproxy.errors import SettingsError
from pdproxy.observe.labels import FileChange, WatchedSetting
from pdproxy.observe.metrics import Metrics

_LOG = logging.getLogger(__name__)

INTERVAL = 5.0
"""Seconds between two looks."""

Digests = tuple[bytes | None, ...]
"""SHA-256 of what each file of a setting holds; None for one that cannot be read."""


@dataclasses.dataclass(slots=True)
class _WatchedFiles:
    """Files that belong together: a certificate and its key.

    ``load`` reads them and puts what they hold to use; it raises `SettingsError`, and changes nothing then.
    """

    setting: WatchedSetting
    paths: Sequence[Path]
    load: Callable[[], None]
    seen: Digests = ()
    used: Digests = ()


class FileWatcher:
    """Compares what files hold, every few seconds, with what they held before.

    Content is compared and not times: Kubernetes changes a mounted secret by pointing a link elsewhere, and times are
    wrong on network mounts. What cannot be used changes nothing: it is logged once, and shown in the metrics as long as
    it stays.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._watched: list[_WatchedFiles] = []

    def add(self, setting: WatchedSetting, paths: Sequence[Path | None], load: Callable[[], None]) -> None:
        """Load the files of a setting now, and again whenever they change; a setting without files is loaded once.

        Raises:
            SettingsError: they cannot be used at the start.
        """
        files = [path for path in paths if path is not None]
        digests = _digests(files)  # before they are read: a change between the two is then seen as one
        load()
        if files:
            self._watched.append(_WatchedFiles(setting, files, load, digests, digests))
            self._metrics.file_watched(setting)

    async def look(self) -> None:
        """Look at every file once; to be called each `INTERVAL`."""
        for each in tuple(self._watched):
            digests = await asyncio.to_thread(_digests, each.paths)
            if digests != each.seen:
                each.seen = digests
                self._take(each)

    def _take(self, changed: _WatchedFiles) -> None:
        """Use what the files hold now, or keep what they held before."""
        try:
            changed.load()
        except SettingsError as error:
            _LOG.error("%s What it held before stays in use.", error)
            self._metrics.file_changed(changed.setting, FileChange.REFUSED)
            return
        if changed.seen == changed.used:
            _LOG.info("%s: what is in use can be read again", changed.setting)
        else:
            _LOG.info("%s: what the file holds now is in use", changed.setting)
        changed.used = changed.seen
        self._metrics.file_changed(changed.setting, FileChange.TAKEN)


def _digests(paths: Sequence[Path]) -> Digests:
    return tuple(map(_digest, paths))


def _digest(path: Path) -> bytes | None:
    try:
        return hashlib.sha256(path.read_bytes()).digest()
    except OSError:
        return None
