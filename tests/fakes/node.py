"""A fake vLLM node without sockets: what it answers is a script of pieces; `memory` and `loopback` carry it."""

import asyncio
import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from tests.fakes.fake_model import tokenize
from tests.fakes.faults import FaultKind, InjectedFault, aborted_answer, aborted_events, error_events
from tests.fakes.journal import STREAMS_PATH, Record, comment, journaled, records_of
from tests.fakes.kv_transfer import FakeKvTransfer, HeldTicket
from tests.fakes.lax_types import RefusedField, lax
from tests.fakes.prompt_cache import PromptCache
from tests.fakes.vllm_answers import ParsedRequest, answer, error, events

REFUSED = "Bad Request"
GENERATING = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"})
"""The type of vLLM's error for a field that it cannot read."""
UNREADABLE = 10**6
FORM = b"--"
"""The beginning of a body in parts (multipart/form-data)."""
JSON = (("content-type", "application/json"),)
EVENTS = (("content-type", "text/event-stream; charset=utf-8"),)
METRICS = """\
pdproxy_connector_info{resume="%s"} 1.0
pdproxy_connector_capacity_tokens 100000.0
pdproxy_connector_capacity_sequences{limit="max_model_len"} 100.0
pdproxy_connector_capacity_binding{group="attention"} 1.0
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Script:
    """An answer: the head, the pieces of the body, and how it goes wrong (after ``until`` pieces).

    Pieces that are ``computed`` come only while the node's engine steps.
    """

    status: int
    headers: tuple[tuple[str, str], ...]
    pieces: tuple[bytes, ...]
    kind: FaultKind | None = None
    computed: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Seen:
    """One request that reached the node."""

    path: str
    body: Mapping[str, Any]
    headers: tuple[tuple[str, str], ...]


class FakeNode:
    """Answers as vLLM 0.32 does, as far as the proxy can tell.

    Args:
        name: its url is ``http://<name>:8000`` for the memory transport.
        fabric: shared with the nodes it exchanges state with.
        burst: tokens that one streamed event carries.
    """

    can_resume = True
    """Whether it has the route of streams that can be resumed."""
    stores_responses = False
    """Whether it leaves responses to the endpoint itself, for it keeps them."""

    def __init__(self, name: str, fabric: FakeKvTransfer, burst: int = 1) -> None:
        self.name = name
        self.fabric = fabric
        self.burst = burst
        self.dialect = 0
        """The layout of its cached bytes. A decode node that reads bytes of another layout gives log-probabilities
        that are off by the difference, in nats; with `UNREADABLE` ones they are NaN, which vLLM answers with a 400."""
        self.rounding = 0
        """By how many nats an answer changes with the length of the prompt, as rounding might."""
        self.template: str | None = ""
        """Words that its chat template puts in front of a chat; None: it has no chat template."""
        self.fault: InjectedFault | None = None
        """The fault of its legs; ``at`` < 0: before the head of the answer."""
        self.cache: PromptCache | None = None
        """The cached prompts, where that is to count."""
        self.resumes = False
        """As a decode node with ``--prefix-match-unit``: it keeps a state at the end of a prompt that it took over."""
        self.separators: tuple[str, str] | None = None
        """Separators of JSON in its streams and answers, as `json.dumps` takes them; None writes as vLLM does."""
        self.stream_pieces: tuple[bytes, ...] = ()
        """Pieces of its streams, in the place of what it would generate."""
        self.prefix = ""
        """Before each of its paths."""
        self.forwarded: dict[str, Script] = {}
        """Answers of paths that are no generating endpoints, by path; others echo what was asked."""
        self.kept: dict[str, int] | None = None
        """Tokens of the conversations that it keeps, by id; None for a node whose connector does not know of that."""
        self.keeps_nothing = ""
        """Why it keeps nothing of what it is asked to keep; "" while it does."""
        self.seen: list[Seen] = []
        self.recomputed = 0
        self.running = 0
        self.cut = 0
        """Legs that the proxy gave up."""
        self.stepping = asyncio.Event()
        """Cleared while its engine is in a long step; its API server answers all the same. Of loopback nodes."""
        self.stepping.set()

    @property
    def url(self) -> str:
        return f"http://{self.name}:8000"

    def legs(self) -> list[Seen]:
        """Requests that were no releases."""
        return [seen for seen in self.seen if not _releases(seen.body)]

    def die(self) -> None:
        """The process ends: what it held is gone."""
        self.fabric.lose(self.name)

    def refuses(self) -> bool:
        """Whether no connection can be had now."""
        return self._take_fault(FaultKind.REFUSE) is not None

    def respond(self, path: str, raw: bytes, headers: tuple[tuple[str, str], ...] = ()) -> Script:
        """The script for one request."""
        if not path.startswith(self.prefix):
            return Script(404, JSON, (b'{"detail":"Not Found"}',))
        path = path.removeprefix(self.prefix)
        body: Mapping[str, Any] = json.loads(raw) if raw and not raw.startswith(FORM) else {}
        self.seen.append(Seen(path, body, headers))
        released = _releases(body)
        if released:
            self.fabric.release(released)
            return Script(200, JSON, (b"{}",))
        fault = self._take_fault(*(set(FaultKind) - {FaultKind.REFUSE}))
        if fault is not None and fault.kind is FaultKind.STATUS:
            return _in_one_piece(fault.status, fault.headers, error(fault.status, "the node says no"))
        script = self._healthy(path, body)
        if self.separators is not None:
            script = dataclasses.replace(
                script, pieces=tuple(_laid_out(each, self.separators) for each in script.pieces)
            )
        return script if fault is None else self._faulty(path, script, fault, body)

    def _healthy(self, path: str, body: Mapping[str, Any]) -> Script:
        if path == "/tokenize" and "prompt" in body:
            ids = tokenize(str(body["prompt"]))
            return Script(200, JSON, (json.dumps({"count": len(ids), "tokens": ids, "node": self.name}).encode(),))
        if self.template is None and (path == "/v1/chat/completions" or "messages" in body):
            return Script(400, JSON, (error(400, "default chat template is no longer allowed"),))
        if path == "/tokenize" and "messages" in body:
            ids = self._parsed("/v1/chat/completions", body).prompt
            return Script(200, JSON, (json.dumps({"count": len(ids), "tokens": ids}).encode(),))
        if path == "/metrics":
            return Script(200, JSON, ((METRICS % str(self.can_resume).lower()).encode(),))
        if path in self.forwarded:
            return self.forwarded[path]
        if path.removeprefix(STREAMS_PATH) not in GENERATING:
            return _in_one_piece(200, (), json.dumps({"path": path, "node": self.name}).encode())
        try:
            return self._generating(path, body)
        except RefusedField as refused_field:
            return _in_one_piece(400, (), error(400, str(refused_field), REFUSED))

    def _generating(self, path: str, body: Mapping[str, Any]) -> Script:
        if path.startswith(STREAMS_PATH):
            return self._journaled(path.removeprefix(STREAMS_PATH), body)
        body = lax(path, body)
        refused = _invalid(body)
        if refused is not None:
            return Script(400, JSON, (error(400, refused),))
        return self._generate(self._parsed(path, body), body, None)

    def _parsed(self, path: str, body: Mapping[str, Any]) -> ParsedRequest:
        question = ParsedRequest.of(path, body, self.burst)
        if not self.template or not question.chat():
            return question
        return dataclasses.replace(question, prompt=[*tokenize(self.template), *question.prompt])

    def _journaled(self, path: str, body: Mapping[str, Any]) -> Script:
        """A stream with a journal, or resumed from one."""
        if not self.can_resume:
            return Script(404, JSON, (b'{"detail":"Not Found"}',))
        if self.stores_responses and path == "/v1/responses":
            return Script(400, JSON, (error(400, "it is stored", "NotResumableError"),))
        body = lax(path, body)
        records, refused = records_of(body), _invalid(body)
        if records is None or refused is not None:
            return Script(400, JSON, (error(400, refused or "no stream, or a bad pdproxy_resume"),))
        return self._generate(ParsedRequest.of(path, body, self.burst), body, records)

    def _generate(self, question: ParsedRequest, body: Mapping[str, Any], records: list[Record] | None) -> Script:
        params = body.get("kv_transfer_params") or {}
        if params.get("do_remote_decode"):
            return self._prefill(question, params)
        return self._decode(question, params, records)

    def _decode(self, question: ParsedRequest, params: Mapping[str, Any], records: list[Record] | None) -> Script:
        cached, wrong = self._attend(question, params)
        if question.logprobs and wrong >= UNREADABLE:
            return Script(400, JSON, (error(400, "Out of range float values are not JSON compliant"),))
        question = dataclasses.replace(question, wrong=wrong + self.rounding * (len(question.prompt) % 2))
        if not question.stream:
            told = self.fabric.told if params.get("pdproxy_explain") else None
            report = {**({} if told is None else {"pdproxy_read": told}), **self._keep(question, params)} or None
            return Script(200, JSON, (answer(question, cached, report),), computed=True)
        if self.stream_pieces:
            return Script(200, EVENTS, self.stream_pieces)
        self._keep(question, params)
        if records is None:
            return Script(200, EVENTS, events(question, cached), computed=True)
        return Script(200, EVENTS, journaled(question, cached, records, self.fabric), computed=True)

    def _prefill(self, question: ParsedRequest, params: Mapping[str, Any]) -> Script:
        hand_over = str(params["pdproxy_hand_over"])
        readers = int(params.get("pdproxy_readers") or 1)
        name = self.fabric.hold(hand_over, HeldTicket(self.name, tuple(question.prompt), readers, self.dialect))
        cached = 1 if self.cache is None else self.cache.compute(question.prompt)
        ticket = {"do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": self.name,
                  "remote_request_id": name, "remote_prefill_cached_tokens": cached,
                  "remote_host": self.fabric.address, "remote_port": 5600, **self._keep(question, params)}  # fmt: skip
        return Script(200, JSON, (answer(question, cached, ticket),), computed=True)

    def _attend(self, question: ParsedRequest, params: Mapping[str, Any]) -> tuple[int, int]:
        """Prompt tokens that need not be computed, as usage tells them; and how wrong it is about the prompt."""
        if not params.get("do_remote_prefill"):
            return (0 if self.cache is None else self.cache.compute(question.prompt)), 0
        if self.cache is not None and self.resumes:
            self.cache.keep(question.prompt)
        held = self.fabric.pull(str(params["remote_request_id"]), tuple(question.prompt), question.n)
        if held is None:
            self.recomputed += 1
        own = 0 if held is None else len(question.prompt) - 1
        from_ticket = params.get("remote_prefill_cached_tokens")
        wrong = 0 if held is None else abs(held.dialect - self.dialect)
        return own if from_ticket is None else int(from_ticket), wrong

    def _keep(self, question: ParsedRequest, params: Mapping[str, Any]) -> dict[str, Any]:
        """The node's words about the conversation that it is asked to keep."""
        if self.kept is None:
            return {}
        for each in params.get("pdproxy_forget", ()):
            self.kept.pop(each, None)
        keep = params.get("pdproxy_keep")
        if keep is None:
            return {}
        hit = self.kept.pop(keep["id"], 0)
        tokens = len(question.prompt) if keep["seconds"] and not self.keeps_nothing else 0
        if tokens:
            self.kept[keep["id"]] = tokens
        why = "" if tokens else self.keeps_nothing or "not_asked"
        return {"pdproxy_kept": {"hit": hit, "tokens": tokens, "blocks": tokens // 8, "why": why}}

    def _take_fault(self, *kinds: FaultKind) -> InjectedFault | None:
        fault = self.fault
        if fault is None or fault.kind not in kinds:
            return None
        self.fault = _once_less(fault)
        return fault

    def _faulty(self, path: str, script: Script, fault: InjectedFault, body: Mapping[str, Any]) -> Script:
        if fault.kind is FaultKind.NO_TICKET:
            if script.headers == EVENTS:
                return script
            self._drop(body)
            return dataclasses.replace(script, pieces=(_without_ticket(script.pieces[0]),))
        if fault.at < 0 and fault.byte < 0 and fault.kind is not FaultKind.GARBAGE:
            return dataclasses.replace(script, status=0, pieces=(), kind=fault.kind)
        return _cut_off(script, fault, path)

    def _drop(self, body: Mapping[str, Any]) -> None:
        params = body.get("kv_transfer_params") or {}
        self.fabric.free(str(params.get("pdproxy_hand_over")))


def _laid_out(piece: bytes, separators: tuple[str, str]) -> bytes:
    """The same events, or the same answer, with other blanks between JSON's values."""
    lines = []
    for line in piece.split(b"\n"):
        prefix = b"data: " if line.startswith(b"data: ") else b""
        text = line.removeprefix(prefix)
        is_json = text.startswith(b"{")
        lines.append(prefix + json.dumps(json.loads(text), separators=separators).encode() if is_json else line)
    return b"\n".join(lines)


def _in_one_piece(status: int, headers: tuple[tuple[str, str], ...], body: bytes) -> Script:
    """An answer that tells its length, as vLLM's do that are no streams."""
    return Script(status, (*JSON, *headers, ("content-length", str(len(body)))), (body,))


def _once_less(fault: InjectedFault) -> InjectedFault | None:
    return dataclasses.replace(fault, times=fault.times - 1) if fault.times > 1 else None


def _cut_off(script: Script, fault: InjectedFault, path: str) -> Script:
    kept = script.pieces[: max(0, fault.at)] if fault.byte < 0 else (b"".join(script.pieces)[: fault.byte],)
    match fault.kind:
        case FaultKind.GARBAGE:
            return dataclasses.replace(script, pieces=(*kept, b"data: {not json\n\n"))
        case FaultKind.ERROR_EVENT:
            reported = error_events(path.removeprefix(STREAMS_PATH), fault.status, "engine died")
            record = (comment([len(reported), []]),) if path.startswith(STREAMS_PATH) else ()
            return dataclasses.replace(script, pieces=(*kept, *reported, *record))
        case FaultKind.ABORT if script.headers == EVENTS:
            return dataclasses.replace(
                script, pieces=(*kept, *aborted_events(path.removeprefix(STREAMS_PATH), len(kept)))
            )
        case FaultKind.ABORT:
            return dataclasses.replace(script, pieces=(aborted_answer(b"".join(script.pieces)),))
        case FaultKind.SHORT:
            return dataclasses.replace(script, pieces=kept)
        case _:
            return dataclasses.replace(script, pieces=kept, kind=fault.kind)


def _without_ticket(body: bytes) -> bytes:
    return json.dumps({**json.loads(body), "kv_transfer_params": None}).encode()


def _releases(body: Mapping[str, Any]) -> str | None:
    return (body.get("kv_transfer_params") or {}).get("pdproxy_release")


def _invalid(body: Mapping[str, Any]) -> str | None:
    """The reason why vLLM refuses a body, as far as a proxy can cause it; None where it takes it."""
    most = body.get("max_tokens") or body.get("max_completion_tokens")
    if most is not None and (body.get("min_tokens") or 0) > most:
        return "min_tokens must be less than or equal to max_tokens"
    if body.get("stream_options") and not body.get("stream"):
        return "Stream options can only be defined when `stream=True`."
    if most is not None and most < 1:
        return "max_tokens must be at least 1"
    return None
