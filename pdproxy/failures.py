"""The failure table: what follows when a leg fails. Pure; the only place that decides a retry.

``python -m pdproxy.failures`` prints it for docs/failures.md.
"""

import dataclasses
import enum
import sys
from collections.abc import Mapping

from pdproxy.errors import Fault
from pdproxy.observe.labels import Leg
from pdproxy.reasons import NotContinuableReason
from pdproxy.settings.types import OnPrefillFailure


class Moment(enum.StrEnum):
    """When it failed, seen from the leg."""

    OPENING = "opening"
    """Before the leg's first event (of a stream) or before the whole answer was here: the client has nothing of it."""
    RESUMING = "resuming"
    """As opening, of a decode leg that resumes a stream by its journal: the client has what was generated before."""
    STREAMING = "streaming"
    """After the leg's first event: the client has bytes."""


class Step(enum.StrEnum):
    """The next thing that is done; `_STEPS` has each in words."""

    OTHER_PREFILL = "other_prefill"
    LOCAL = "local"
    SAME_TICKET = "same_ticket"
    PREFILL_AGAIN = "prefill_again"
    AT_ENDPOINT = "at_endpoint"
    MIGRATE = "migrate"
    OTHER_NODE = "other_node"
    ANSWER = "answer"
    FAIL = "fail"
    ERROR_EVENT = "error_event"
    LEASE_END = "lease_end"


NO_RETRY_USED = frozenset({Fault.REFUSED, Fault.NO_ROUTE})
"""Faults that use no retry up: nothing of the request reached the engine. No node is tried twice in one way."""

MOST_BROKEN = 2
"""Nodes of a role that may break off under one request before it is sent to no other: a request that ends the
process of each node that gets it must not end all of them. One retry is what a node that dies by itself costs."""


@dataclasses.dataclass(frozen=True, slots=True)
class FailureRow:
    """One row: what is tried, in which order, and until when.

    Attributes:
        steps: the first that `RetryOptions` allow is taken; the last one is final.
        deadline: the setting within which the fault shows itself.
        status: of our own error, where it comes to that.
    """

    steps: tuple[Step, ...]
    deadline: str
    status: int = 502


@dataclasses.dataclass(frozen=True, slots=True)
class RetryOptions:
    """The retries that are still possible.

    Attributes:
        policy: the operator's.
        retries: tries that are left for this leg.
        ticket_works: a ticket is at hand, younger than `ticket_life` (it may still be refused: then it is computed).
        moves_left: of this stream.
        continuable: the stream can go on at another node.
        broken: nodes of the leg's role that broke off under the request, one after another.
    """

    policy: OnPrefillFailure
    retries: int
    ticket_works: bool = False
    moves_left: int = 0
    continuable: bool = False
    broken: int = 0

    def allow(self, step: Step) -> bool:
        """Whether ``step`` can be taken now."""
        retries = self.retries if self.broken < MOST_BROKEN else 0
        match step:
            case Step.OTHER_PREFILL:
                return self.policy is not OnPrefillFailure.LOCAL and retries > 0
            case Step.LOCAL:
                return self.policy is not OnPrefillFailure.FAIL
            case Step.SAME_TICKET:
                return retries > 0 and self.ticket_works
            case Step.PREFILL_AGAIN | Step.OTHER_NODE:
                return retries > 0
            case Step.MIGRATE:
                return self.moves_left > 0 and self.continuable and self.broken < MOST_BROKEN
            case _:
                return True


def decide(leg: Leg, moment: Moment, fault: Fault, options: RetryOptions) -> Step:
    """The next step after a leg has failed, by the table.

    A stream whose node leaves without a fault (drain, removal, given up) is moved by `orchestration.relay` alone.
    """
    return next(step for step in FAILURE_TABLE[leg, moment, fault].steps if options.allow(step))


def final_step(leg: Leg, moment: Moment, fault: Fault) -> Step:
    """The row's final step: for when a step was decided and no node is left to take it."""
    return FAILURE_TABLE[leg, moment, fault].steps[-1]


_PREFILL = (Step.OTHER_PREFILL, Step.LOCAL, Step.FAIL)
_PREFILL_ANSWERED = (Step.OTHER_PREFILL, Step.LOCAL, Step.ANSWER)
_DECODE = (Step.SAME_TICKET, Step.PREFILL_AGAIN, Step.FAIL)
_DECODE_ANSWERED = (Step.SAME_TICKET, Step.PREFILL_AGAIN, Step.ANSWER)
_RESUME = (Step.SAME_TICKET, Step.PREFILL_AGAIN, Step.ERROR_EVENT)
_STREAM = (Step.MIGRATE, Step.ERROR_EVENT)

_DECODE_DEADLINES = dict.fromkeys(Fault, "stall") | {Fault.REFUSED: "connect"}
_DECODE_DEADLINES |= dict.fromkeys(
    (Fault.RESET, Fault.HEADERS_TIMEOUT, Fault.STALL, Fault.CLIENT_ERROR, Fault.NO_ROUTE, Fault.BUSY), "decode_headers"
)
_DECODE_DEADLINES[Fault.SERVER_ERROR] = "decode_headers"

FAILURE_TABLE: Mapping[tuple[Leg, Moment, Fault], FailureRow] = {
    (Leg.PREFILL, Moment.OPENING, Fault.REFUSED): FailureRow(_PREFILL, "connect", 503),
    (Leg.PREFILL, Moment.OPENING, Fault.RESET): FailureRow(_PREFILL, "prefill_headers"),
    (Leg.PREFILL, Moment.OPENING, Fault.HEADERS_TIMEOUT): FailureRow(_PREFILL, "prefill_headers", 504),
    (Leg.PREFILL, Moment.OPENING, Fault.STALL): FailureRow(_PREFILL, "stall", 504),
    (Leg.PREFILL, Moment.OPENING, Fault.CLIENT_ERROR): FailureRow((Step.ANSWER,), "prefill_headers"),
    (Leg.PREFILL, Moment.OPENING, Fault.NO_ROUTE): FailureRow((Step.ANSWER,), "prefill_headers"),
    (Leg.PREFILL, Moment.OPENING, Fault.BUSY): FailureRow(_PREFILL_ANSWERED, "prefill_headers", 503),
    (Leg.PREFILL, Moment.OPENING, Fault.SERVER_ERROR): FailureRow(_PREFILL_ANSWERED, "prefill_headers"),
    (Leg.PREFILL, Moment.OPENING, Fault.INVALID_BODY): FailureRow(_PREFILL, "stall"),
    (Leg.PREFILL, Moment.OPENING, Fault.NO_TICKET): FailureRow(_PREFILL, "stall"),
    (Leg.PREFILL, Moment.OPENING, Fault.ABORTED): FailureRow(_PREFILL, "stall", 503),
    (Leg.PREFILL, Moment.OPENING, Fault.ERROR_EVENT): FailureRow(_PREFILL, "stall"),
    (Leg.DECODE, Moment.OPENING, Fault.REFUSED): FailureRow(_DECODE, "connect", 503),
    (Leg.DECODE, Moment.OPENING, Fault.RESET): FailureRow(_DECODE, "decode_headers"),
    (Leg.DECODE, Moment.OPENING, Fault.HEADERS_TIMEOUT): FailureRow(_DECODE, "decode_headers", 504),
    (Leg.DECODE, Moment.OPENING, Fault.STALL): FailureRow(_DECODE, "decode_headers", 504),
    (Leg.DECODE, Moment.OPENING, Fault.CLIENT_ERROR): FailureRow((Step.ANSWER,), "decode_headers"),
    (Leg.DECODE, Moment.OPENING, Fault.NO_ROUTE): FailureRow((Step.AT_ENDPOINT,), "decode_headers"),
    (Leg.DECODE, Moment.OPENING, Fault.BUSY): FailureRow(_DECODE_ANSWERED, "decode_headers", 503),
    (Leg.DECODE, Moment.OPENING, Fault.SERVER_ERROR): FailureRow(_DECODE_ANSWERED, "decode_headers"),
    (Leg.DECODE, Moment.OPENING, Fault.INVALID_BODY): FailureRow(_DECODE, "stall"),
    (Leg.DECODE, Moment.OPENING, Fault.NO_TICKET): FailureRow(_DECODE, "stall"),
    (Leg.DECODE, Moment.OPENING, Fault.ABORTED): FailureRow(_DECODE, "stall", 503),
    (Leg.DECODE, Moment.OPENING, Fault.ERROR_EVENT): FailureRow(_DECODE, "stall"),
    **{(Leg.DECODE, Moment.RESUMING, fault): FailureRow(_RESUME, _DECODE_DEADLINES[fault]) for fault in Fault},
    **{(Leg.DECODE, Moment.STREAMING, fault): FailureRow(_STREAM, "stall") for fault in Fault},
    (Leg.DECODE, Moment.STREAMING, Fault.CLIENT_ERROR): FailureRow((Step.ERROR_EVENT,), "stall"),
    **{(Leg.FORWARD, Moment.OPENING, fault): FailureRow((Step.FAIL,), "stall") for fault in Fault},
    (Leg.FORWARD, Moment.OPENING, Fault.REFUSED): FailureRow((Step.OTHER_NODE, Step.FAIL), "connect", 503),
    (Leg.FORWARD, Moment.OPENING, Fault.RESET): FailureRow((Step.FAIL,), "decode_headers"),
    (Leg.FORWARD, Moment.OPENING, Fault.HEADERS_TIMEOUT): FailureRow((Step.FAIL,), "decode_headers", 504),
    (Leg.FORWARD, Moment.OPENING, Fault.STALL): FailureRow((Step.FAIL,), "decode_headers", 504),
    (Leg.FORWARD, Moment.OPENING, Fault.BUSY): FailureRow((Step.FAIL,), "connect", 503),
    **{(Leg.RELEASE, Moment.OPENING, fault): FailureRow((Step.LEASE_END,), "release") for fault in Fault},
}
"""Every leg, moment and fault; only a decode leg streams. A leg that streams has its head behind it: what a head can
say comes up there only through a confused node, and is treated like any break. A forward leg passes the node's answer
on whatever its status is, so that no status makes a fault."""


class Blame(enum.StrEnum):
    """Whether a fault counts against the node that it happened on."""

    YES = "yes"
    """No request can cause it."""
    NO = "no"
    IN_DOUBT = "if another node serves the request; by half if none does"
    """The request itself may have caused it."""
    IF_SILENT = "unless a request has received something from the node meanwhile"
    """A node that is busy answers probes late."""


LEG_BLAME = {
    Fault.REFUSED: Blame.YES,
    Fault.RESET: Blame.IN_DOUBT,
    Fault.HEADERS_TIMEOUT: Blame.IN_DOUBT,
    Fault.STALL: Blame.IN_DOUBT,
    Fault.CLIENT_ERROR: Blame.NO,
    Fault.NO_ROUTE: Blame.NO,
    Fault.BUSY: Blame.NO,
    Fault.SERVER_ERROR: Blame.IN_DOUBT,
    Fault.INVALID_BODY: Blame.IN_DOUBT,
    Fault.NO_TICKET: Blame.NO,
    Fault.ABORTED: Blame.IN_DOUBT,
    Fault.ERROR_EVENT: Blame.IN_DOUBT,
}
"""Blame for prefill, decode and forward legs. A client can cause each fault in doubt on a healthy node: a process that
dies or drops the connection (RESET), a prompt or a grammar that takes longer than a deadline (HEADERS_TIMEOUT, STALL),
an exception in a parser (SERVER_ERROR, ERROR_EVENT), an answer that is too long (INVALID_BODY), a stream of beam
search, which vLLM 0.32 ends without a finish reason (ABORTED). `nodes.outlier` says how many such faults open a
circuit."""

PROBE_BLAME = {
    Fault.REFUSED: Blame.YES,
    Fault.RESET: Blame.YES,
    Fault.HEADERS_TIMEOUT: Blame.IF_SILENT,
    Fault.STALL: Blame.IF_SILENT,
    Fault.CLIENT_ERROR: Blame.NO,
    Fault.NO_ROUTE: Blame.NO,
    Fault.BUSY: Blame.NO,
    Fault.SERVER_ERROR: Blame.YES,
    Fault.INVALID_BODY: Blame.YES,
    Fault.NO_TICKET: Blame.NO,
    Fault.ABORTED: Blame.NO,
    Fault.ERROR_EVENT: Blame.NO,
}
"""Blame for health probes: `health.failures` in a row, and the node is given up. The proxy itself sends them, so no
client's request is their cause. BUSY is the proxy's own lack of sockets."""


def blame(leg: Leg, fault: Fault) -> Blame:
    """Whether a leg's fault counts against its node: a release's never does."""
    return Blame.NO if leg is Leg.RELEASE else LEG_BLAME[fault]


NOT_RESUMABLE: Mapping[NotContinuableReason, str] = {
    NotContinuableReason.NO_JOURNAL: (
        "the stream has no journal: its node is without our connector's endpoint plugin, or cannot resume, or left the "
        "stream to the endpoint itself; or `policy.migrations` is 0"
    ),
    NotContinuableReason.BEAM_SEARCH: "beam search: no output is final before the last one",
    NotContinuableReason.PROMPT_LOGPROBS: (
        "`prompt_logprobs`, and `echo` with log-probabilities: they belong to the first output, which is not made again"
    ),
    NotContinuableReason.SERVER_TOOLS: (
        "a stream of /v1/responses with tools that run on the node: what they did there is done"
    ),
    NotContinuableReason.RESPONSE_LOGPROBS: (
        "a stream of /v1/responses with log-probabilities: its last events repeat them all, and the journal has none"
    ),
    NotContinuableReason.JOURNAL_SIZE: "the stream's journal grew beyond 4 MiB: about 200,000 tokens",
    NotContinuableReason.JOURNAL_BROKEN: "the node's journal does not tell the number of its events: a bug of the node",
}
"""Why a stream is ended with an error event if it breaks off."""


def document() -> str:
    """The table as Markdown."""
    lines = [_INTRODUCTION, "| leg | moment | fault | what follows | counts against the node | seen within |"]
    lines.append("|---|---|---|---|---|---|")
    for (leg, moment, fault), row in FAILURE_TABLE.items():
        steps = "; else ".join(_STEPS[step] for step in row.steps)
        if Step.FAIL in row.steps:
            steps += f" ({row.status})"
        lines.append(f"| {leg} | {moment} | {fault} | {steps} | {blame(leg, fault)} | `{row.deadline}` |")
    lines += [_PROBES, "| fault | counts against the node |", "|---|---|"]
    lines += [f"| {fault} | {counts} |" for fault, counts in PROBE_BLAME.items()]
    lines += [_WHICH_GO_ON, "| reason | what it is |", "|---|---|"]
    lines += [f"| {reason} | {meaning} |" for reason, meaning in NOT_RESUMABLE.items()]
    return "\n".join(lines) + "\n"


_STEPS = {
    Step.OTHER_PREFILL: "another prefill node",
    Step.LOCAL: "compute on the decode node",
    Step.SAME_TICKET: "another decode node, same ticket",
    Step.PREFILL_AGAIN: "another decode node, after a new prefill",
    Step.AT_ENDPOINT: "the same decode node, at the endpoint itself",
    Step.MIGRATE: "migrate the stream",
    Step.OTHER_NODE: "another node",
    Step.ANSWER: "the node's answer to the client",
    Step.FAIL: "our error to the client",
    Step.ERROR_EVENT: "error event, clean end",
    Step.LEASE_END: "nothing: the lease's end frees the blocks",
}

_INTRODUCTION = """# What follows a failure

Made by `python -m pdproxy.failures` from `pdproxy/failures.py`; a test compares.

A kept-alive connection that breaks before the first byte of an answer is no failure: whatever the leg, the request is
sent once more, on a fresh connection to the same node. That uses no retry, counts against no node, and is counted in
`pdproxy_resends_total`. The deadlines hold for both tries together. The table applies to the second try: a node that
has gone meanwhile is *refused*.

The first step that is still possible is taken:

- *another prefill node*: unless the policy is `local`, while `retries` are left; where there is no other, the next.
- *compute on the decode node*: unless the policy is `fail`.
- *same ticket*: while `retries` are left and the ticket is younger than `ticket_life`. No prefill runs again.
- *after a new prefill*: while `retries` are left.
- *migrate*: while `migrations` are left and [the stream can go on](#which-streams-go-on). Where it is resumed by its
  journal, the new leg has the rows of the moment *resuming*.
- *at the endpoint itself*: always; the stream then has no journal.
- A node that could not be reached at all uses no retry up: where `retries` is not 0, every node is tried.
- A request under which the connections to two nodes of a role broke off (*reset*, or *refused* after a kept-alive
  connection broke under it), one after another, is sent to no third one: it may be what ends their processes. A
  stream's count starts anew once the client has got more of it.
- *aborted* is an answer of status 200 that the engine gave up: vLLM's finish reason `abort`. So it answers what arrives
  while it shuts down, and some requests at any time: vLLM 0.32 ends a chat stream with `use_beam_search` without a
  finish reason. Its answers on `/v1/messages` lack the reason to stop, and those on `/v1/responses` are
  `completed` without an output token. An answer of `/v1/responses` in one piece, or a stream without a journal, that is
  aborted after its first token cannot be told from a whole one.
- If no node is left for a step, the row's last step applies. A stream that moves waits first for a node that joins
  anew, for `limits.queue_seconds` at most, unless the node that it was on answers its next health check.

No step leads to a barred pair of nodes (`pdproxy_pair_barred`): one that failed the known-answer test, or whose tickets
were of no use.

The proxy does not wait for a node that active health gives up: if the request can go on elsewhere, its legs there fail
at once, as `stall`, long before the deadlines named below.

The deadline of the whole request ends every one of these (504, or the error event). The proxy then releases all that
the legs held.

Requests that one node answers by itself (embeddings, tokenize, score, …) have one leg, *forward*. If the node could not
be reached, the proxy asks another one. After any other fault nobody knows what was done, and the client gets the error.
The deadlines are those of a decode leg. The node's answer is passed on whatever its status.

A leg has the rows of what is asked, whatever else its node does. A node of both roles has the rows of either leg, and a
prompt that it computes and answers alone has those of a decode leg. A fault that takes it out takes it out for both:
prompts that it computed for others and nobody has read are computed anew, and its streams migrate. The last such node
leaves nobody: its streams wait, and other clients get our error, until it serves again.

A request can cause most faults on a healthy node. Such a fault counts in full once another node has served the request,
and by half if none does; how many of them in a row take a node out depends on its peers, and one request takes out at
most one node of a role ([when a node is taken out](reliability.md#when-a-node-is-taken-out)).
"""

_PROBES = """
## Health probes

`health.failures` of these in a row and the node is given up: it gets no requests until it has joined anew. An engine
that has requests and makes no step for a minute is a `stall`.

A node from whose legs nothing has come for `health.silence`, and that then answers neither of two probes within
`health.silence_timeout`, is given up at once ([which are, and which are not](node-failures.md#a-node-that-freezes)).
"""

_WHICH_GO_ON = """
## Which streams go on

A stream whose decode node fails or leaves goes on at another node by its journal, which nodes with our
connector's endpoint plugin write; on other nodes it ends with an error event. There are two ways:

- *resumed*, by its journal: both nodes can resume (the label `resume` of their `pdproxy_connector_info` is true). The
  other node gets the client's request and the journal, and sends what follows, on all endpoints.
- *restarted*: nothing that was generated has reached the client, so that any node can be asked anew, whether there is a
  journal or not.

A stream has a journal where its node can resume, `migrations` is not 0, and its shape is not in the table below.

A stream that breaks when all was said (the finish reason is out; of messages, the reason to stop) is ended by the
proxy, as the node would have, whatever it is; where usage is still to come, it is resumed for that if it can be, and
ends without it if not.

`pdproxy_continuable_total` counts requests by the words of the table.

### Streams that cannot be resumed

These end with an error event once generated text has reached the client; before that, they too are asked anew. A node
leaves three more to the endpoint itself, without a journal, for it alone knows of them: a response that it is to store,
or that goes on from a stored one; seeded sampling with speculative tokens (how many drafts were accepted decides how
many random numbers were drawn); a thinking budget on vLLM's model runner V1.
"""


if __name__ == "__main__":
    sys.stdout.write(document())
