"""The label values of the metrics."""

import enum


class Outcome(enum.StrEnum):
    """How a client's request ended."""

    OK = "ok"
    """The client got a complete answer."""
    CLIENT_ERROR = "client_error"
    """The request itself was at fault (4xx)."""
    CLIENT_GONE = "client_gone"
    """The client left before the end."""
    REJECTED = "rejected"
    """There was no place for it (429, 503 while draining)."""
    FAILED = "failed"
    """We could not serve it (5xx, or an error event in the stream)."""


class Phase(enum.StrEnum):
    """The parts of a request's time."""

    PLAN = "plan"
    QUEUE = "queue"
    PREFILL = "prefill"
    """From the prefill leg's send to its ticket."""
    HANDOVER = "handover"
    """From the ticket to the decode leg's response head; of a stream whose decode leg waited, to its first event."""
    DECODE = "decode"
    """From there to the end of the answer."""
    FIRST_TOKEN = "first_token"
    """From the request's arrival to the first byte of its answer."""
    TOTAL = "total"


class Leg(enum.StrEnum):
    """The calls that are made to nodes for a request."""

    PREFILL = "prefill"
    DECODE = "decode"
    DELIVERY = "delivery"
    """Of a ticket to the decode leg that waits for it."""
    RELEASE = "release"
    FORWARD = "forward"


class Tokens(enum.StrEnum):
    """Kinds of tokens in the nodes' usage."""

    PROMPT = "prompt"
    CACHED = "cached"
    COMPLETION = "completion"


class Task(enum.StrEnum):
    """The background tasks."""

    HEALTH = "health"
    DISCOVERY = "discovery"
    PROOF = "proof"


class Attempt(enum.StrEnum):
    """How an attempt ended: to continue a stream elsewhere, or to release a hand-over."""

    SUCCEEDED = "done"
    FAILED = "failed"


class Delivery(enum.StrEnum):
    """What came of a decode leg that went out before its ticket."""

    TICKET = "ticket"
    """It was brought its ticket."""
    NONE = "none"
    """It was told that there is none, and that its node is to compute the prompt."""
    FAILED = "failed"
    """Neither could be brought to it: it was sent again."""
    UNNEEDED = "unneeded"
    """Its node answered before there was a ticket."""


class Proof(enum.StrEnum):
    """How a known-answer test of a pair of nodes ended."""

    PASSED = "passed"
    """The decode node answered with the hand-over as it answers alone."""
    FAILED = "failed"
    """It answered something else: the same bytes mean different things on the two nodes."""
    UNANSWERED = "unanswered"
    """No hand-over came about, so that nothing could be compared."""


class Affinity(enum.StrEnum):
    """Whether a leg was planned for the node that its request's session belongs to."""

    OWN = "own"
    NEXT = "next"
    """Another one: its own has no room, has failed this request, or exchanges no ticket with the other leg's node."""
    NONE = "none"
    """The request names no session: it went to the least loaded node."""


class RouteReason(enum.StrEnum):
    """Why a plan by what is cached chose the place that is to compute the prompt."""

    CACHED = "cached"
    """Nowhere else is more of the prompt cached that could be used."""
    BRANCH = "branch"
    """Its attention cache has the most, but no state to resume from: it will keep one from this prompt on."""
    LOAD = "load"
    """Elsewhere more is cached, but it would take longer, or that place cannot take the request."""
    SESSION = "session"
    """Nothing is known of caches; the place is that of the request's session."""
    NOTHING_CACHED = "nothing_cached"
    """Nothing that could be used is cached anywhere, or nothing is known: the least loaded place."""
    RESUMES = "resumes"
    """The decode node can resume by itself, and that takes less time than a hand-over."""
