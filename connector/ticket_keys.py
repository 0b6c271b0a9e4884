"""Ticket keys that change while a node runs. No vLLM.

Keys are a sequence: the first signs, all verify. That of a file (`KeyFile`) changes when the file does, so that keys
are rotated without loading a model again; whoever holds it need not know.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import overload

from .config import ConfigError, ConnectorConfig, read_keys
from .counters import KeyChange

log = logging.getLogger("vllm.pdproxy.keys")

LOOK_SECONDS = 5.0
"""Between two looks into the file, at the least: it is read when a key is needed."""


def following(config: ConnectorConfig) -> ConnectorConfig:
    """The same settings, whose keys follow their file, if they come from one. Raises ConfigError."""
    return config if config.key_file is None else replace(config, keys=KeyFile(config.key_file))


class KeyFile(Sequence[bytes]):
    """The keys that a file holds: those of the last look that found usable ones. Safe from any thread.

    There is no thread that looks: whoever needs a key has the file read, if the last look was `LOOK_SECONDS` ago. The
    file should be on this machine, as a mounted secret is: the engine waits for it. Content is compared, not times:
    Kubernetes changes a mounted secret by pointing a link elsewhere.

    Raises ConfigError at the start; afterwards what cannot be used is logged once, and the keys stay.
    """

    def __init__(self, path: str, now: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._now = now
        self._lock = threading.Lock()
        self._keys = read_keys(path)
        self._next_look = now() + LOOK_SECONDS
        self._complaint = ""
        self._report: Callable[[KeyChange], None] = lambda _: None

    def __repr__(self) -> str:
        return f"KeyFile({self._path!r})"

    def report_to(self, report: Callable[[KeyChange], None]) -> None:
        """Call `report` for each look that finds something else, or what cannot be used."""
        self._report = report

    def __len__(self) -> int:
        return len(self._current())

    @overload
    def __getitem__(self, index: int) -> bytes: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[bytes]: ...

    def __getitem__(self, index: int | slice) -> bytes | Sequence[bytes]:
        return self._current()[index]

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._current())

    def _current(self) -> tuple[bytes, ...]:
        if self._now() >= self._next_look and self._lock.acquire(blocking=False):
            try:
                self._look()
            finally:
                self._lock.release()
        return self._keys

    def _look(self) -> None:
        self._next_look = self._now() + LOOK_SECONDS
        try:
            keys = read_keys(self._path)
        except ConfigError as error:
            if str(error) != self._complaint:
                log.warning("%s The keys that it held before stay in use.", error)
            self._complaint = str(error)
            self._report(KeyChange.REFUSED)
            return
        self._complaint = ""
        if keys != self._keys:
            self._keys = keys
            log.info("Ticket keys: %d keys of %s are in use from now on, the first signs.", len(keys), self._path)
            self._report(KeyChange.TAKEN)
