"""How long what is cached at a place stays there, by what the place stores: from its own KV events. Pure.

A cache that is full makes room for each block that it stores by evicting the one that was used longest ago. So a
block that nobody uses stays for as long as the place takes to store as many blocks as it has.
"""

import math
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from pdproxy.planning.prefix import Place

REMEMBERED_SECONDS = 60.0
"""Blocks stored longer ago than that count little."""
LOOK_SECONDS = 1.0
"""Between two looks at what places have stored."""
LONGEST = 3600.0
"""Seconds; places at which blocks stay longer are left out."""


class Turnover:
    """The seconds that an unused block stays at each place.

    Attributes:
        stays: as of the last look; places at which blocks stay for more than `LONGEST` are left out.
    """

    def __init__(self) -> None:
        self.stays: Mapping[Place, float] = MappingProxyType({})
        self._looked = -math.inf
        self._stored: dict[Place, int] = {}
        self._recent: dict[Place, float] = {}

    def is_due(self, now: float) -> bool:
        """Whether it is time for another look."""
        return now - self._looked >= LOOK_SECONDS

    def note_stored(self, stored: Iterable[tuple[Place, int, int]], now: float) -> None:
        """Each place with the number of blocks that it has stored since it is known, and of those that it can hold."""
        part = math.exp((self._looked - now) / REMEMBERED_SECONDS)
        self._looked, before, recent = now, self._stored, self._recent
        stays: dict[Place, float] = {}
        self._stored, self._recent = {}, {}
        for place, count, most in stored:
            more = count - before.get(place, count)
            self._stored[place] = count
            self._recent[place] = each = part * recent.get(place, 0.0) + max(0, more)
            if each * LONGEST > most * REMEMBERED_SECONDS:
                stays[place] = most * REMEMBERED_SECONDS / each
        self.stays = MappingProxyType(stays)
