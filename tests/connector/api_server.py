"""vLLM's API server in this process, on an engine core that says what a test tells it to.

All of it is vLLM's own: the app with its routers and error handlers, serving objects, parsers, `AsyncLLM` with its
output processor and detokenizers, and the tiny model's tokenizer. Only the engine core is played here.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
from fastapi import FastAPI
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.reasoning import ReasoningParserManager
from vllm.reasoning.basic_parsers import BaseThinkingReasoningParser
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.outputs import LogprobsLists

from connector.resume_order import verify
from tests.connector.harness import MODEL

SECRET = "0123456789abcdef" * 2
END, PAD, SYSTEM = 1, 0, 2
"""The model's end of a turn; and what stands here for the end and the start of its reasoning."""


class PadReasoningParser(BaseThinkingReasoningParser):
    """Reasoning ends with <|pad|>, which a prompt of the tiny model never has."""

    start_token = "<|system|>"
    end_token = "<|pad|>"


@dataclass
class Said:
    """A request in the engine core; `token_ids` so far."""

    request: EngineCoreRequest
    script: Sequence[int]
    token_ids: list[int]
    resumed: bool

    def over(self) -> bool:
        return self.finish_reason is not None

    @property
    def finish_reason(self) -> FinishReason | None:
        params = self.request.sampling_params
        last = self.token_ids[-1] if self.token_ids else None
        if last is not None and (last == END or last in (params.stop_token_ids or ())):
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.token_ids) >= params.max_tokens else None

    @property
    def stop_reason(self) -> int | None:
        last = self.token_ids[-1]
        return last if self.finish_reason is FinishReason.STOP and last != END else None


@dataclass
class FakeCore:
    """An engine core whose every choice says its script, a few tokens a step; `cached`: prompt tokens from a cache.

    `steps`: how many tokens each further step has. `merged`: steps that the output handler gets at once. `fail_after`,
    `silent_after`: so many tokens. `pause`: a sixth of the time before a step, in seconds.
    """

    scripts: Sequence[Sequence[int]] = ()
    steps: Sequence[int] = (1,)
    merged: int = 1
    cached: int = 0
    fail_after: int | None = None
    failure: FinishReason = FinishReason.ERROR
    silent_after: int | None = None
    pause: float = 0.0
    running: dict[str, Said] = field(default_factory=dict)
    added: list[EngineCoreRequest] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    rejected: int = 0
    emitted: int = 0
    resources: Any = field(default_factory=lambda: SimpleNamespace(engine_dead=False))
    engine_ranks_managed: Sequence[int] = (0,)
    wake: asyncio.Event = field(default_factory=asyncio.Event)

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        return ("generate",)

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        if request.abort_immediately:
            self.rejected += 1
            return
        params = (request.sampling_params.extra_args or {}).get("kv_transfer_params")
        ids = verify(SECRET.encode(), request.request_id, params)
        assert ids is None or isinstance(ids, list), ids
        index, _, rest = request.request_id.partition("_")
        script = self.scripts[int(index) if rest and index.isdecimal() else 0]
        assert list(script[: len(ids or ())]) == list(ids or ())
        self.added.append(request)
        self.running[request.request_id] = Said(request, script, list(ids or ()), ids is not None)
        self.wake.set()

    async def abort_requests_async(self, request_ids: Sequence[str]) -> None:
        self.aborted += request_ids
        for request_id in request_ids:
            self.running.pop(request_id, None)

    async def get_output_async(self) -> EngineCoreOutputs:
        while not self.running:
            self.wake.clear()
            await self.wake.wait()
        for _ in range(6):
            await asyncio.sleep(self.pause)  # the readers of the last step come first
        steps = [self._step(said) for _ in range(self.merged) for said in list(self.running.values())]
        return EngineCoreOutputs(outputs=[each for each in steps if each is not None])

    def _step(self, said: Said) -> EngineCoreOutput | None:
        at, params = len(said.token_ids), said.request.sampling_params
        if said.over() or (self.silent_after is not None and at >= self.silent_after):
            self.pause = 0.001
            return None
        if self.fail_after is not None and at >= self.fail_after:
            del self.running[said.request.request_id]
            return EngineCoreOutput(said.request.request_id, [], finish_reason=self.failure)
        new: list[int] = []
        for token_id in said.script[at : at + self._size(at)]:
            if not said.over():
                new.append(token_id)
                said.token_ids.append(token_id)
        if said.over():
            del self.running[said.request.request_id]
        self.emitted += len(new)
        stats = PrefillStats()
        stats.set(4096, self.cached, 0)
        return EngineCoreOutput(
            said.request.request_id,
            new,
            new_logprobs=logprobs(at, new, params.logprobs) if params.logprobs is not None else None,
            finish_reason=said.finish_reason,
            stop_reason=said.stop_reason,
            prefill_stats=None if at or said.resumed else stats,
        )

    def _size(self, at: int) -> int:
        """The size of the step that begins at this token, whichever node takes it."""
        ends = itertools.accumulate(itertools.cycle(self.steps))
        return next(end for end in ends if end > at) - at

    def shutdown(self, timeout: float | None = None) -> None:
        """Nothing runs."""


def logprobs(at: int, token_ids: Sequence[int], width: int) -> LogprobsLists:
    """Log-probabilities as a model might give them: different at every position."""
    ids = [[token_id, *range(5, 5 + width)] for token_id in token_ids]
    values = [[-0.25 * ((at + row) % 9 + column) for column in range(width + 1)] for row in range(len(token_ids))]
    return LogprobsLists(np.array(ids), np.array(values, dtype=np.float32), np.ones(len(token_ids), dtype=np.int64))


@dataclass
class ApiServer:
    """One node's API server; its core is replaced for every test."""

    app: FastAPI
    engine: Any

    @asynccontextmanager
    async def on(self, core: FakeCore) -> AsyncIterator[httpx.AsyncClient]:
        """A client, while `core` is the engine's."""
        self.engine.engine_core = core
        transport = httpx.ASGITransport(self.app)
        try:
            async with httpx.AsyncClient(transport=transport, base_url="http://node") as client:
                yield client
            assert not self.engine.output_processor.request_states
            assert not self.engine.output_processor.parent_requests
        finally:
            handler, self.engine.output_handler = self.engine.output_handler, None
            if handler is not None:
                handler.cancel()

    def ids_of(self, text: str) -> list[int]:
        """Ids of the tiny model's tokenizer."""
        ids: list[int] = self.engine.renderer.tokenizer.encode(text, add_special_tokens=False)
        return ids


@contextmanager
def api_server(*arguments: str) -> Iterator[ApiServer]:
    """A decode node's API server with these options of vLLM's."""
    transfer = {"kv_connector": "NixlConnector", "kv_role": "kv_consumer", "kv_load_failure_policy": "recompute"}
    line = ["--model", str(MODEL), "--served-model-name", "tiny", "--kv-transfer-config", json.dumps(transfer)]
    line += ["--max-model-len", "4096", "--dtype", "bfloat16", "--enable-prompt-tokens-details", *arguments]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_PLUGINS", "pdproxy_endpoints")
        patch.setenv("PDPROXY_NODE_SECRET", SECRET)
        patch.setattr(EngineCoreClient, "make_async_mp_client", lambda **_: FakeCore())
        args = make_arg_parser(FlexibleArgumentParser()).parse_args(line)
        engine = AsyncLLM.from_vllm_config(AsyncEngineArgs.from_cli_args(args).create_engine_config())
        app = build_app(args, ("generate",), engine.model_config)
        asyncio.run(init_app_state(engine, app.state, args, ("generate",)))
        yield ApiServer(app, engine)
        engine.shutdown()


def register_parsers() -> None:
    """Make this file's parsers known to vLLM."""
    ReasoningParserManager.register_module(name="pad", force=True, module=PadReasoningParser)


def ticking(start: int) -> Any:
    """In the place of the module `time`: a second passes with each question."""
    ticks = itertools.count(start)
    clock: Callable[[], float] = lambda: float(next(ticks))  # noqa: E731
    return SimpleNamespace(time=clock, monotonic=clock)
