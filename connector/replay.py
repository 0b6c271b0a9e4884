"""A request that other nodes have begun, given to this node's engine as if it had been preempted here.

`AsyncLLM.generate` runs as it is, on an engine whose core is replaced (`_ReplayingCore`). When the request, or each of
its `n` choices, is registered with the output processor, and before the engine core hears of it, the journal's groups
go through the output processor: detokenizers, stop strings, log-probabilities and the collector stand where they stood,
and the same `RequestOutput`s come out. The endpoint's code gets those first. Then the engine core gets each choice that
has not ended, with an order for the token ids that it already has (`resume_order`).

Log-probabilities of old tokens are not in the journal, and are 0 here: the events that show them are dropped. That is
why a shape that shows them again later is refused (`streams`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from copy import copy
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector, RequestState
from vllm.v1.outputs import LogprobsLists

from .journal import CACHED, BadRecordsError, Group, Output, Record, ReplayError, notes_of
from .resume_order import KEY, sign

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput

GROUPS_AT_ONCE = 32
"""Replayed before others have their turn: some milliseconds. A node that goes on with a long stream serves others."""
REASONS = {str(reason): reason for reason in FinishReason}


class View:
    """An object with some attributes replaced; the others are read from it and written to it."""

    def __init__(self, target: Any, **replaced: Any) -> None:
        self.__dict__.update(replaced, _target=target)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_target"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["_target"], name, value)


class ResumedEngine(View):
    """An `AsyncLLM` for one request that has begun elsewhere.

    The functions are vLLM's own and work on this view; a copy of an `AsyncLLM` would end its engine when it is
    forgotten.
    """

    generate = AsyncLLM.generate
    _add_request = AsyncLLM._add_request

    def __init__(self, engine: Any, records: Sequence[Record], secret: bytes) -> None:
        core = _ReplayingCore(engine, records, secret)
        super().__init__(engine, engine_core=core)

    async def add_request(self, *args: Any, **kwargs: Any) -> _ReplayedFirst:
        """As `AsyncLLM.add_request`; what is replayed stands before what comes."""
        live = await AsyncLLM.add_request(self, *args, **kwargs)
        return _ReplayedFirst(self.engine_core.replayed, live)


class _ReplayedFirst:
    """The part of `RequestOutputCollector` that `AsyncLLM.generate` uses."""

    def __init__(self, replayed: deque[RequestOutput], live: RequestOutputCollector) -> None:
        self._replayed = replayed
        self._live = live
        self.request_id = live.request_id

    def get_nowait(self) -> Any:
        return self._replayed.popleft() if self._replayed else self._live.get_nowait()

    async def get(self) -> Any:
        return await self._live.get()

    def close(self) -> None:
        self._live.close()


class _ReplayingCore(View):
    """The engine's core for this one request. `replayed`: the outputs of the journal, once the request is added."""

    replayed: deque[RequestOutput]

    def __init__(self, engine: Any, records: Sequence[Record], secret: bytes) -> None:
        processor = View(engine.output_processor, tracing_enabled=False)  # a choice that ended is not this node's
        super().__init__(
            engine.engine_core,
            replayed=deque(),
            _processor=processor,
            _records=records,
            _secret=secret,
            _produced=None,
        )

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        """vLLM calls it once for each choice, in order, when all are registered. The engine core knows none of them
        before the replay is over, so that no output of its own can come between."""
        try:
            if self._produced is None:
                choices = _choices(self._processor, request.request_id)
                self.__dict__["_produced"] = await replay(self._processor, choices, self._records, self.replayed)
            if request.request_id in self._processor.request_states:
                await self._target.add_request_async(
                    _ordered(request, self._produced[request.request_id], self._secret)
                )
        except BaseException:
            # A request of one choice stays registered when `AsyncLLM` cannot add it; the others it takes out itself.
            self._processor.abort_requests([request.request_id], internal=True)
            raise


async def replay(
    processor: Any, choices: dict[int, RequestState], records: Sequence[Record], replayed: deque[RequestOutput]
) -> dict[str, list[int]]:
    """Let the groups of `records` go through the output processor; their outputs are appended to `replayed`.

    `choices`: those of one request, registered and without an output. Returns the token ids of each, by its request id.
    Raises ReplayError.
    """
    cached = notes_of(records, CACHED)
    intervals = {index: _before(choice, cached) for index, choice in choices.items()}
    produced: dict[str, list[int]] = {choice.request_id: [] for choice in choices.values()}
    for at, group in enumerate(group for record in records for group in record.groups):
        if at % GROUPS_AT_ONCE == 0:
            await asyncio.sleep(0)
        replayed.append(_output_of(processor, choices, group))
        for output in group:
            produced[choices[output.choice].request_id] += output.token_ids
    for index, choice in choices.items():
        _after(choice, intervals[index])
    return produced


def _choices(processor: OutputProcessor, request_id: str) -> dict[int, RequestState]:
    """The states of all choices of the request that this is one of, by their index."""
    states = processor.request_states
    parent = states[request_id].parent_req
    ids = [request_id] if parent is None else parent.child_requests
    return {states[each].request_index: states[each] for each in ids}


def _before(choice: RequestState, cached: Sequence[Any]) -> int:
    """Every group gives one output, and usage shows the cache of the node that began. Returns the stream interval."""
    interval: int = choice.stream_interval
    choice.stream_interval = 1
    if len(cached) == 2:
        choice.num_cached_tokens, choice.num_cache_creation_tokens = cached
        choice.remote_prefill_cached_tokens = None
    return interval


def _after(choice: RequestState, interval: int) -> None:
    """The interval goes on from the last output; and to statistics, what comes next is a first token."""
    choice.stream_interval = interval
    choice.sent_tokens_offset = choice.detokenizer.num_output_tokens()
    choice.is_prefilling = True


def _output_of(processor: Any, choices: dict[int, RequestState], group: Group) -> RequestOutput:
    OutputProcessor.process_outputs(processor, [_engine_output(choices[each.choice], each) for each in group])
    collected = choices[group[0].choice].queue.get_nowait()
    ended = {each.choice for each in group if choices[each.choice].request_id not in processor.request_states}
    if collected is None or ended != {each.choice for each in group if each.finish_reason is not None}:
        raise ReplayError("a choice does not end where the journal says that it did")
    return collected


def _engine_output(choice: RequestState, output: Output) -> EngineCoreOutput:
    """As the engine core sent it. The end at a stop string is not said: the detokenizer finds it again, and would leave
    the last token out of the text if it were told of an end by a stop token."""
    ended = output.finish_reason is not None and not isinstance(output.stop_reason, str)
    return EngineCoreOutput(
        request_id=choice.request_id,
        new_token_ids=list(output.token_ids),
        new_logprobs=_no_logprobs(output.token_ids) if choice.logprobs_processor.num_logprobs is not None else None,
        finish_reason=REASONS[output.finish_reason] if ended and output.finish_reason else None,
        stop_reason=output.stop_reason if ended else None,
    )


def _no_logprobs(token_ids: Sequence[int]) -> LogprobsLists:
    """0.0 for each sampled token, and no others beside it: shape [tokens, 1]."""
    count = len(token_ids)
    ids = np.asarray(token_ids, dtype=np.int64).reshape(count, 1)
    return LogprobsLists(ids, np.zeros((count, 1), dtype=np.float32), np.ones(count, dtype=np.int64))


def _ordered(request: EngineCoreRequest, token_ids: list[int], secret: bytes) -> EngineCoreRequest:
    """The request with an order for `token_ids`; choices may share their parameters, so these are a copy."""
    if token_ids:
        params = copy(request.sampling_params)
        extra = dict(params.extra_args or {})
        order = {KEY: sign(secret, request.request_id, token_ids)}
        params.extra_args = extra | {"kv_transfer_params": dict(extra.get("kv_transfer_params") or {}) | order}
        request.sampling_params = params
    return request


def check(records: Sequence[Record], params: SamplingParams, vocabulary: int) -> None:
    """Whether a request with these parameters can have produced this. Raises BadRecordsError."""
    produced = [0] * params.n
    ended = [False] * params.n
    for output in (output for record in records for group in record.groups for output in group):
        if output.choice >= params.n:
            raise BadRecordsError(f"choice {output.choice} of {params.n}")
        if ended[output.choice]:
            raise BadRecordsError(f"choice {output.choice} goes on after its end")
        if any(token_id >= vocabulary for token_id in output.token_ids):
            raise BadRecordsError(f"a token id outside of the vocabulary of {vocabulary}")
        produced[output.choice] += len(output.token_ids)
        ended[output.choice] = output.finish_reason is not None
    for count, end in zip(produced, ended, strict=True):
        if params.max_tokens is not None and count + (not end) > params.max_tokens:
            raise BadRecordsError(f"{count} tokens of a choice that may have {params.max_tokens}")
