"""Why a request is served as it is: the reasons that plans, metrics, log lines and errors give."""

import enum


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


class LocalReason(enum.StrEnum):
    """Why a request is computed on one node alone: every value of ``pdproxy_local_total{reason}``."""

    PROMPT_LOGPROBS = "prompt_logprobs"
    ECHO_LOGPROBS = "echo_logprobs"
    BEAM_SEARCH = "beam_search"
    NO_TOKENS = "no_tokens"
    CHOICES = "choices"
    """More answers are asked for than a hand-over may have readers."""
    OPEN_TRUNCATION = "open_truncation"
    SERVER_TOOLS = "server_tools"
    STORED_PROMPT = "stored_prompt"
    NO_PROMPT = "no_prompt"
    ONE_TOKEN = "one_token"
    CACHED = "cached"
    """The decode node has most of the prompt cached, and computes the rest sooner than a prefill node could."""
    ALONE = "alone"
    """A node of both roles serves the whole request: to hand it over to another one would cost more."""
    ONLY_NODE = "only_node"
    """A node of both roles serves the whole request: there is no other node that could take it over."""
    NO_PREFILL = "no_prefill"
    """No prefill node takes requests now."""
    NO_DECODE = "no_decode"
    """No decode node is left, and a prefill node serves the request (``policy.on_no_decode``)."""
    NO_PAIR = "no_pair"
    """No prefill and decode node are of one cohort."""
    BARRED_PAIR = "barred_pair"
    """All pairs of one cohort are barred: they failed the known-answer test, or their tickets were of no use."""
    PREFILL_FAILED = "prefill_failed"
    """The failure table chose to compute on the decode node."""


class NoNodeReason(enum.StrEnum):
    """Why no plan can be made: the ``code`` of the client's error. The last three stand where the policy forbids to
    compute on the decode node alone."""

    NO_DECODE = "no_decode"
    """No decode node for the model takes requests now (down, draining, joining, refused, on trial)."""
    EXCLUDED = "excluded"
    """All nodes that take requests have failed this one already."""
    NO_PREFILL = LocalReason.NO_PREFILL.value
    NO_PAIR = LocalReason.NO_PAIR.value
    BARRED_PAIR = LocalReason.BARRED_PAIR.value


class KeepReason(enum.StrEnum):
    """Why a node is asked to keep a conversation: every value of ``pdproxy_keeps_asked_total{reason}``."""

    PROMPT_CACHE_RETENTION = "prompt_cache_retention"
    PROMPT_CACHE_OPTIONS = "prompt_cache_options"
    CACHE_CONTROL = "cache_control"
    SESSION = "session"
    """The client names the session, which has just begun."""
    USUAL_PAUSE = "usual_pause"
    """The conversation has come back before, and is likely to do so again after about as long."""


class NotContinuableReason(enum.StrEnum):
    """Why a broken stream cannot be continued on another node; `failures.NOT_RESUMABLE` explains each."""

    NO_JOURNAL = "no_journal"
    PROMPT_LOGPROBS = "prompt_logprobs"
    BEAM_SEARCH = "beam_search"
    SERVER_TOOLS = "server_tools"
    RESPONSE_LOGPROBS = "response_logprobs"
    JOURNAL_SIZE = "journal_size"
    JOURNAL_BROKEN = "journal_broken"
