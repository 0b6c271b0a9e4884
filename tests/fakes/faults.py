"""Faults of a fake node: what it does wrong, when, and what it then writes."""

import dataclasses
import enum
import json

from tests.fakes.vllm_answers import data_event, error, named_event


class FaultKind(enum.StrEnum):
    """How a leg goes wrong."""

    REFUSE = "refuse"
    """No connection."""
    RESET = "reset"
    """The connection breaks: before the head, or after `at` events."""
    HANG = "hang"
    """No head, ever."""
    STALL = "stall"
    """Nothing more after `at` events (0: after the head)."""
    STATUS = "status"
    """An error answer with `status`."""
    GARBAGE = "garbage"
    """A 200 whose body is not what it should be, from event `at` on."""
    NO_TICKET = "no_ticket"
    """A prefill answer without kv_transfer_params."""
    ABORT = "abort"
    """A 200 whose answer the node gives up: whole ones are empty, streams end after `at` events as if complete."""
    ERROR_EVENT = "error_event"
    """An error inside a 200 stream after `at` events."""
    SHORT = "short"
    """The body ends properly after `at` events, without its last ones."""


@dataclasses.dataclass(frozen=True, slots=True)
class InjectedFault:
    """One fault.

    Attributes:
        at: events of the body that still arrive; -1: not even the head.
        status: for STATUS.
        headers: for STATUS.
        byte: where the body is cut, in the place of `at`; -1: nowhere.
        times: how many legs it affects.
    """

    kind: FaultKind
    at: int = -1
    status: int = 500
    headers: tuple[tuple[str, str], ...] = ()
    times: int = 1 << 30
    byte: int = -1


QUICK_FAULTS = {
    "reset": InjectedFault(FaultKind.RESET),
    "reset-in-body": InjectedFault(FaultKind.RESET, at=2),
    "400": InjectedFault(FaultKind.STATUS, status=400),
    "429": InjectedFault(FaultKind.STATUS, status=429),
    "500": InjectedFault(FaultKind.STATUS, status=500),
    "garbage": InjectedFault(FaultKind.GARBAGE, at=2),
    "short": InjectedFault(FaultKind.SHORT, at=2),
    "aborted": InjectedFault(FaultKind.ABORT, at=2),
    "error-event": InjectedFault(FaultKind.ERROR_EVENT, at=2),
    "no-ticket": InjectedFault(FaultKind.NO_TICKET),
}
"""Faults that the proxy notices without waiting, by a name for the test."""

FIRST_TOKENS = 2
"""Events from which on an answer has tokens, whatever the endpoint."""


def error_events(path: str, status: int, message: str) -> tuple[bytes, ...]:
    """How a node ends a stream that failed."""
    if path in ("/v1/messages", "/v1/responses"):
        return (b"event: error\ndata: " + error(status, message) + b"\n\n",)
    return (b"data: " + error(status, message) + b"\n\n", b"data: [DONE]\n\n")


def aborted_events(path: str, before: int) -> tuple[bytes, ...]:
    """How a stream ends that the engine gives up: with status 200, and not another word about it.

    ``before``: events that came before; of the first token's, vLLM leaves out that it ended.
    """
    match path:
        case "/v1/completions" | "/v1/chat/completions" if before < FIRST_TOKENS:
            return (b"data: [DONE]\n\n",)
        case "/v1/messages" if before < FIRST_TOKENS:
            begun = named_event("message_start", {"type": "message_start", "message": {"usage": {"output_tokens": 0}}})
            stopped = {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 0}}
            ending = (named_event("message_delta", stopped), named_event("message_stop", {"type": "message_stop"}))
            return ending if before else (begun, *ending)
        case "/v1/messages":
            stopped = {"type": "message_delta", "delta": {"stop_reason": None, "stop_sequence": None}}
            return (named_event("message_delta", stopped), named_event("message_stop", {"type": "message_stop"}))
        case "/v1/responses":
            ended = {"type": "response.completed", "response": {"status": "completed", "usage": {"output_tokens": 0}}}
            return (named_event("response.completed", ended),)
        case _:
            choice = {"index": 0, "delta": {"content": ""}, "text": "", "finish_reason": "abort", "token_ids": []}
            head = {"id": "aborted", "object": "", "created": 1, "model": "m"}
            return (data_event({**head, "choices": [choice]}), b"data: [DONE]\n\n")


def aborted_answer(whole: bytes) -> bytes:
    """The same in one piece: nothing was generated."""
    given = json.loads(whole)
    for choice in given.get("choices", ()):
        choice |= {"finish_reason": "abort", "text": ""} | ({"message": {}} if "message" in choice else {})
    if "stop_reason" in given:
        given |= {"stop_reason": None, "content": []}
    if "output" in given:
        given |= {"output": [], "usage": {**given["usage"], "output_tokens": 0}}
    return json.dumps({**given, "kv_transfer_params": None}).encode()
