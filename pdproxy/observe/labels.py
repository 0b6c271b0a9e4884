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


class Rejection(enum.StrEnum):
    """Why a request was turned away."""

    KEY_LIMIT = "key_limit"
    """Its key has as many open as it may."""
    REQUEST_RATE = "request_rate"
    """Its key has had as many in the last minute as it may; so with tokens, of prompts and of answers."""
    INPUT_RATE = "input_rate"
    OUTPUT_RATE = "output_rate"
    QUEUE_FULL = "queue_full"
    QUEUE_TIMEOUT = "queue_timeout"
    BODIES_FULL = "bodies_full"


class OperatorRefusal(enum.StrEnum):
    """Why the operators' port refused a request, whatever it asked for."""

    UNKNOWN_HOST = "unknown_host"
    """Its Host header names neither an address nor a name of the settings."""
    FOREIGN_ORIGIN = "foreign_origin"
    """A web page of another origin would change something."""
    NO_TOKEN_SET = "no_token_set"
    """The call would change something, the port is no loopback address, and the settings name no token."""


class ConnectionRefusal(enum.StrEnum):
    """Why a client's connection came to nothing before a request."""

    NO_DESCRIPTOR = "no_descriptor"
    """This process has as many files open as it may: the connection waits."""
    TLS = "tls_handshake"
    HTTP = "invalid_http"
    """The bytes are no HTTP request, an ambiguous one, or have no end."""


class Phase(enum.StrEnum):
    """The parts of a request's time."""

    PLAN = "plan"
    QUEUE = "queue"
    """In the proxy's queue; only of requests that had to wait."""
    PREFILL = "prefill"
    """From the prefill leg's send to its ticket."""
    HANDOVER = "handover"
    """From the ticket to the decode leg's response head."""
    DECODE = "decode"
    """From there to the end of the answer."""
    FIRST_TOKEN = "first_token"
    """From the request's arrival to the first byte of its answer."""
    TOTAL = "total"


class Leg(enum.StrEnum):
    """The calls that are made to nodes for a request."""

    PREFILL = "prefill"
    DECODE = "decode"
    RELEASE = "release"
    FORWARD = "forward"


class Tokens(enum.StrEnum):
    """Kinds of tokens in the nodes' usage."""

    PROMPT = "prompt"
    CACHED = "cached"
    COMPLETION = "completion"


class KeepOutcome(enum.StrEnum):
    """The outcome of asking a node to keep a conversation: the node's own words, and ours."""

    KEPT = "kept"
    NOTHING_CACHED = "nothing_cached"
    """The node has no state or no blocks from which the next turn could go on."""
    TOO_LARGE = "too_large"
    """The conversation alone is more than the node's share for keeps."""
    OFF = "off"
    """The node's share is 0."""
    UNTOLD = "untold"
    """The answer does not tell: streams of a node that computes alone do not."""
    KEY_LIMIT = "key_limit"
    """No node was asked: the API key has as many tokens kept as it may."""


class KeepTurn(enum.StrEnum):
    """The next turn of a conversation that was kept."""

    THERE = "there"
    """The turn goes to the place that keeps it, in time."""
    MOVED = "moved"
    """The turn goes to another place, though in time; the first one is told to forget it."""
    LATE = "late"
    """The turn goes to the place that kept it, after the time for which it was to be kept."""


class KeepForget(enum.StrEnum):
    """The reason for which a place is to forget a conversation before its time."""

    CLIENT = "client"
    """The client asks for no caching."""
    KEY_LIMIT = "key_limit"
    """With this turn its API key would have more tokens kept than it may."""
    NOT_ASKED = "not_asked"
    """Nothing asks for it after this turn."""
    MOVED = "moved"
    """Another place computes its next turn."""
    OPERATOR = "operator"


class KeepTokens(enum.StrEnum):
    """Tokens of kept conversations."""

    KEPT = "kept"
    HIT = "hit"


class Task(enum.StrEnum):
    """The background tasks."""

    HEALTH = "health"
    DISCOVERY = "discovery"
    PROOF = "proof"
    EVENTS = "events"
    SILENCE = "silence"
    FILES = "files"
    SIZING = "sizing"


class SilenceOutcome(enum.StrEnum):
    """The result of probing a node from whose legs nothing comes."""

    ANSWERED = "answered"
    """The node runs, or refused the connection: its legs' deadlines and active health decide, as ever."""
    PROGRESSED = "progressed"
    """Something came for a leg after all, or none is left."""
    LATE = "late"
    """The proxy itself did not run in time, which says nothing of the node."""
    TOO_MANY = "too_many"
    """Too many nodes of its kind would have been out at once."""
    GIVEN_UP = "given_up"
    """Its legs leave at once, and it must join anew."""


class WatchedSetting(enum.StrEnum):
    """The settings whose files are read again when they change."""

    KEYS = "keys.file"
    ADMIN_TOKEN = "listen.admin_token_file"
    CERTIFICATE = "listen.tls_certificate"
    """And its key."""
    CREDENTIAL = "upstream.credential_file"
    AUTHORITIES = "upstream.ca_file"


class FileChange(enum.StrEnum):
    """The result of reading a file that changed."""

    TAKEN = "taken"
    REFUSED = "refused"
    """The file cannot be read or used: what it held before stays in use."""


class Attempt(enum.StrEnum):
    """How an attempt ended: to continue a stream elsewhere, or to release a hand-over."""

    SUCCEEDED = "done"
    FAILED = "failed"


class Move(enum.StrEnum):
    """How a stream went on at another decode node."""

    RESUMED = "resumed"
    """From its journal: the same request, and what was generated for it."""
    RESTARTED = "restarted"
    """From the start: nothing generated had reached the client."""


class Proof(enum.StrEnum):
    """How a known-answer test of a pair of nodes ended."""

    PASSED = "passed"
    """The decode node answered with the hand-over as it answers alone."""
    FAILED = "failed"
    """The node answered something else: the same bytes mean different things on the two nodes."""
    NOT_HANDED_OVER = "not_handed_over"
    """The decode node computed the prompt in spite of its ticket, so that nothing could be compared."""
    UNANSWERED = "unanswered"
    """A node did not answer, or too little of the answer could be compared."""


class Affinity(enum.StrEnum):
    """Whether a leg was planned for the node that its request's session belongs to."""

    OWN = "own"
    NEXT = "next"
    """Another one: its own has no room, has failed this request, or exchanges no ticket with the other leg's node."""
    NONE = "none"
    """The request names no session: it went to the least loaded node."""


class BatchOutcome(enum.StrEnum):
    """The result of a batch of KV events."""

    APPLIED = "applied"
    DUPLICATE = "duplicate"
    """The batch was applied before: a replay brought it too."""
    JUNK = "junk"
    """The batch makes no sense."""


class CacheEventKind(enum.StrEnum):
    """Kinds of KV events."""

    STORED = "stored"
    REMOVED = "removed"
    CLEARED = "cleared"
    IGNORED = "ignored"
    """An event of an unknown type, or of a cache that the node does not compute with."""


class Replay(enum.StrEnum):
    """The result of a replay."""

    COMPLETE = "complete"
    RESTARTED = "restarted"
    """The engine is another one than before: it was replayed from its start."""
    UNANSWERED = "unanswered"


class Forgotten(enum.StrEnum):
    """Why all that was known of a place was forgotten."""

    GAP = "gap"
    """Batches were lost for good."""
    RESTART = "restart"
    JUNK = "junk"
    UNREACHABLE = "unreachable"
    """Its publisher could not be reached for a while."""
    LEFT = "left"
    """Its node left, or joins again."""


class Known(enum.StrEnum):
    """How much is known of what a place has cached."""

    ALL = "all"
    """Everything, from the node's start on."""
    PART = "part"
    """Blocks that were stored since some moment are known; the place may have more."""
    NOTHING = "nothing"


class LookUp(enum.StrEnum):
    """The way in which a prompt was looked up in the index of nodes' KV events."""

    GIVEN = "given"
    """The token ids that the request has."""
    KNOWN = "known"
    """Those of an earlier prompt that begins with the same text."""
    ASKED = "asked"
    """A node was asked for the prompt's, before the plan."""
    NOTHING = "nothing"
    """Nothing: its text is new, and to ask a node would not have paid, or a node would not render it as it renders the
    request: media, truncation, other endpoints."""


class IdsOutcome(enum.StrEnum):
    """The result of asking a node for a prompt's token ids, before its plan or behind it."""

    FETCHED = "fetched"
    """The node rendered the prompt."""
    LATE = "late"
    """The node did not answer in time."""
    FAILED = "failed"
    BUSY = "busy"
    """Too many were being asked for, or the node cannot render prompts."""


class Prediction(enum.StrEnum):
    """The tokens that a node had cached of a prompt that it computed, against the plan."""

    RIGHT = "right"
    """As much, but for a block."""
    LESS = "less"
    """The node has evicted some, restarted, or never had them."""
    MORE = "more"


class SpanOutcome(enum.StrEnum):
    """The fate of a span that was recorded."""

    SENT = "sent"
    """The collector took it."""
    FAILED = "failed"
    """The collector did not take it."""
    DROPPED = "dropped"
    """Too many waited to be sent."""
