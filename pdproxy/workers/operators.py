"""The operators' port in front of several workers: what they answer, merged; what they are told, told to all.

The supervisor's port checks `Host` and `Origin` (`admin.guard`); workers check the operator's token.
"""

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

from prometheus_client.exposition import choose_encoder

from pdproxy.errors import ClientError
from pdproxy.request import read_json, write_json
from pdproxy.workers.merged_metrics import MergedMetrics
from pdproxy.workers.merged_nodes import Answers, merged_leave, merged_node, merged_nodes, merged_state
from pdproxy.workers.worker import Answer, NoAnswerError, OperatorRequest, Worker

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

PASSED_ON = (b"authorization", b"content-type")
"""Headers by which the workers decide."""
MOST_BYTES = 16 * 1024 * 1024
"""Of a body; a worker takes no more for ``/debug/plan``."""
PLAIN = OperatorRequest("GET", "/metrics")
_JSON = {"content-type": "application/json"}


class NodeChanges:
    """What operators have changed by hand, by node: a worker that starts again is told, or it would not know."""

    def __init__(self) -> None:
        self._by_node: dict[str, list[OperatorRequest]] = {}

    def record(self, request: OperatorRequest, node: str) -> None:
        """Remember what all workers have done; what came before it and has no effect any more is dropped."""
        earlier = self._by_node.pop(node, [])
        added = [each for each in earlier if each.path == "/nodes"]
        if request.path == "/nodes" or (request.method == "DELETE" and not added):
            self._by_node[node] = [request]
        elif request.method != "DELETE" and not request.path.endswith("/rejoin"):
            self._by_node[node] = [*added, request]
        elif request.method != "DELETE" and added:
            self._by_node[node] = added

    def all(self) -> list[OperatorRequest]:
        """In an order that can be repeated."""
        return [request for requests in self._by_node.values() for request in requests]


class OperatorsApp:
    """An ASGI application. ``running``: the workers that can be asked now."""

    def __init__(self, running: Callable[[], Sequence[Worker]], metrics: MergedMetrics) -> None:
        self._running = running
        self._metrics = metrics
        self.changes = NodeChanges()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            answer = await self._answer(await _request(scope, receive))
        except ClientError as error:
            answer = Answer(error.status, {**_JSON, **dict(error.headers)}, error.body())
        fields = {**answer.headers, "content-length": str(len(answer.body))}
        headers = [(name.encode(), value.encode("latin-1")) for name, value in fields.items()]
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        await send({"type": "http.response.body", "body": answer.body})

    async def _answer(self, request: OperatorRequest) -> Answer:
        path, get = request.path, request.method == "GET"
        if path == "/metrics" and get:
            return await self._merged_metrics(request)
        if path in ("/health", "/ready") and get:
            return await self._of_any_good(request)
        if path == "/nodes" or path.startswith("/nodes/"):
            return await (self._shown(request) if get else self._changed(request))
        if path == "/may-leave" and get:
            return _merged(await self._ask_all(request), merged_leave)
        if path == "/ui/state" and get:
            return _merged(await self._ask_all(request), merged_state)
        return await self._any(request)

    async def read_metrics(self) -> None:
        """Take in what all workers show now."""
        answers = await self._ask_all(PLAIN)
        for number, answer in answers.items():
            if answer.ok:
                await asyncio.to_thread(self._metrics.update, number, answer.body.decode())

    async def _merged_metrics(self, request: OperatorRequest) -> Answer:
        await self.read_metrics()
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        text = await asyncio.to_thread(encode, self._metrics)
        return Answer(200, {"content-type": content_type}, text)

    async def _of_any_good(self, request: OperatorRequest) -> Answer:
        """Alive or ready where one worker is."""
        answers = list((await self._ask_all(request)).values())
        answer = next((each for each in answers if each.ok), answers[0])
        return dataclasses.replace(answer, headers=_JSON)

    async def _shown(self, request: OperatorRequest) -> Answer:
        return _merged(await self._ask_all(request), merged_nodes if request.path == "/nodes" else merged_node)

    async def _changed(self, request: OperatorRequest) -> Answer:
        """Told to all; an error where one of them could not do it, which says who could."""
        answers = await self._ask_all(request, all_of_them=True)
        if all(answer.ok for answer in answers.values()):
            merged = _merged(answers, merged_node)
            self.changes.record(request, read_json(merged.body)["name"])
            return merged
        if len({answer.status for answer in answers.values()}) == 1:
            return next(iter(answers.values()))
        raise ClientError(502, _who_failed(answers), kind="server_error", code="workers_differ")

    async def _any(self, request: OperatorRequest) -> Answer:
        """Of one worker: what is the same for all (the page), or concerns one request (a plan)."""
        for worker in self._running():
            try:
                answer = await worker.ask(request)
            except NoAnswerError:
                continue
            kept = {name: value for name, value in answer.headers.items() if name not in ("connection", "date")}
            return dataclasses.replace(answer, headers=kept)
        raise _nobody()

    async def _ask_all(self, request: OperatorRequest, *, all_of_them: bool = False) -> dict[int, Answer]:
        """By worker; without those that did not answer, unless ``all_of_them`` matter: then with an error for each."""
        workers = self._running()
        answers = await asyncio.gather(*(_ask(worker, request) for worker in workers))
        by_number = {worker.number: answer for worker, answer in zip(workers, answers, strict=True)}
        if not all_of_them:
            by_number = {number: answer for number, answer in by_number.items() if answer.status}
        if not by_number:
            raise _nobody()
        return by_number


async def _ask(worker: Worker, request: OperatorRequest) -> Answer:
    """Its answer, or that there is none."""
    try:
        return await worker.ask(request)
    except NoAnswerError as error:
        return Answer(0, {}, str(error).encode())


async def _request(scope: Scope, receive: Receive) -> OperatorRequest:
    """Raises ClientError: its body is too large."""
    query = scope["query_string"].decode("latin-1")
    headers = {
        name.decode(): value.decode("latin-1") for name, value in scope["headers"] if name in (*PASSED_ON, b"accept")
    }
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False) and message["type"] == "http.request"
        if len(body) > MOST_BYTES:
            raise ClientError(413, f"At most {MOST_BYTES} bytes are taken here.", code="request_too_large")
    path = scope.get("raw_path") or scope["path"].encode()
    return OperatorRequest(scope["method"], path.decode("latin-1") + (f"?{query}" if query else ""), headers, body)


def _merged(answers: dict[int, Answer], merge: Callable[[Answers], dict[str, Any]]) -> Answer:
    """One answer; where nobody's is good, the first one."""
    good = {number: answer for number, answer in answers.items() if answer.ok}
    first = next(iter((good or answers).values()))
    if not good:
        return first
    merged = merge({number: read_json(answer.body) for number, answer in good.items()})
    cache = {name: value for name, value in first.headers.items() if name == "cache-control"}
    return Answer(first.status, {**_JSON, **cache}, write_json(merged))


def _who_failed(answers: dict[int, Answer]) -> str:
    """A sentence for operators."""
    failed = [
        f"worker {number}: {answer.status or 'no answer'} {answer.body.decode(errors='replace')[:300]}"
        for number, answer in answers.items()
        if not answer.ok
    ]
    return f"{len(answers) - len(failed)} of {len(answers)} workers did it. {'; '.join(failed)}. Ask again."


def _nobody() -> ClientError:
    return ClientError(503, "No worker answers at the moment.", kind="server_error", code="no_worker")
