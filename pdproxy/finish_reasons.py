"""Why an answer ended: read from whole answers and from events of streams, in the shapes of the four endpoints. Pure.

vLLM's finish reasons are ``stop``, ``length``, ``repetition``, ``error`` and ``abort`` (0.32, v1/engine/__init__.py).
An ``error`` becomes an error answer, or an error event; an ``abort`` goes out with status 200, as if the answer were
whole. An engine that is shutting down ends so what it still runs, and each request that arrives then, at once and
without output (``EngineCoreProc._reject_add_in_shutdown``), for its API server listens for up to
``--shutdown-timeout``. `is_aborted` tells such an answer from a whole one:

- completions and chat say ``abort``; a stream without a token ends without any finish reason (the "chunked prefill
  case" of their serving.py), which each choice of a whole one has;
- messages have no stop reason (``_to_anthropic_stop_reason``), which a whole answer of vLLM's always has; a stream
  without a token says ``end_turn``, and that it has none;
- responses say ``completed``, or ``cancelled`` for models with the harmony format. ``completed`` without an output
  token never comes from a model, whose last token counts; with some it cannot be told from a whole answer.
"""

import re

from pdproxy.request import Endpoint, Json

ABORT = "abort"
"""vLLM's finish reason of what a node gave up."""
FINISH_REASON = b'"finish_reason":"'
"""Begins the finish reason of a choice in an event; null is written without the second quote."""
ABORTED = FINISH_REASON + b'abort"'
"""Is in an event with which a node gives a choice up. Like the patterns below it cannot match inside of a JSON string,
where quotes are escaped."""
_FINISHED = re.compile(FINISH_REASON + rb'([^"\\]*)')
_NO_OUTPUT = re.compile(rb'"output_tokens":\s*0\s*[,}]')
_STOPPED = re.compile(rb'"stop_reason":\s*(?:"([^"\\]*)|null)')


def chunk_reasons(data: bytes) -> list[str]:
    """The finish reasons in an event of completions or chat."""
    if data.find(FINISH_REASON) < 0:
        return []
    return [reason.decode("utf-8", "replace") for reason in _FINISHED.findall(data)]


def message_stop_reason(data: bytes) -> str | None:
    """The stop reason in a ``message_delta`` event: ``abort`` for null, or without output; None if it has none."""
    found = _STOPPED.search(data)
    if found is None:
        return None
    return ABORT if found.group(1) is None or _NO_OUTPUT.search(data) else found.group(1).decode("utf-8", "replace")


def whole_reasons(answer: Json) -> list[str]:
    """Why the choices of an answer in one piece ended: finish reasons, Anthropic's stop reason, a response's status."""
    choices = answer.get("choices")
    if isinstance(choices, list):
        reasons = [choice.get("finish_reason") for choice in choices if isinstance(choice, dict)]
    else:
        reasons = [answer.get("stop_reason", answer.get("status"))]
    return [reason for reason in reasons if isinstance(reason, str)]


def is_aborted(endpoint: Endpoint, answer: Json) -> bool:
    """Whether a node, not the model, ended this whole answer, or the response in a stream's last event."""
    match endpoint:
        case Endpoint.MESSAGES:
            return "stop_reason" in answer and answer["stop_reason"] is None
        case Endpoint.RESPONSES:
            usage, status = answer.get("usage"), answer.get("status")
            without_output = isinstance(usage, dict) and usage.get("output_tokens") == 0
            return status == "cancelled" or (status == "completed" and without_output)
        case _:
            return ABORT in whole_reasons(answer)
