"""What a streamed answer has said so far, and what of it the client sees.

Pure. Completions and chat are followed closely; of messages and responses only the end and errors are noticed.
Bytes are passed on untouched where nothing is to be taken out or put right.
"""

import re

from pdproxy.errors import Fault, NodeFault, PdproxyError
from pdproxy.request import Addition, Continuation, Endpoint, Shape
from pdproxy.stream.choice_state import ChoiceState, Diverged
from pdproxy.stream.chunks import Choice, Chunk, data_event, fast_path, parse_object
from pdproxy.stream.rewrite_usage import rewrite_event, rewrite_usage
from pdproxy.stream.sse import Event

DONE = b"[DONE]"
_IDS = re.compile(rb'("(?:prompt_)?token_ids":)\s*\[[\d,\s]*\]')
"""Cannot match inside a JSON string: its quotes would be escaped."""
_FINISH = b'"finish_reason":"'
_STOPPED = re.compile(rb'"stop_reason":\s*"')
ENDS = frozenset({b"message_stop", b"response.completed", b"response.failed", b"response.incomplete"})
CHUNKED = (Endpoint.COMPLETIONS, Endpoint.CHAT)


class NotContinuable(PdproxyError):
    """The stream cannot go on elsewhere. ``reason`` is a word for a metric."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the stream cannot be continued exactly: {reason}")
        self.reason = reason


class Transcript:
    """One streamed answer to one prompt.

    Args:
        endpoint: which API.
        shape: of the request (one prompt).
        cached_tokens: prompt tokens that the prefill node had cached, None where unknown.
    """

    def __init__(self, endpoint: Endpoint, shape: Shape, cached_tokens: int | None = None) -> None:
        self.endpoint = endpoint
        self.shape = shape
        self.cached_tokens = cached_tokens
        self.prompt_token_ids: tuple[int, ...] | None = None
        self.started = False
        """Generated text, ids or events reached the client."""
        self.ended = False
        """The stream's own end was seen; a body that ends without it was cut."""
        self.choices: dict[int, ChoiceState] = {}
        self._broken_by = shape.final_because
        self._strips = Addition.TOKEN_IDS in shape.additions
        self._finishes = 0
        self._first: Chunk | None = None
        self._again = False
        """A second node's stream is being appended."""

    @property
    def finished(self) -> bool:
        """Whether every choice has its finish reason: nothing but usage and the end is missing."""
        return self._finishes >= self.shape.choices

    @property
    def completion_tokens(self) -> int:
        """Tokens produced so far, where their ids are followed."""
        return sum(len(told.tokens) for told in self.choices.values())

    def take(self, event: Event) -> bytes:
        """What the client sees of an event; empty where nothing.

        Raises:
            NodeFault: ERROR_EVENT where the node reports an error (its JSON in ``body``, its code in ``status``),
                INVALID_BODY where an event that must be read is no JSON object.
            NotContinuable: a continuation said something else than the client already has.
        """
        if event.data is None:
            return event.raw
        if self.endpoint not in CHUNKED:
            return self._take_named(event, event.data)
        if event.data == DONE:
            self.ended = True
            return event.raw
        if event.data.startswith(b'{"error"') or event.name == b"error":
            raise _reported(event.data)
        return self._take_chunk(event, event.data)

    def take_plain(self, raw: bytes) -> bytes | None:
        """As `take`, if these bytes are one of the events that nearly all are; else None, and nothing has happened."""
        if not self.started or self._again or not self._strips or self.ended:
            return None
        said = fast_path(raw)
        if said is None:
            return None
        told = self.choices.get(said.choice) or self._told(said.choice)
        told.hear(said.text, said.token_ids)  # only what is continued can diverge, and that is never plain
        return raw[: said.ids_from] + b"null" + raw[said.ids_to :]

    def continuation(self) -> Continuation:
        """From where the stream can go on.

        Raises:
            NotContinuable: for the request's own reason, or for what the stream said so far.
        """
        if self._broken_by is not None:
            raise NotContinuable(self._broken_by)
        if self.prompt_token_ids is None:
            raise NotContinuable("no_token_ids")
        told = self.choices.get(0, ChoiceState())
        count, known = told.boundary()
        if count < len(told.tokens) and told.detailed:
            raise NotContinuable("token_details")
        forced = "" if self.shape.greedy else known
        return Continuation(self.prompt_token_ids, tuple(told.tokens[:count]), len(known), forced)

    def resume(self) -> None:
        """The next events come from the request that `continuation` described."""
        self._again = self._first is not None
        for told in self.choices.values():
            told.rewind()

    def restart(self) -> None:
        """The next events come from the same request, asked again. Only while not `started`."""
        self._again = self._first is not None
        self.prompt_token_ids = None
        self.choices.clear()

    def ending(self) -> bytes:
        """The end of a stream that broke after it `finished`: usage where it was asked for, and the end."""
        if self.endpoint is Endpoint.MESSAGES:
            return data_event({"type": "message_stop"}, b"message_stop")
        if self.endpoint not in CHUNKED or self._first is None:
            return b""
        usage = self._first.usage_event(self._usage({}, final=True)) if Addition.USAGE in self.shape.asked else b""
        return usage + b"data: " + DONE + b"\n\n"

    def _take_named(self, event: Event, data: bytes) -> bytes:
        if event.name == b"error":
            raise _reported(data)
        self.started = True
        self.ended = self.ended or event.name in ENDS
        if event.name == b"message_delta" and _STOPPED.search(data):
            self._finishes = self.shape.choices
        return rewrite_event(self.endpoint, event, data, self.cached_tokens)

    def _take_chunk(self, event: Event, data: bytes) -> bytes:
        seen = self.take_plain(event.raw)
        if seen is not None:
            return seen
        if self._again or self.shape.continuable:
            return self._follow(event, Chunk(self.endpoint, parse_object(data)))
        if not self.started:
            self._begin(Chunk(self.endpoint, parse_object(data)))
        self._finishes += data.count(_FINISH)
        return rewrite_event(self.endpoint, event, data, self.cached_tokens)

    def _told(self, choice: int) -> ChoiceState:
        told = self.choices.get(choice)
        if told is None:
            told = self.choices[choice] = ChoiceState(self.shape.held_back)
        return told

    def _begin(self, chunk: Chunk) -> None:
        self._first = self._first or chunk
        self.started = any(choice.says for choice in chunk.choices)

    def _follow(self, event: Event, chunk: Chunk) -> bytes:
        self._first = self._first or chunk
        if chunk.prompt_token_ids is not None and self.prompt_token_ids is None:
            self.prompt_token_ids = chunk.prompt_token_ids
        visible = [self._hear(choice) for choice in chunk.choices]
        if self._again:
            return self._rewritten(chunk, self._first, any(visible))
        if chunk.empty and self._strips:
            return b""  # sent only because of the ids that we asked for
        fixed = rewrite_event(self.endpoint, event, event.data or b"", self.cached_tokens)
        return _IDS.sub(rb"\1null", fixed) if self._strips else fixed

    def _hear(self, choice: Choice) -> bool:
        """Take what one choice said; whether anything of it is new to the client."""
        told = self._told(choice.index)
        ids = choice.token_ids or []
        self._judge(choice)
        detail = choice.logprobs is not None or (bool(ids) and Addition.TOKEN_IDS in self.shape.asked)
        told.detailed = told.detailed or detail
        told.next_offset = choice.shift_offsets(told.base_offset) or told.next_offset
        self.started = self.started or choice.says
        new = self._new_text(told, choice.text, ids)
        if self._again:
            choice.put_text(new)
        self._finish(told, choice.finish)
        return bool(new or choice.finish or choice.parsed or detail)

    def _judge(self, choice: Choice) -> None:
        lost = "no_token_ids" if choice.text and choice.token_ids is None else None
        self._broken_by = self._broken_by or choice.parsed or lost

    def _new_text(self, told: ChoiceState, text: str, ids: list[int]) -> str:
        try:
            return told.hear(text, ids)
        except Diverged as error:
            raise NotContinuable("diverged") from error

    def _finish(self, told: ChoiceState, finish: str | None) -> None:
        if finish is None:
            return
        if not told.settled():
            raise NotContinuable("diverged")
        told.finish = finish
        self._finishes += 1

    def _rewritten(self, chunk: Chunk, first: Chunk, visible: bool) -> bytes:
        """A second node's event as part of the answer that began elsewhere."""
        if not visible and (chunk.choices or chunk.usage is None):
            return b""
        chunk.adopt(first)
        chunk.forget_prompt()
        if Addition.TOKEN_IDS not in self.shape.asked:
            chunk.forget_ids()
        if chunk.usage is not None:
            chunk.payload["usage"] = self._usage(chunk.usage, final=not chunk.choices)
        return chunk.encode()

    def _usage(self, told: dict[str, object], *, final: bool) -> dict[str, object]:
        """Usage over all nodes that had a part in the answer."""
        usage = dict(told)
        if self.prompt_token_ids is not None:
            prompt, completion = len(self.prompt_token_ids), self.completion_tokens
            usage |= {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}
        if final and self.cached_tokens is not None:
            usage = rewrite_usage(self.endpoint, usage, self.cached_tokens)
        return usage


def _reported(data: bytes) -> NodeFault:
    payload = parse_object(data)
    error = payload.get("error")
    code = (error if isinstance(error, dict) else payload).get("code")
    status = code if isinstance(code, int) and 400 <= code < 600 else None
    return NodeFault(Fault.ERROR_EVENT, "the node reported an error in its stream", status=status, body=data)
