"""Where each prompt's tokens came from, counted once a request, when it is certain. Adds up after failures too.

vLLM's own counters count a load when it is planned, and a failed load twice; this one waits for the verdict.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from connector.accounts import Accounts, Group


@dataclass(frozen=True, slots=True)
class Entry:
    """Tokens by source, and blocks by kind of group as (hit, pulled). `loaded`: by another connector."""

    hit: int
    pulled: int
    computed: int
    blocks: Mapping[Group, tuple[int, int]] = field(default_factory=dict)
    loaded: int = 0

    def reaching(self, tokens: int) -> "Entry":
        """As it turned out where only the prompt's first `tokens` were there after another connector's load."""
        lost = min(self.loaded, max(0, self.hit + self.loaded - tokens))
        return replace(self, loaded=self.loaded - lost, computed=self.computed + lost)


class Ledger:
    """Entries wait here while their read, or another connector's load, is on its way."""

    def __init__(self, accounts: Accounts) -> None:
        self._accounts = accounts
        self._waiting: dict[str, Entry] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def plan(self, request_id: str, entry: Entry) -> None:
        """What will be true if the read is good; without a read or a load it is true at once."""
        if entry.pulled or entry.loaded:
            self._waiting[request_id] = entry
        else:
            self._waiting.pop(request_id, None)
            self._count(entry)

    def good(self, request_id: str) -> None:
        """The read was good."""
        entry = self._waiting.pop(request_id, None)
        if entry is not None:
            self._count(entry)

    def loaded(self, request_id: str, tokens: int) -> None:
        """Another connector's load is over, if there was one, and the prompt's first `tokens` are there."""
        entry = self._waiting.get(request_id)
        if entry is not None and entry.loaded:
            del self._waiting[request_id]
            self._count(entry.reaching(tokens))

    def forget(self, request_id: str) -> None:
        """The read failed, and another plan will follow, or the request is gone."""
        self._waiting.pop(request_id, None)

    def _count(self, entry: Entry) -> None:
        self._accounts.prompt_tokens(hit=entry.hit, pulled=entry.pulled, loaded=entry.loaded, computed=entry.computed)
        for group, (hit, pulled) in entry.blocks.items():
            self._accounts.blocks(group, hit=hit, pulled=pulled)
