"""Where each prompt's tokens came from, counted once a request, when it is certain. Adds up after failures too.

vLLM's own counters count a load when it is planned, and a failed load twice; this one waits for the verdict.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from connector.accounts import Accounts, Group


@dataclass(frozen=True, slots=True)
class Entry:
    """Tokens by source, and blocks by kind of group as (hit, pulled)."""

    hit: int
    pulled: int
    computed: int
    blocks: Mapping[Group, tuple[int, int]] = field(default_factory=dict)


class Ledger:
    """Entries wait here while their read is on its way."""

    def __init__(self, accounts: Accounts) -> None:
        self._accounts = accounts
        self._waiting: dict[str, Entry] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def plan(self, request_id: str, entry: Entry) -> None:
        """What will be true if the read is good; without a read it is true at once."""
        if entry.pulled:
            self._waiting[request_id] = entry
        else:
            self._waiting.pop(request_id, None)
            self._count(entry)

    def good(self, request_id: str) -> None:
        """The read was good."""
        entry = self._waiting.pop(request_id, None)
        if entry is not None:
            self._count(entry)

    def forget(self, request_id: str) -> None:
        """The read failed, and another plan will follow, or the request is gone."""
        self._waiting.pop(request_id, None)

    def _count(self, entry: Entry) -> None:
        self._accounts.prompt_tokens(hit=entry.hit, pulled=entry.pulled, computed=entry.computed)
        for group, (hit, pulled) in entry.blocks.items():
            self._accounts.blocks(group, hit=hit, pulled=pulled)
