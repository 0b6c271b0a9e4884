"""The token ids of a prompt, as a node will have them: from the request, from an equal one before, or from a node.

They serve hashing alone. A node renders a prompt at ``POST /tokenize`` (vLLM 0.32, `entrypoints/serve/tokenize`), which
takes what decides the ids of a completion or a chat: prompt or messages, tools, the template's arguments. What only the
generating endpoints know (truncation, media, responses, messages) is not asked about.
"""

import asyncio
import hashlib
import math
from array import array
from collections import OrderedDict
from collections.abc import Sequence

import msgspec

from pdproxy.clock import Clock
from pdproxy.credential import OwnHeaders, no_headers
from pdproxy.errors import Fault, NodeFault
from pdproxy.legs.calls import outgoing_body
from pdproxy.legs.parse import LARGE
from pdproxy.legs.shape import has_media
from pdproxy.nodes.node import Node
from pdproxy.nodes.preflight import exchange
from pdproxy.observe.event_metrics import EventMetrics
from pdproxy.observe.labels import IdsOutcome
from pdproxy.request import Endpoint, Json
from pdproxy.transport.port import HttpRequest, Timeouts, Transport
from pdproxy.unparsed import LargeValue, outline_of

MOST_AT_ONCE = 64
"""Prompts that may be asked about at once."""
KEPT_TOKENS = 1 << 20
"""Token ids that are kept, all prompts together: 4 bytes each."""
KEPT_OF_SECONDS = 0.9
"""Of the weight of what nodes took to render a prompt, at each further one: the last ten count."""
KEPT_WHEN_NOT_ASKED = 0.98
"""Of what nodes are thought to take, each time that this is why none is asked: so they are asked again in the end."""
SHUT_SECONDS = 60.0
"""For how long a node that cannot render prompts is not asked."""
_LATE = frozenset({Fault.HEADERS_TIMEOUT, Fault.STALL})
_SAME_FIELDS = (
    "model",
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "chat_template",
)
"""Fields of a chat that `/tokenize` takes under the same name."""
_TEMPLATE_FIELDS = ("documents", "reasoning_effort")
"""Fields that vLLM's chat endpoint adds to the template's arguments (`ChatCompletionRequest.build_chat_params`)."""


class _Rendered(msgspec.Struct, gc=False):
    """The answer, as far as it is used."""

    tokens: list[int]


def given_ids(body: Json) -> Sequence[int] | None:
    """The ids that the request itself has: a completion's prompt, or those of a continued stream."""
    own = body.get("kv_transfer_params")
    ids = own.get("prompt_token_ids") if isinstance(own, dict) else None
    ids = body.get("prompt") if ids is None else ids
    if isinstance(ids, LargeValue):
        known = ids.outline
        return known if isinstance(known, array) and len(known) == ids.ids else None
    return ids if isinstance(ids, list) and ids and all(type(each) is int for each in ids) else None


def tokenize_body(endpoint: Endpoint, body: Json) -> Json | None:
    """The question to a node; None where its answer might be other ids than the request's."""
    if body.get("truncate_prompt_tokens") is not None or has_media(body):
        return None
    prompt = body.get("prompt")
    if endpoint is Endpoint.COMPLETIONS:
        text = isinstance(outline_of(prompt), str)
        plain = text and not body.get("suffix") and body.get("prompt_embeds") is None
        kept = {name: body[name] for name in ("model", "add_special_tokens") if body.get(name) is not None}
        return {**kept, "prompt": prompt} if plain else None
    if endpoint is not Endpoint.CHAT:
        return None
    kept = {name: body[name] for name in _SAME_FIELDS if body.get(name) is not None}
    arguments = _template_arguments(body)
    return {**kept, "chat_template_kwargs": arguments} if arguments else kept


def _template_arguments(body: Json) -> dict[str, object]:
    given = body.get("chat_template_kwargs")
    arguments = dict(given) if isinstance(given, dict) else {}
    added = {name: body[name] for name in _TEMPLATE_FIELDS if body.get(name) is not None}
    if "reasoning_effort" in added and "enable_thinking" not in arguments:
        added["enable_thinking"] = added["reasoning_effort"] != "none"
    return arguments | added


async def _digest(asked: bytes) -> bytes:
    """That of a long question comes from a thread: hashing, unlike parsing, lets others run meanwhile."""
    if len(asked) <= LARGE:
        return hashlib.blake2b(asked, digest_size=16).digest()
    return await asyncio.to_thread(lambda: hashlib.blake2b(asked, digest_size=16).digest())


class TokenIds:
    """Finds the token ids of prompts. ``seconds``: what a node may take; ``headers``: of each request to one."""

    def __init__(
        self,
        transport: Transport,
        clock: Clock,
        metrics: EventMetrics,
        seconds: float,
        headers: OwnHeaders = no_headers,
    ) -> None:
        self._transport = transport
        self._clock = clock
        self._metrics = metrics
        self._timeouts = Timeouts(connect=seconds, headers=seconds, stall=seconds, whole=seconds)
        self._headers = headers
        self._kept: OrderedDict[bytes, array[int]] = OrderedDict()
        self._kept_tokens = 0
        self._asking = 0
        self._takes = 0.0
        """Seconds that nodes take to render a prompt."""
        self._shut_until: dict[str, float] = {}
        self._read = msgspec.json.Decoder(_Rendered).decode

    async def of(self, endpoint: Endpoint, body: Json, node: Node, worth: float = math.inf) -> Sequence[int] | None:
        """The ids of a request's prompt; None where they cannot be had in time. ``node`` is asked if need be.

        Args:
            worth: seconds that they can save the request at most: where a node takes as long, none is asked.
        """
        ids = given_ids(body)
        if ids is not None:
            self._metrics.token_ids(IdsOutcome.GIVEN)
            return ids
        question = tokenize_body(endpoint, body)
        if question is None:
            self._metrics.token_ids(IdsOutcome.UNSUITABLE)
            return None
        asked = outgoing_body(question)
        key = await _digest(asked)
        kept = self._kept.get(key)
        if kept is not None:
            self._kept.move_to_end(key)
            self._metrics.token_ids(IdsOutcome.KEPT)
            return kept
        if worth <= self._takes:
            self._takes *= KEPT_WHEN_NOT_ASKED
            self._metrics.token_ids(IdsOutcome.NOT_WORTH)
            return None
        return await self._fetch(node, asked, key)

    async def _fetch(self, node: Node, asked: bytes, key: bytes) -> Sequence[int] | None:
        now = self._clock.now()
        if self._asking >= MOST_AT_ONCE or self._shut_until.get(node.name, now) > now:
            self._metrics.token_ids(IdsOutcome.BUSY)
            return None
        self._asking += 1
        try:
            ids = await self._ask(node, asked)
        except NodeFault as fault:
            self._metrics.token_ids(IdsOutcome.LATE if fault.fault in _LATE else IdsOutcome.FAILED)
            return None
        finally:
            self._asking -= 1
        took = self._clock.now() - now
        self._takes = took if self._takes == 0 else self._takes * KEPT_OF_SECONDS + took * (1 - KEPT_OF_SECONDS)
        self._metrics.token_ids(IdsOutcome.FETCHED)
        self._metrics.token_ids_took(took)
        self._keep(key, ids)
        return ids

    async def _ask(self, node: Node, asked: bytes) -> "array[int]":
        headers = (*self._headers(), ("content-type", "application/json"), ("accept-encoding", "identity"))
        request = HttpRequest("POST", f"{node.url}/tokenize", headers, asked)
        status, answer = await exchange(self._transport, request, self._timeouts)
        if status in (404, 405, 501):
            self._shut_until[node.name] = self._clock.now() + SHUT_SECONDS
        if status != 200:
            raise NodeFault(Fault.SERVER_ERROR, f"/tokenize answers {status}", status=status)
        try:
            ids = array("I", self._read(answer).tokens)
        except (msgspec.MsgspecError, OverflowError) as error:
            raise NodeFault(Fault.INVALID_BODY, f"/tokenize answers something else: {error}") from error
        if not ids:
            raise NodeFault(Fault.INVALID_BODY, "/tokenize answers that the prompt has no tokens")
        return ids

    def _keep(self, key: bytes, ids: "array[int]") -> None:
        if key in self._kept:
            return
        self._kept[key] = ids
        self._kept_tokens += len(ids)
        while self._kept_tokens > KEPT_TOKENS:
            _, oldest = self._kept.popitem(last=False)
            self._kept_tokens -= len(oldest)
