"""The words for why a request was not disaggregated, or could not be continued: a closed set, for labels."""

import enum


class Why(enum.StrEnum):
    """Reasons, from the body's shape, the plan, the stream and us."""

    NONE = "none"
    OTHER = "other"
    SHORT_PROMPT = "short_prompt"
    NO_PREFILL = "no_prefill"
    NO_PAIR = "no_pair"
    BARRED_PAIR = "barred_pair"
    PREFILL_FAILED = "prefill_failed"
    PROMPT_LOGPROBS = "prompt_logprobs"
    ECHO_LOGPROBS = "echo_logprobs"
    BEAM_SEARCH = "beam_search"
    NO_TOKENS = "no_tokens"
    SERVER_TOOLS = "server_tools"
    STORED_PROMPT = "stored_prompt"
    NO_PROMPT = "no_prompt"
    ONE_TOKEN = "one_token"
    MESSAGES = "messages"
    RESPONSES = "responses"
    CHOICES = "choices"
    PENALTIES = "penalties"
    BAD_WORDS = "bad_words"
    REASONING = "reasoning"
    REPETITION_DETECTION = "repetition_detection"
    WATERMARKING = "watermarking"
    STRUCTURED_OUTPUT = "structured_output"
    ECHO = "echo"
    TOOL_CALLS = "tool_calls"
    MEDIA = "media"
    STOP_STRINGS = "stop_strings"
    TOKEN_DETAILS = "token_details"
    NO_TOKEN_IDS = "no_token_ids"
    DIVERGED = "diverged"

    @classmethod
    def of(cls, word: str | None) -> "Why":
        """The member for a word; OTHER for one that is not known here."""
        if word is None:
            return cls.NONE
        return cls._value2member_map_.get(word, cls.OTHER)  # type: ignore[return-value]
