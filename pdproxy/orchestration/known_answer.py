"""The known-answer test of a pair: does the decode node answer a hand-over as it answers alone?

::

    decode node     the prompt, alone ──────────── the answer, and its first token g
    decode node     prompt + g, alone ──────────── the answer again, computed in another way
    prefill node    prompt + g ─────────────────── a ticket
    decode node     prompt + g, with the ticket ── must be that answer, within what rounding does (`answers_agree`)

The two answers that it gives alone are computed differently: g is a step of its own after the prompt in the one, and
part of the prompt in the other, whose full blocks come out of the node's own cache. So they show what rounding does on
this node. Each side has a cache salt that nobody else has: neither finds in a cache what the other computed or what
clients left there, and no client finds what the test left.

A test that fails is made once more with another prompt before it counts.
"""

import dataclasses
import itertools
import logging
from collections.abc import Iterator

from pdproxy.errors import Fault, NodeFault, PdproxyError
from pdproxy.legs.calls import decode, json_object, outgoing_body, prefill, read_answer
from pdproxy.legs.rewrite import decode_body, prefill_body
from pdproxy.legs.usage import read_usage
from pdproxy.nodes.node import Node
from pdproxy.nodes.preflight import exchange
from pdproxy.nodes.proof import ProofResult
from pdproxy.observe.labels import Proof
from pdproxy.orchestration.answers_agree import Comparison, Said, compare
from pdproxy.orchestration.context import OrchestrationContext
from pdproxy.orchestration.known_answer_prompt import plain_ids, prompt_tokens, question
from pdproxy.orchestration.resources import BackgroundTasks, HandOver
from pdproxy.request import Endpoint, Headers, Json
from pdproxy.transport.port import HttpRequest, Timeouts

_LOG = logging.getLogger(__name__)

TOKENS = 8
"""Of an answer that are compared."""
LIKELIEST = 20
"""Tokens whose log-probabilities are compared at each position: as many as vLLM gives unless told otherwise."""
BUDGET = 60.0
"""Seconds for one test as a whole."""
PATIENCE = Timeouts(connect=5.0, headers=20.0, stall=20.0, whole=30.0)
"""For each of its calls."""

_SAMPLE_LINES = 16
"""Of a list, to learn how many tokens a line has."""
_TINY = (1, 2, 3, 4)
"""Token ids that any vocabulary has; the prefill node drops the last one, so there must be several."""


_SHOWN = 300
"""Bytes of an error's body that are logged."""


class Unanswered(PdproxyError):
    """The test cannot be made now; the message says why."""


class Unreadable(PdproxyError):
    """The decode node could not answer with the hand-over, though it answers the same prompt alone."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Pair:
    """Two nodes, and until when the test must be over."""

    prefill: Node
    decode: Node
    deadline: float


class KnownAnswer:
    """Implements `pdproxy.nodes.proof.HandOverTest`.

    Args:
        context: dependencies.
        background_tasks: for releasing hand-overs that were not read.
        headers: what the nodes want to see, such as their credential.
        seeds: of prompts; the same in every proxy, so that what one saw can be seen again.
    """

    def __init__(
        self,
        context: OrchestrationContext,
        background_tasks: BackgroundTasks,
        headers: Headers = (),
        seeds: Iterator[int] | None = None,
    ) -> None:
        self._context = context
        self._background_tasks = background_tasks
        self._headers = headers
        self._seeds = seeds or itertools.count()

    async def ask(self, prefill: Node, decode: Node) -> ProofResult:
        """Make the test; a second time where it failed, with another prompt."""
        result = await self._once(prefill, decode)
        if result.proof is Proof.FAILED:
            again = await self._once(prefill, decode)
            result = again if again.proof is Proof.PASSED else result
        self._context.metrics.proof_ended(result.proof)
        return result

    async def warm(self, prefill: Node, decode: Node) -> None:
        """Hand a tiny prompt over. A pair that stays cold is slower once, no reason for anything else."""
        body = {"model": decode.model, "prompt": list(_TINY), "max_tokens": 1, "temperature": 0}
        try:
            await self._handed_over(self._pair(prefill, decode), body)
        except (NodeFault, Unanswered) as why:
            _LOG.warning("no warm-up from %s to %s: %s", prefill.name, decode.name, why)

    def _pair(self, prefill: Node, decode: Node) -> _Pair:
        return _Pair(prefill, decode, self._context.clock.now() + BUDGET)

    async def _once(self, prefill: Node, decode: Node) -> ProofResult:
        seed = next(self._seeds)
        try:
            comparison = await self.compare(prefill, decode, seed)
        except Unanswered as why:
            return ProofResult(Proof.UNANSWERED, str(why))
        except Unreadable as why:
            return ProofResult(Proof.FAILED, f"the known-answer test failed (prompt {seed}): {why}")
        if comparison.agrees():
            return ProofResult(Proof.PASSED, comparison.sentence())
        if comparison.undecided():
            return ProofResult(Proof.UNANSWERED, f"prompt {seed} shows too little: {comparison.sentence()}")
        return ProofResult(Proof.FAILED, f"the known-answer test failed (prompt {seed}): {comparison.sentence()}")

    async def compare(self, prefill: Node, decode: Node, seed: int) -> Comparison:
        """Ask once, with the prompt of this seed.

        Raises:
            Unanswered: nothing could be compared.
            Unreadable: the decode node could not answer with the hand-over.
        """
        pair = self._pair(prefill, decode)
        prompt = await self._prompt(pair, seed)
        salt = self._context.name()
        alone = await self._alone(pair, _body(pair, prompt, TOKENS + 1, salt))
        whole = [*prompt, alone.tokens[0]]
        again = await self._alone(pair, _body(pair, whole, TOKENS, salt))
        try:
            answer = await self._handed_over(pair, _body(pair, whole, TOKENS, self._context.name()))
        except NodeFault as fault:
            raise _meaning(pair.decode, fault) from fault
        return compare(_said(answer, pair.decode), alone.without_first(), again)

    async def _prompt(self, pair: _Pair, seed: int) -> list[int]:
        """Of the length that shows something on these nodes."""
        nodes = (pair.prefill, pair.decode)
        wanted = prompt_tokens([node.block_size for node in nodes], [node.max_model_len for node in nodes], TOKENS + 2)
        sample = await self._tokens(pair, question(seed, _SAMPLE_LINES))
        if not sample:
            return plain_ids(seed, wanted)
        lines = wanted * _SAMPLE_LINES // len(sample)
        return (await self._tokens(pair, question(seed, lines)))[-wanted:]

    async def _tokens(self, pair: _Pair, text: str) -> list[int]:
        """The token ids of a text; none from a node that knows no text."""
        body = outgoing_body({"model": pair.decode.model, "prompt": text})
        headers = (*self._headers, ("content-type", "application/json"))
        request, timeouts = HttpRequest("POST", f"{pair.decode.url}/tokenize", headers, body), self._patience(pair)
        try:
            status, answer = await exchange(self._context.transport, request, timeouts)
            ids = json_object(answer).get("tokens") if status == 200 else None
        except NodeFault as fault:
            raise Unanswered(f"{pair.decode.name} did not answer: {fault}") from fault
        return ids if isinstance(ids, list) else []

    async def _alone(self, pair: _Pair, body: Json) -> Said:
        try:
            answer = await self._decode(pair, body, None)
        except NodeFault as fault:
            raise Unanswered(f"{pair.decode.name} did not answer alone: {_detail(fault)}") from fault
        return _said(answer, pair.decode)

    async def _handed_over(self, pair: _Pair, body: Json) -> Json:
        """What the decode node answers with a ticket of the prefill node.

        Raises:
            NodeFault: the decode leg failed.
            Unanswered: the prefill leg did, or the decode node says that it computed the prompt.
        """
        hand_over, taken = self._context.name(), False
        try:
            ticket = await self._ticket(pair, body, hand_over)
            answer = await self._decode(pair, body, ticket)
            usage = read_usage(answer.get("usage"))
            taken = usage is None or not usage.recomputed
        finally:
            if not taken:
                self._background_tasks.release(pair.prefill, pair.prefill.model, hand_over, self._headers)
        if not taken:
            raise Unanswered(
                f"{pair.decode.name} computed the prompt itself though it had a ticket of {pair.prefill.name}: its log,"
                " and its pdproxy_connector_refused_total and pdproxy_connector_reads_total, say why"
            )
        return answer

    async def _ticket(self, pair: _Pair, body: Json, hand_over: str) -> Json:
        leg = prefill_body(Endpoint.COMPLETIONS, body, hand_over, readers=1)
        context, timeouts = self._context, self._patience(pair)
        try:
            answer = await prefill(context.transport, pair.prefill, Endpoint.COMPLETIONS, leg, self._headers, timeouts)
        except NodeFault as fault:
            raise Unanswered(f"{pair.prefill.name} gave no ticket: {_detail(fault)}") from fault
        return HandOver(hand_over, pair.prefill, answer, context.clock.now()).ticket()

    async def _decode(self, pair: _Pair, body: Json, ticket: Json | None) -> Json:
        leg = decode_body(Endpoint.COMPLETIONS, body, ticket, frozenset())
        context, timeouts = self._context, self._patience(pair)
        return await read_answer(
            await decode(context.transport, pair.decode, Endpoint.COMPLETIONS, leg, self._headers, timeouts)
        )

    def _patience(self, pair: _Pair) -> Timeouts:
        left = pair.deadline - self._context.clock.now()
        if left <= 0:
            raise Unanswered(f"{pair.prefill.name} and {pair.decode.name} took more than {BUDGET:g} s")
        return dataclasses.replace(PATIENCE, whole=min(PATIENCE.whole, left))


def _body(pair: _Pair, prompt: list[int], tokens: int, salt: str) -> Json:
    return {
        "model": pair.decode.model,
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "cache_salt": salt,
        "logprobs": LIKELIEST,
        "return_tokens_as_token_ids": True,
        "return_token_ids": True,
    }


def _said(answer: Json, node: Node) -> Said:
    """What of an answer is compared.

    Raises:
        Unanswered: the node gives no log-probabilities or token ids.
    """
    choices = answer.get("choices")
    choice = _mapping(choices[0]) if isinstance(choices, list) and choices else {}
    tokens, likeliest = choice.get("token_ids"), _mapping(choice.get("logprobs")).get("top_logprobs")
    if not isinstance(tokens, list) or not tokens or not isinstance(likeliest, list):
        raise Unanswered(f"{node.name} answers without token ids or log-probabilities")
    return Said(tokens, [_numbers(position) for position in likeliest])


def _numbers(position: object) -> dict[str, float]:
    return {token: float(value) for token, value in _mapping(position).items() if isinstance(value, int | float)}


def _mapping(value: object) -> Json:
    return value if isinstance(value, dict) else {}


def _meaning(node: Node, fault: NodeFault) -> Exception:
    """Of a decode leg with a ticket that failed though the node answers the same prompt alone.

    vLLM answers 400 to log-probabilities that are no numbers: what it read turned the computation into NaN.
    """
    if fault.fault is Fault.CLIENT_ERROR:
        return Unreadable(f"{node.name} answers alone, and with the hand-over says {_detail(fault)}")
    return Unanswered(f"{node.name} did not answer the hand-over: {_detail(fault)}")


def _detail(fault: NodeFault) -> str:
    """With the beginning of what the node wrote: for the log."""
    return f"{fault}: {fault.body[:_SHOWN].decode('utf-8', 'replace')}" if fault.body else str(fault)
