"""The known-answer test of a pair: does the decode node answer a hand-over as it answers alone?

::

    decode node     the prompt, alone ──────────── the answer, and its first token g
    decode node     prompt + g, alone ──────────── the answer again, computed in another way
    prefill node    prompt + g ─────────────────── a ticket
    decode node     prompt + g, with the ticket ── must be that answer, within what rounding does (`answers_agree`)

The two answers that it gives alone are computed differently: g is a step of its own after the prompt in the one, and
part of the prompt in the other, whose full blocks come out of the node's own cache. So they show what rounding does on
this node. Each side has a cache salt of its own: neither finds in a cache what the other computed or what clients left
there, and no client finds what the test left.

What the prompt is: `known_answer_prompt`.

Then a chat, where the nodes have a chat template: both must make the same tokens of it, and it is handed over. Where
tokenizers or templates differ, each ticket is for another prompt than the decode node's, and every prompt is computed
twice. The chat's answer is not compared: to the engine a chat is its tokens, as the completion is.

A test that fails is made once more with another prompt before it counts. A decode node that computes the prompt in
spite of its ticket tells why (`nodes.no_hand_over`).
"""

import contextlib
import functools
import itertools
from collections.abc import Iterator, Sequence

from pdproxy.credential import OwnHeaders, no_headers
from pdproxy.errors import Fault, NodeFault, PdproxyError
from pdproxy.legs.calls import json_object
from pdproxy.nodes.node import Node
from pdproxy.nodes.preflight import exchange
from pdproxy.nodes.proof import ProofResult
from pdproxy.observe.labels import Proof
from pdproxy.orchestration.answers_agree import AnswerDistance, ScoredAnswer, compare
from pdproxy.orchestration.context import OrchestrationContext
from pdproxy.orchestration.hand_over import release_later
from pdproxy.orchestration.known_answer_prompt import SAMPLE_LINES, plain_ids, prompt_tokens, question, up_to_boundary
from pdproxy.orchestration.one_hand_over import (
    TIMEOUTS,
    HandOverCalls,
    NotHandedOver,
    TestedPair,
    Unanswered,
    detail,
)
from pdproxy.request import Endpoint, Json, write_json
from pdproxy.transport.port import HttpRequest

TOKENS = 8
"""Tokens of an answer that are compared."""
TOP_LOGPROBS = 20
"""Tokens whose log-probabilities are compared at each position: as many as vLLM gives by default."""
BUDGET = 120.0
"""Seconds for one test as a whole."""
_WITH_SCORES = {
    "temperature": 0,
    "ignore_eos": True,
    "logprobs": TOP_LOGPROBS,
    "return_tokens_as_token_ids": True,
    "return_token_ids": True,
}


class Unreadable(PdproxyError):
    """The decode node could not answer with the hand-over, though it answers the same prompt alone."""


class OtherPrompt(PdproxyError):
    """The two nodes make different prompts of one chat."""


class KnownAnswer:
    """Implements `pdproxy.nodes.proof.HandOverTest`.

    Args:
        headers: what the nodes want to see, such as their credential.
        seeds: of prompts; the same in every proxy, so that a failure can be repeated.
    """

    def __init__(
        self,
        context: OrchestrationContext,
        headers: OwnHeaders = no_headers,
        seeds: Iterator[int] | None = None,
    ) -> None:
        self._context = context
        self._headers = headers
        release = functools.partial(_release, context, headers)
        self._calls = HandOverCalls(context.transport, context.clock, headers, release, context.new_hand_over_id)
        self._seeds = seeds or itertools.count()

    async def ask(self, prefill: Node, decode: Node) -> ProofResult:
        """Make the test; a second time where it was not passed though it could be made, with another prompt."""
        result = await self._once(prefill, decode)
        if result.proof in (Proof.FAILED, Proof.NOT_HANDED_OVER):
            again = await self._once(prefill, decode)
            result = again if again.proof is Proof.PASSED else result
        self._context.metrics.nodes.proof_ended(result.proof)
        return result

    async def warm(self, prefill: Node, decode: Node) -> ProofResult:
        """Hand a tiny prompt over."""
        try:
            await self._calls.make_tiny(prefill, decode, BUDGET)
        except NotHandedOver as missing:
            return ProofResult(Proof.NOT_HANDED_OVER, str(missing))
        except (NodeFault, Unanswered) as fault:
            return ProofResult(Proof.UNANSWERED, str(fault))
        return ProofResult(Proof.PASSED)

    def _pair(self, prefill: Node, decode: Node) -> TestedPair:
        return TestedPair(prefill, decode, self._context.clock.now() + BUDGET)

    async def _once(self, prefill: Node, decode: Node) -> ProofResult:
        seed, pair = next(self._seeds), self._pair(prefill, decode)
        try:
            comparison = await self._compare(pair, seed)
            why = comparison.sentence()
            if comparison.agrees():
                await self._ask_chat(pair, seed)
        except Unanswered as unanswered:
            return ProofResult(Proof.UNANSWERED, str(unanswered))
        except NotHandedOver as missing:
            return ProofResult(Proof.NOT_HANDED_OVER, str(missing))
        except (Unreadable, OtherPrompt) as failed:
            return ProofResult(Proof.FAILED, f"the known-answer test failed (prompt {seed}): {failed}")
        if comparison.agrees():
            return ProofResult(Proof.PASSED, why)
        if comparison.undecided():
            return ProofResult(Proof.UNANSWERED, f"prompt {seed} shows too little: {why}")
        return ProofResult(Proof.FAILED, f"the known-answer test failed (prompt {seed}): {why}")

    async def compare(self, prefill: Node, decode: Node, seed: int) -> AnswerDistance:
        """Make the test of a completion once, with the prompt of this seed.

        Raises `Unanswered`, `NotHandedOver` or `Unreadable`.
        """
        return await self._compare(self._pair(prefill, decode), seed)

    async def _compare(self, pair: TestedPair, seed: int) -> AnswerDistance:
        decode = pair.decode
        prompt = await self._prompt(pair, seed)
        salt = self._context.new_hand_over_id()
        alone = await self._alone(pair, _body(pair, prompt, TOKENS + 1, salt))
        whole = [*prompt, alone.tokens[0]]
        again = await self._alone(pair, _body(pair, whole, TOKENS, salt))
        with _unanswered_on_fault(f"{decode.name} did not answer the hand-over"):
            try:
                answer = await self._calls.make(pair, _body(pair, whole, TOKENS, self._context.new_hand_over_id()))
            except NodeFault as fault:
                # vLLM answers 400 to log-probabilities that are no numbers: what it read made the computation NaN.
                if fault.fault is not Fault.CLIENT_ERROR:
                    raise
                raise Unreadable(f"{decode.name} answers alone, and with the hand-over says {detail(fault)}") from fault
        return compare(_scored(answer, decode), alone.without_first(), again)

    async def _ask_chat(self, pair: TestedPair, seed: int) -> None:
        """Raises `OtherPrompt`, or `Unanswered`."""
        messages = [{"role": "user", "content": question(seed, SAMPLE_LINES)}]
        theirs = await self._chat_tokens(pair, pair.prefill, messages)
        own = await self._chat_tokens(pair, pair.decode, messages)
        if theirs is None or own is None:
            return
        if theirs != own:
            at = next((at for at, (one, other) in enumerate(zip(theirs, own, strict=False)) if one != other), -1)
            where = f"token {at + 1} is the first to differ" if at >= 0 else "one begins as the other"
            raise OtherPrompt(
                f"of one chat {pair.prefill.name} makes a prompt of {len(theirs)} tokens and {pair.decode.name} one of"
                f" {len(own)} ({where}), so that every chat would be computed twice: start both with the same"
                " --tokenizer, --tokenizer-mode, --chat-template, --chat-template-content-format and"
                " --default-chat-template-kwargs"
            )
        if own:
            salt = self._context.new_hand_over_id()
            chat = {
                "model": pair.decode.model,
                "messages": messages,
                "max_tokens": 1,
                "temperature": 0,
                "cache_salt": salt,
            }
            with _unanswered_on_fault(f"{pair.decode.name} did not answer the hand-over of a chat"):
                await self._calls.make(pair, chat, Endpoint.CHAT)

    async def _chat_tokens(self, pair: TestedPair, node: Node, messages: Sequence[Json]) -> list[int] | None:
        """The tokens that a node makes of a chat: none where it has no chat template. None where it does not tell."""
        status, answer = await self._tokenized(pair, node, {"model": node.model, "messages": messages})
        if status == 400:
            return []
        ids = json_object(answer).get("tokens") if status == 200 else None
        return ids if isinstance(ids, list) else None

    async def _prompt(self, pair: TestedPair, seed: int) -> list[int]:
        nodes = (pair.prefill, pair.decode)
        wanted = prompt_tokens([node.block_size for node in nodes], [node.max_model_len for node in nodes], TOKENS + 2)
        sample = await self._tokens(pair, question(seed, SAMPLE_LINES))
        unit = pair.prefill.prefix_match_unit
        if not sample:
            return up_to_boundary(plain_ids(seed, wanted), unit)
        lines = wanted * SAMPLE_LINES // len(sample)
        return up_to_boundary((await self._tokens(pair, question(seed, lines)))[-wanted:], unit)

    async def _tokens(self, pair: TestedPair, text: str) -> list[int]:
        """The token ids of a text; none where the decode node has no tokenizer."""
        status, answer = await self._tokenized(pair, pair.decode, {"model": pair.decode.model, "prompt": text})
        with _unanswered_on_fault(f"{pair.decode.name} did not answer"):
            ids = json_object(answer).get("tokens") if status == 200 else None
        return ids if isinstance(ids, list) else []

    async def _tokenized(self, pair: TestedPair, node: Node, body: Json) -> tuple[int, bytes]:
        headers = (*self._headers(), ("content-type", "application/json"))
        request = HttpRequest("POST", f"{node.url}/tokenize", headers, write_json(body))
        with _unanswered_on_fault(f"{node.name} did not answer"):
            return await exchange(self._context.transport, request, self._calls.within(pair, TIMEOUTS))

    async def _alone(self, pair: TestedPair, body: Json) -> ScoredAnswer:
        with _unanswered_on_fault(f"{pair.decode.name} did not answer alone"):
            return _scored(await self._calls.decode(pair, body, None, Endpoint.COMPLETIONS), pair.decode)


def _release(context: OrchestrationContext, headers: OwnHeaders, node: Node, hand_over_id: str) -> None:
    release_later(context, node, node.model, hand_over_id, headers())


def _body(pair: TestedPair, prompt: list[int], tokens: int, salt: str) -> Json:
    return {"model": pair.decode.model, "prompt": prompt, "max_tokens": tokens, "cache_salt": salt, **_WITH_SCORES}


def _scored(answer: Json, node: Node) -> ScoredAnswer:
    scored = ScoredAnswer.read(answer)
    if scored is None:
        raise Unanswered(f"{node.name} answers without token ids or log-probabilities")
    return scored


@contextlib.contextmanager
def _unanswered_on_fault(what: str) -> Iterator[None]:
    try:
        yield
    except NodeFault as fault:
        raise Unanswered(f"{what}: {detail(fault)}") from fault
