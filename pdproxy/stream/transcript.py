"""What a client has of a streamed answer so far, and what of each further event it may see. Pure.

Completions and chat are followed token by token, unless their journal is kept; of messages and responses, and of
streams with a journal, only the end and errors are noticed. Bytes are passed on untouched where nothing has to be taken
out or corrected. Why ``find`` and not ``in``: see `chunks`.
"""

import collections
import functools
from array import array
from collections.abc import Callable
from typing import NamedTuple

from pdproxy.errors import Fault, NodeFault
from pdproxy.finish_reasons import ABORT, ABORTED, chunk_reasons, is_aborted, message_stop_reason
from pdproxy.raw_json import IdList
from pdproxy.request import Addition, Continuation, Endpoint, LegForm, NotContinuableReason, Shape, StreamRoute
from pdproxy.stream.choice_state import ChoiceState, NotContinuable
from pdproxy.stream.chunks import (
    DONE,
    DONE_EVENT,
    FINAL_EVENTS,
    TICKET_KEY,
    Chunk,
    ChunkChoice,
    EventFrame,
    data_event,
    fast_path,
    parse_object,
    rewrite_event,
    without_ids,
)
from pdproxy.stream.sse import Event
from pdproxy.usage import Usage, with_cached_tokens

LAST_EVENTS = frozenset({b"message_stop", b"response.completed", b"response.failed", b"response.incomplete"})
CHUNKED = (Endpoint.COMPLETIONS, Endpoint.CHAT)
"""Endpoints whose streams consist of chunks with token ids."""
_LOOKED_AT = LAST_EVENTS | FINAL_EVENTS | {b"error"}
"""Names of events that are not passed on unseen."""


_NOT_FINISHED = b'"finish_reason":null'
"""Is in each chunk of one choice that goes on; a chunk without it is parsed."""


class Checkpoint(NamedTuple):
    """What `Transcript.rollback` restores."""

    started: bool
    ended: bool
    finishes: int
    reasons: int


class Transcript:
    """One streamed answer to one prompt; ``cached_tokens`` are the prompt tokens that the prefill node had cached."""

    def __init__(self, endpoint: Endpoint, shape: Shape, cached_tokens: int | None = None) -> None:
        self.endpoint = endpoint
        self.shape = shape
        self.cached_tokens = cached_tokens
        self.prompt_token_ids: array[int] | IdList | None = None
        self.started = False
        """Generated text, ids or events reached the client."""
        self.ended = False
        """The stream's own end was seen; a body that ends without it was cut."""
        self.finish_reasons: list[str] = []
        """Why choices ended, in the order in which they did; of a response its final status."""
        self.choices = collections.defaultdict[int, ChoiceState](functools.partial(ChoiceState, shape.held_back))
        self._not_continuable = shape.not_continuable
        self._follows = shape.continuable
        self._strips = Addition.TOKEN_IDS in shape.additions
        self._finishes = 0
        self._first: Chunk | None = None
        self._frame: EventFrame | None = None
        """Of the last event that the fast path read by its pattern."""
        self._again = False
        """A second node's stream is being appended."""

    def begin_leg(self, form: LegForm, *, may_move: bool = True) -> None:
        """The next events are the answer to a leg of this form: by that they have token ids to follow, or not. Those
        that the client asked for itself are followed where the stream may move."""
        self._strips = Addition.TOKEN_IDS in form.additions
        asked = may_move and self.shape.continuable and Addition.TOKEN_IDS in self.shape.asked
        self._follows = self._strips or (asked and form.route is StreamRoute.ENDPOINT)

    def checkpoint(self) -> Checkpoint:
        """For `rollback`, should the next events turn out not to count: where token ids are not followed."""
        return Checkpoint(self.started, self.ended, self._finishes, len(self.finish_reasons))

    def rollback(self, checkpoint: Checkpoint) -> None:
        """The events since then did not reach the client."""
        self.started, self.ended, self._finishes, reasons = checkpoint
        del self.finish_reasons[reasons:]

    @property
    def finished(self) -> bool:
        """Whether every choice has its finish reason: nothing but usage and the end is missing."""
        return self._finishes >= self.shape.choices

    @property
    def ending_known(self) -> bool:
        """Whether `ending` is all that a stream that has `finished` lacks: of usage, only where ids were followed."""
        asked = self.endpoint in CHUNKED and Addition.USAGE in self.shape.asked
        return not asked or self.prompt_token_ids is not None

    @property
    def completion_tokens(self) -> int:
        """Tokens produced so far, where their ids are followed."""
        return sum(len(choice.tokens) for choice in self.choices.values())

    def usage_so_far(self) -> Usage | None:
        """What a client is to be told of an answer that several nodes had a part in, where token ids are followed."""
        if not self._again or self.prompt_token_ids is None:
            return None
        return Usage(len(self.prompt_token_ids), self.completion_tokens, self.cached_tokens)

    def take(self, event: Event) -> bytes:
        """What the client sees of an event, read by `chunks.short_event_of`; empty where nothing.

        Raises:
            NodeFault: an error that the node reports, its JSON in ``body``, its code in ``status``: CLIENT_ERROR for a
                4xx, else ERROR_EVENT. ABORTED where it gives the answer up. INVALID_BODY where an event that must be
                read is no JSON object.
            NotContinuable: a continuation is not what the client already has.
        """
        if event.data is None:
            return event.raw
        if self.endpoint not in CHUNKED:
            return self._take_named(event, event.data)
        if event.data == DONE:
            if not self._finishes:
                raise _aborted()
            self.ended = True
            return event.raw
        if event.name == b"error" or _has_error(event.data):
            raise _reported_error(event.data)
        return self._take_chunk(event, event.data)

    @property
    def take_fast_path(self) -> Callable[[bytes], bytes | None]:
        """As `take`, of this leg's bytes if they are one event that needs no parser; else None, and nothing changes."""
        return self._take_without_ids if self._strips else self._take_unchanged

    def _take_without_ids(self, raw: bytes) -> bytes | None:
        if not self.started or self._again or self.ended:
            return None
        frame = self._frame
        token = None if frame is None else frame.read(raw)
        if frame is None or token is None:
            return self._take_by_pattern(raw)
        text, token_id, text_to = token
        self.choices[frame.choice].append(text, [token_id])
        return raw[:text_to] + frame.rest

    def _take_by_pattern(self, raw: bytes) -> bytes | None:
        event = fast_path(raw)
        if event is None:
            return None
        self._frame = EventFrame.of(raw, event)
        # Never diverges: that needs a continuation, which is excluded above.
        self.choices[event.choice].append(event.text, event.token_ids)
        return raw[: event.ids_from] + b"null" + raw[event.ids_to :]

    def _take_unchanged(self, raw: bytes) -> bytes | None:
        """One event that goes on as it is, and changes nothing here.

        No pattern can match inside a JSON string: quotes are escaped there, and line ends too.
        """
        if not self.started or self._again or self.ended or self._follows:
            return None
        if raw.find(b'"usage"') >= 0 or raw.find(TICKET_KEY) >= 0 or not raw.endswith(b"}\n\n") or raw.find(b"\r") >= 0:
            return None
        line, end = raw.find(b"\n"), len(raw) - 2
        if self.endpoint in CHUNKED:
            plain = line == end and raw.startswith(b'data: {"id":') and raw.find(_NOT_FINISHED) >= 0
        else:
            named = raw.startswith(b"event: ") and raw[7:line] not in _LOOKED_AT
            plain = named and raw.startswith(b"\ndata: {", line) and raw.find(b"\n", line + 1) == end
        return raw if plain else None

    @property
    def may_be_continued(self) -> bool:
        """Whether nothing excludes a `continuation` for good."""
        return self._not_continuable is None

    def continuation(self) -> Continuation:
        """The point from which the stream can be continued.

        Raises:
            NotContinuable: for the request's own reason, or for what the stream contained so far.
        """
        if self._not_continuable is not None:
            raise NotContinuable(self._not_continuable)
        if self.prompt_token_ids is None:
            raise NotContinuable(NotContinuableReason.NO_TOKEN_IDS)
        choice = self.choices.get(0, ChoiceState())
        count, known = choice.boundary()
        if count < len(choice.tokens) and choice.detailed:
            raise NotContinuable(NotContinuableReason.TOKEN_DETAILS)
        return Continuation(self.prompt_token_ids, tuple(choice.tokens[:count]), "" if self.shape.greedy else known)

    def resume(self) -> None:
        """The next events come from the request that `continuation` described."""
        self._again = self._first is not None
        for choice in self.choices.values():
            choice.rewind()

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
        if Addition.USAGE not in self.shape.asked or not self.ending_known:
            return DONE_EVENT
        return self._first.usage_event(self._usage({}, final=True)) + DONE_EVENT

    def _take_named(self, event: Event, data: bytes) -> bytes:
        if event.name == b"error":
            raise _reported_error(data)
        if self._is_aborted(event, data):
            raise _aborted()
        self.started = True
        if event.name in LAST_EVENTS:
            self.ended = True
            if self.endpoint is Endpoint.RESPONSES:
                self.finish_reasons = [event.name.partition(b".")[2].decode("ascii")]
        elif event.name == b"message_delta" and (reason := message_stop_reason(data)):
            self._finishes = self.shape.choices
            self.finish_reasons = [reason]
        return rewrite_event(self.endpoint, event, data, self.cached_tokens)

    def _is_aborted(self, event: Event, data: bytes) -> bool:
        if self.endpoint is Endpoint.MESSAGES:
            return event.name == b"message_delta" and message_stop_reason(data) == ABORT
        if event.name != b"response.completed":
            return False
        response = parse_object(data).get("response")
        return isinstance(response, dict) and is_aborted(self.endpoint, response)

    def _take_chunk(self, event: Event, data: bytes) -> bytes:
        seen = self.take_fast_path(event.raw)
        if seen is not None:
            return seen
        if data.find(ABORTED) >= 0:
            raise _aborted()
        if self._again or self._follows:
            return self._follow_event(event, data)
        if not self.started:
            chunk = Chunk(self.endpoint, parse_object(data))
            self._first = self._first or chunk.head()
            self.started = any(choice.has_output for choice in chunk.choices)
        if reasons := chunk_reasons(data):
            self._finishes += len(reasons)
            self.finish_reasons += reasons
        return rewrite_event(self.endpoint, event, data, self.cached_tokens)

    def _follow_event(self, event: Event, data: bytes) -> bytes:
        if event.prompt_ids is not None:
            if self.prompt_token_ids is None:
                self.prompt_token_ids = event.prompt_ids
            if self._strips:
                event = Event(b"data: %b\n\n" % data, event.name, data)
        return self._follow(event, Chunk(self.endpoint, parse_object(data)))

    def _follow(self, event: Event, chunk: Chunk) -> bytes:
        self._first = self._first or chunk.head()
        ids = chunk.take_prompt_token_ids()
        if self.prompt_token_ids is None:
            self.prompt_token_ids = ids
        visible = [self._follow_choice(choice) for choice in chunk.choices]
        if self._again:
            return self._adopted(chunk, self._first, any(visible))
        if chunk.empty and self._strips:
            return b""  # sent only because of the ids that we asked for
        seen = rewrite_event(self.endpoint, event, event.data or b"", self.cached_tokens)
        return without_ids(seen) if self._strips else seen

    def _follow_choice(self, chunk_choice: ChunkChoice) -> bool:
        """Take one choice of a chunk; whether anything of it is new to the client."""
        choice, ids = self.choices[chunk_choice.index], chunk_choice.token_ids or []
        lost_ids = self._follows and bool(chunk_choice.text) and chunk_choice.token_ids is None
        no_ids = NotContinuableReason.NO_TOKEN_IDS if lost_ids else None
        self._not_continuable = self._not_continuable or chunk_choice.parsed or no_ids
        detail = chunk_choice.logprobs is not None or (bool(ids) and Addition.TOKEN_IDS in self.shape.asked)
        choice.detailed = choice.detailed or detail
        choice.next_offset = chunk_choice.shift_offsets(choice.base_offset) or choice.next_offset
        self.started = self.started or chunk_choice.has_output
        new = choice.append(chunk_choice.text, ids)
        if self._again:
            chunk_choice.put_text(new)
        if chunk_choice.finish is not None:
            if not choice.caught_up():
                raise NotContinuable(NotContinuableReason.DIVERGED)
            self._finishes += 1
            self.finish_reasons.append(chunk_choice.finish)
        return bool(new or chunk_choice.finish or chunk_choice.parsed or detail)

    def _adopted(self, chunk: Chunk, first: Chunk, visible: bool) -> bytes:
        """A second node's event as part of the answer that began elsewhere."""
        if not visible and (chunk.choices or chunk.usage is None):
            return b""
        chunk.adopt(first)
        if Addition.TOKEN_IDS not in self.shape.asked:
            chunk.drop_token_ids()
        if chunk.usage is not None:
            chunk.payload["usage"] = self._usage(chunk.usage, final=not chunk.choices)
        return chunk.encode()

    def _usage(self, reported: dict[str, object], *, final: bool) -> dict[str, object]:
        """Usage over all nodes that had a part in the answer."""
        usage = dict(reported)
        if self.prompt_token_ids is not None:
            prompt, completion = len(self.prompt_token_ids), self.completion_tokens
            usage |= {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}
        if final and self.cached_tokens is not None:
            usage = with_cached_tokens(self.endpoint, usage, self.cached_tokens)
        return usage


def _has_error(data: bytes) -> bool:
    """Whether an event of completions or chat reports an error: it has one, and no choices."""
    if data.startswith(b'{"error"'):
        return True
    return data.find(b'"choices":') < 0 and data.find(b'"error":') >= 0 and bool(parse_object(data).get("error"))


def _aborted() -> NodeFault:
    return NodeFault(Fault.ABORTED, "the node gave the answer up")


def _reported_error(data: bytes) -> NodeFault:
    payload = parse_object(data)
    error = payload.get("error")
    code = (error if isinstance(error, dict) else payload).get("code")
    status = code if isinstance(code, int) and 400 <= code < 600 else None
    fault = Fault.CLIENT_ERROR if status is not None and status < 500 else Fault.ERROR_EVENT
    return NodeFault(fault, "the node reported an error in its stream", status=status, body=data)
