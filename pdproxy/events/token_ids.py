"""The token ids of a prompt, as a node will have them: from the request, or from a node.

They serve hashing alone. A node renders a prompt at ``POST /tokenize`` (vLLM 0.32, `entrypoints/serve/tokenize`), which
takes what decides the ids of a completion or a chat: prompt or messages, tools, the template's arguments. What only the
generating endpoints know (truncation, media, responses, messages) is not asked about.
"""

import enum
from array import array
from collections.abc import Sequence

import msgspec

from pdproxy.clock import Clock
from pdproxy.credential import OwnHeaders, no_headers
from pdproxy.errors import Fault, NodeFault
from pdproxy.nodes.node import Node
from pdproxy.nodes.preflight import exchange
from pdproxy.observe.event_metrics import EventMetrics
from pdproxy.observe.labels import IdsOutcome
from pdproxy.raw_json import TEXT, first_byte, value_of
from pdproxy.request import Endpoint, Json, SubRequest, write_json
from pdproxy.transport.port import HttpRequest, Timeouts, Transport

MOST_AT_ONCE = 64
"""Prompts that may be asked about at once; half of them where no request waits for it."""
BEHIND_SECONDS = 1.0
"""Seconds that a node may take where no request waits for it."""
KEPT_OF_SECONDS = 0.9
"""Weight that each further prompt leaves of the seconds that nodes took to render one: the last ten count."""
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


def given_ids(sub_request: SubRequest) -> Sequence[int] | None:
    """The ids that the request itself has as its prompt."""
    if sub_request.text is not None:
        first = sub_request.text.ids
        return first if len(first) == sub_request.shape.prompt_tokens else None
    ids = value_of(sub_request.body.get("prompt"))
    return ids if isinstance(ids, list) and ids and all(type(each) is int for each in ids) else None


def tokenize_body(sub_request: SubRequest) -> Json | None:
    """The question to a node; None where its answer might be other ids than the request's."""
    endpoint, body = sub_request.endpoint, sub_request.body
    if sub_request.shape.media or _given(body, "truncate_prompt_tokens"):
        return None
    if endpoint is Endpoint.COMPLETIONS:
        prompt = body.get("prompt")
        text = first_byte(prompt) == TEXT if isinstance(prompt, msgspec.Raw) else isinstance(prompt, str)
        plain = text and not value_of(body.get("suffix")) and not _given(body, "prompt_embeds")
        kept = {name: body[name] for name in ("model", "add_special_tokens") if _given(body, name)}
        return {**kept, "prompt": prompt} if plain else None
    if endpoint is not Endpoint.CHAT:
        return None
    kept = {name: body[name] for name in _SAME_FIELDS if _given(body, name)}
    arguments = _template_arguments(body)
    return {**kept, "chat_template_kwargs": arguments} if arguments else kept


def _given(body: Json, name: str) -> bool:
    """Whether a field is there, and not null."""
    return value_of(body.get(name)) is not None


def _template_arguments(body: Json) -> dict[str, object]:
    given = value_of(body.get("chat_template_kwargs"))
    arguments = dict(given) if isinstance(given, dict) else {}
    added = {name: value_of(body[name]) for name in _TEMPLATE_FIELDS if _given(body, name)}
    if "reasoning_effort" in added and "enable_thinking" not in arguments:
        added["enable_thinking"] = added["reasoning_effort"] != "none"
    return arguments | added


class Waiting(enum.Enum):
    """Who waits for a prompt's token ids."""

    PLAN = enum.auto()
    """The request's plan."""
    NOTHING = enum.auto()
    """Nothing: the request is under way."""


class TokenIds:
    """Has nodes render prompts. ``seconds``: what one may take before a plan; ``headers``: of each request to one."""

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
        self._seconds = {Waiting.PLAN: seconds, Waiting.NOTHING: max(seconds, BEHIND_SECONDS)}
        self._headers = headers
        self._asking = 0
        self._takes = 0.0
        """Seconds that nodes take to render a prompt."""
        self._shut_until: dict[str, float] = {}
        self._read = msgspec.json.Decoder(_Rendered).decode

    def pays(self, saved: float) -> bool:
        """Whether a plan should wait for ids that are expected to save its request so many seconds."""
        return self._takes < saved and self._takes < self._seconds[Waiting.PLAN]

    async def fetch(self, question: Json, node: Node, waits: Waiting = Waiting.PLAN) -> Sequence[int] | None:
        """The ids of a prompt; None where they cannot be had in time. ``question``: see `tokenize_body`."""
        now, most = self._clock.now(), MOST_AT_ONCE if waits is Waiting.PLAN else MOST_AT_ONCE // 2
        if self._asking >= most or self._shut_until.get(node.name, now) > now:
            self._metrics.token_ids(IdsOutcome.BUSY)
            return None
        self._asking += 1
        try:
            ids = await self._ask(node, write_json(question), self._seconds[waits])
        except NodeFault as fault:
            late = fault.fault in _LATE
            self._metrics.token_ids(IdsOutcome.LATE if late else IdsOutcome.FAILED)
            if late:
                self._took(self._seconds[waits])
            return None
        finally:
            self._asking -= 1
        took = self._clock.now() - now
        self._took(took)
        self._metrics.token_ids(IdsOutcome.FETCHED)
        self._metrics.token_ids_took(took)
        return ids

    def _took(self, seconds: float) -> None:
        known, kept = self._takes, KEPT_OF_SECONDS
        self._takes = seconds if known == 0 else known * kept + seconds * (1 - kept)

    async def _ask(self, node: Node, asked: bytes, seconds: float) -> "array[int]":
        headers = (*self._headers(), ("content-type", "application/json"), ("accept-encoding", "identity"))
        request = HttpRequest("POST", f"{node.url}/tokenize", headers, asked)
        timeouts = Timeouts(connect=seconds, headers=seconds, stall=seconds, whole=seconds)
        status, answer = await exchange(self._transport, request, timeouts)
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
