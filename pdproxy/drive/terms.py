"""What the operator allows: deadlines and policy, as the drive needs them."""

import dataclasses

from pdproxy.planning.plan import PlanPolicy, Without
from pdproxy.settings.choices import OnPrefillFailure
from pdproxy.transport.port import Patience


@dataclasses.dataclass(frozen=True, slots=True)
class Terms:
    """Deadlines in seconds, counts in tries.

    Attributes:
        connect: until a connection to a node stands.
        prefill_headers: from a prefill leg's start to its answer's head.
        decode_headers: from a decode leg's start to its answer's head, and again to a stream's first event.
        stall: between two pieces of any body.
        release: for the whole errand of releasing one hand-over.
        on_prefill_failure: what follows a failed prefill leg.
        retries: how often each leg may be tried again before the client gets a byte; unreachable nodes do not count.
        migrations: how often one stream may move to another decode node; 0 turns migration off.
        local_below_tokens: prompts known to be shorter are computed on the decode node; 0 for none.
        fan_out: how many prompts of one list run at once.
        ticket_life: for how long a prefill leg's answer gives a ticket to try again; at most the connector's lease.
    """

    connect: float = 5.0
    prefill_headers: float = 600.0
    decode_headers: float = 600.0
    stall: float = 120.0
    release: float = 5.0
    on_prefill_failure: OnPrefillFailure = OnPrefillFailure.RETRY
    retries: int = 2
    migrations: int = 3
    local_below_tokens: int = 0
    fan_out: int = 64
    ticket_life: float = 30.0

    def plan_policy(self) -> PlanPolicy:
        """What planning needs to know of it."""
        fail = self.on_prefill_failure is OnPrefillFailure.FAIL
        return PlanPolicy(Without.FAIL if fail else Without.LOCAL, self.local_below_tokens)

    def prefill_patience(self, remaining: float) -> Patience:
        """Patience for a prefill leg that may use ``remaining`` seconds of the request's deadline."""
        return _within(remaining, self.connect, self.prefill_headers, self.stall)

    def decode_patience(self, remaining: float) -> Patience:
        """Patience for a decode leg that may use ``remaining`` seconds of the request's deadline."""
        patience = _within(remaining, self.connect, self.decode_headers, self.stall)
        return dataclasses.replace(patience, first=patience.headers)

    def release_patience(self) -> Patience:
        """Patience for the errand that releases a hand-over."""
        return _within(self.release, self.connect, self.release, self.release)


def _within(remaining: float, connect: float, headers: float, stall: float) -> Patience:
    return Patience(min(connect, remaining), min(headers, remaining), min(stall, remaining), whole=remaining)
