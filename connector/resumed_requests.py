"""Requests that go on where another node stopped: resume orders carried out, in the scheduler's process.

    Scheduler.add_request (wrapped by `nixl_connector`) ─► carry_out_order    the order leaves the params before any
        connector sees them, and before the request is queued: so it is carried out once, with any number of connectors
        ├── good     the request has output tokens, as if it had produced them and had then been preempted
        └── refused  the request waits for a grammar whose compilation has failed: vLLM ends it with an error
    schedule ─ build_connector_meta ─► tell_workers    the first step that computes the request

Prompt and ticket stay those of the original request. vLLM counts what a request may still produce, and what its
penalties, stop conditions and minimum length depend on, by its output tokens, of which it has these.

A grammar is at its start when it is compiled. It takes the tokens in one by one, as it did on the node that produced
them, in the thread pool in which grammars are compiled: 3,500 tokens of a regular expression took 25 ms on a CPU, in
which the engine's thread would run nobody's request. vLLM schedules no request whose grammar is not complete. A grammar
that does not accept the tokens has failed, as one that does not compile.

vLLM counts a request's prompt once, and not again after a preemption; here the node that first had it has counted it.
"""

import logging
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.sampling_params import SamplingType, StructuredOutputsParams
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output.request import StructuredOutputRequest

from .counters import Counters
from .resume_order import verify, without_order
from .ticket_fields import Refusal, RefusalReason

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.sampling_params import SamplingParams
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.structured_output import StructuredOutputManager

log = logging.getLogger("vllm.pdproxy.scheduler")
_REFUSED = "Request %s: resume order refused (%s): %s. The request ends with an error."
_REJECTED = "Request %s: its grammar refused token %d of the %d that it goes on after. It ends with an error."

CPU_WORKER = "cpu_worker.SeededCPUWorker"
"""Ours, in a package that has one name where it is installed and another in a checkout."""


class RejectedTokensError(Exception):
    """The request's grammar does not accept its output tokens."""


class RefusedOrderError(Exception):
    """In the place of a grammar: what ends a request whose order was refused."""


def engine_resumes(vllm_config: "VllmConfig") -> bool:
    """Whether this node's model runner takes a new request that has output tokens: V2 does, V1 in our CPU worker."""
    worker: str = vllm_config.parallel_config.worker_cls
    return bool(vllm_config.use_v2_model_runner) or worker.endswith(f".{CPU_WORKER}")


@dataclass(frozen=True, slots=True)
class ResumeLimits:
    """The limits of an order. The API server asks first: there a refusal is an answer, here it ends a stream.

    `able`: `engine_resumes`. `thinking_budgets`: V2 counts a request's thinking anew from its tokens; V1 counts it step
    by step, and of tokens that come at once it counts otherwise (so also after its own preemptions). `speculates`:
    tokens are drafted.
    """

    able: bool
    thinking_budgets: bool
    max_model_len: int
    vocab_size: int
    speculates: bool

    @classmethod
    def of(cls, vllm_config: "VllmConfig") -> "ResumeLimits":
        """The limits of a node."""
        model = vllm_config.model_config
        speculates = vllm_config.num_speculative_tokens > 0
        return cls(
            able=engine_resumes(vllm_config),
            thinking_budgets=bool(vllm_config.use_v2_model_runner),
            max_model_len=model.max_model_len,
            vocab_size=model.get_vocab_size(),
            speculates=speculates,
        )

    def refusal(self, params: "SamplingParams | None", prompt_tokens: int, token_ids: Sequence[int]) -> Refusal | None:
        """Why a request with this many prompt tokens cannot go on after `token_ids`; None where it can."""
        if not self.able:
            return Refusal(RefusalReason.UNSUITABLE_REQUEST, "this node's model runner starts every request anew")
        if params is None:
            return Refusal(RefusalReason.UNSUITABLE_REQUEST, "the request produces no tokens")
        return self._cannot_go_on(params, prompt_tokens, token_ids) if token_ids else None

    def obstacle(self, params: "SamplingParams") -> str | None:
        """Why a request with these parameters cannot go on here after any output token; None where it can."""
        if self.speculates and params.sampling_type == SamplingType.RANDOM_SEED:
            # Which drafts were accepted decides how many random numbers were drawn, and nobody recorded that.
            return "seeded sampling with speculative tokens"
        if params.thinking_token_budget is not None and not self.thinking_budgets:
            return "a thinking budget on model runner V1"
        return None

    def _cannot_go_on(self, params: "SamplingParams", prompt_tokens: int, token_ids: Sequence[int]) -> Refusal | None:
        if (obstacle := self.obstacle(params)) is not None:
            return Refusal(RefusalReason.UNSUITABLE_REQUEST, obstacle)
        if params.max_tokens is None or len(token_ids) >= params.max_tokens:
            return Refusal(RefusalReason.NUMBER, "the request has as many tokens as it asks for")
        if prompt_tokens + len(token_ids) >= self.max_model_len:
            return Refusal(RefusalReason.NUMBER, "the request has as many tokens as the model takes")
        if max(token_ids) >= self.vocab_size:
            return Refusal(RefusalReason.BAD_FIELD, "a token id is not in the model's vocabulary")
        return None


@dataclass(slots=True)
class ResumedRequests:
    """The orders of one engine. `secret`: of `resume_order.node_secret`."""

    secret: bytes
    limits: ResumeLimits
    counters: Counters
    _untold: dict[str, Request] = field(default_factory=dict)

    def __len__(self) -> int:
        """How many requests have output tokens that the workers do not know."""
        return len(self._untold)

    def carry_out_order(self, request: Request, grammars: "StructuredOutputManager") -> None:
        """Carry out the request's order, if it has one. Must precede everything else that is done with the request."""
        order = verify(self.secret, request.request_id, request.kv_transfer_params)
        if order is None:
            return
        request.kv_transfer_params = without_order(request.kv_transfer_params)
        if request.abort_immediately:
            return
        refusal = order if isinstance(order, Refusal) else self._unfit(request, order)
        if refusal is not None:
            self._refuse(request, refusal)
        elif isinstance(order, list):
            self._resume(request, order, grammars)

    def tell_workers(self, scheduler_output: "SchedulerOutput") -> None:
        """Give the output tokens to the workers, with what they learn of a new request. To V2 vLLM itself does."""
        if not self._untold:
            return
        for data in scheduler_output.scheduled_new_reqs:
            request = self._untold.pop(data.req_id, None)
            if request is not None and data.prefill_token_ids is None:
                data.prefill_token_ids = list(request.all_token_ids)

    def on_request_finished(self, request_id: str) -> None:
        """The request has ended, maybe before it was computed."""
        self._untold.pop(request_id, None)

    def _unfit(self, request: Request, token_ids: list[int]) -> Refusal | None:
        structured = request.structured_output_request
        if request.resumable:
            return Refusal(RefusalReason.UNSUITABLE_REQUEST, "a session's prompt still grows")
        if structured is not None and not isinstance(structured._grammar, Future):
            # Only so with an executor whose every rank has a scheduler of its own.
            return Refusal(RefusalReason.UNSUITABLE_REQUEST, "its grammar was not compiled in vLLM's thread pool")
        return self.limits.refusal(request.sampling_params, request.num_prompt_tokens, token_ids)

    def _resume(self, request: Request, token_ids: list[int], grammars: "StructuredOutputManager") -> None:
        self.counters.resumed(len(token_ids))
        if not token_ids:
            return
        if request.structured_output_request is not None:
            self._advance_grammar(request, token_ids, grammars)
        request.append_output_token_ids(token_ids)
        # Without them vLLM neither counts the prompt again, nor asserts that a local hit ends within it.
        request.prefill_stats = None
        self._untold[request.request_id] = request

    def _refuse(self, request: Request, refusal: Refusal) -> None:
        self.counters.resume_refused(refusal.reason)
        log.error(_REFUSED, request.request_id, refusal.reason, refusal.detail)
        failed: Future[Any] = Future()
        failed.set_exception(RefusedOrderError(refusal.detail))
        if request.structured_output_request is None:
            request.structured_output_request = StructuredOutputRequest(StructuredOutputsParams(json_object=True))
        request.structured_output_request.grammar = failed
        request.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR

    def _advance_grammar(self, request: Request, token_ids: list[int], grammars: "StructuredOutputManager") -> None:
        """Have the request's grammar take the tokens in as soon as it is compiled, which vLLM has begun."""
        structured, stand_in = request.structured_output_request, _without_outputs(request)
        compiled = structured._grammar

        def advanced() -> Any:
            # The pool takes jobs in their order: the compilation is done, or runs in another thread of it.
            stand_in.structured_output_request.grammar = compiled.result()
            self._replay(stand_in, token_ids, grammars)
            structured.reasoning_ended = stand_in.structured_output_request.reasoning_ended
            structured.reasoner = stand_in.structured_output_request.reasoner
            return stand_in.structured_output_request.grammar

        structured.grammar = grammars.executor.submit(advanced)

    def _replay(self, stand_in: Request, token_ids: list[int], grammars: "StructuredOutputManager") -> None:
        """Give the stand-in its tokens as vLLM's engine gave them to the request that produced them: one at a time,
        each before the grammar is asked, which is how the end of reasoning is found. Raises RejectedTokensError."""
        for token_id in token_ids:
            stand_in.append_output_token_ids(token_id)
            if not grammars.accept_tokens(stand_in, [token_id]):
                self.counters.resume_refused("grammar")
                log.error(_REJECTED, stand_in.request_id, stand_in.num_output_tokens, len(token_ids))
                raise RejectedTokensError(stand_in.request_id)


def _without_outputs(request: Request) -> Request:
    """A request like this one before it has output tokens, which no scheduler sees."""
    structured = request.structured_output_request
    return Request(
        request_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        prompt_embeds=request.prompt_embeds,
        prompt_is_token_ids=request.prompt_is_token_ids,
        sampling_params=request.sampling_params,
        pooling_params=None,
        reasoning_ended=structured.reasoning_ended,
        reasoning_parser_kwargs=structured.reasoning_parser_kwargs,
    )
