"""The operators' port in front of workers that are played here."""

import dataclasses
from collections.abc import Mapping
from typing import Any, cast

import httpx
import pytest
from prometheus_client import CollectorRegistry

from pdproxy.admin.incident import Cause, Hit, Incident
from pdproxy.nodes.cohorts import CohortStatus, RoleCount
from pdproxy.planning.demand import Advice, Limit
from pdproxy.request import read_json, write_json
from pdproxy.workers.merged_metrics import MergedMetrics
from pdproxy.workers.operators import OperatorsApp
from pdproxy.workers.worker import Answer, NoAnswerError, OperatorRequest, Worker


def node(name: str, **fields: object) -> dict[str, Any]:
    return {"name": name, "state": "up", "active": 1, "footprint": {"tokens": 10, "sequences": 1}, **fields}


def queue(**fields: object) -> dict[str, Any]:
    return {"running": 0, "waiting": 0, "by_key": {}, "by_model": {}, "seconds": None, **fields}


def state(**fields: object) -> dict[str, Any]:
    nothing: dict[str, Any] = {"requests": [], "hits": [], "planned_hits": [], "plans": {}, "failures": []}
    shown = {"incident": incident_of(), "advice": dataclasses.asdict(Advice()), "cohorts": []}
    return {"ready": "ready", "nodes": [], "on_the_way": 0, **shown, **nothing, **fields}


def incident_of(cause: Cause = Cause.NOTHING, since: float | None = None, **hit: Any) -> dict[str, Any]:
    return dataclasses.asdict(Incident(cause, [cause.value], [f"{cause}."], since, Hit(**hit)))


def cohort(name: str, requests: int, *, complete: bool = True) -> dict[str, Any]:
    role = RoleCount(1, 0, 0)
    return dataclasses.asdict(CohortStatus(name, ("m",), role, role, complete, requests, 1.0))


@dataclasses.dataclass
class FakeWorker:
    """Answers by path; without an answer it does not run."""

    number: int
    answers: Mapping[str, tuple[int, object]]
    asked: list[OperatorRequest] = dataclasses.field(default_factory=list)

    async def ask(self, request: OperatorRequest) -> Answer:
        self.asked.append(request)
        if request.path not in self.answers:
            raise NoAnswerError(f"worker {self.number} does not run")
        status, body = self.answers[request.path]
        return Answer(status, {"content-type": "application/json"}, write_json(body))


async def ask(*answers: Mapping[str, tuple[int, object]], method: str = "GET", path: str) -> httpx.Response:
    return await ask_workers([FakeWorker(*each) for each in enumerate(answers)], method, path)


async def ask_workers(workers: list[FakeWorker], method: str, path: str, **sent: Any) -> httpx.Response:
    return await ask_app(app_of(workers), method, path, **sent)


def app_of(workers: list[FakeWorker]) -> OperatorsApp:
    return OperatorsApp(lambda: cast(list[Worker], workers), MergedMetrics(CollectorRegistry()))


async def ask_app(app: OperatorsApp, method: str, path: str, **sent: Any) -> httpx.Response:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(cast(Any, app)), base_url="http://admin") as client:
        return await client.request(method, path, **sent)


async def test_nodes_are_summed_and_differences_named() -> None:
    left = {
        "nodes": [node("a", active=2), node("b")],
        "cohorts": [],
        "queue": queue(running=2, by_key={"k": 1}, seconds=3.0),
    }
    right = {"nodes": [node("a", state="down"), node("c")], "cohorts": [], "queue": queue(running=1, by_key={"l": 2})}
    answer = (await ask({"/nodes": (200, left)}, {"/nodes": (200, right)}, path="/nodes")).json()
    a, b, c = answer["nodes"]
    assert (a["active"], a["footprint"]) == (3, {"tokens": 20, "sequences": 2})
    assert a["differs"] == {"state": {"0": "up", "1": "down"}}
    assert (b["unknown_to"], c["unknown_to"]) == ([1], [0])
    assert answer["queue"] == queue(running=3, by_key={"k": 1, "l": 2}, seconds=3.0)


async def test_one_node_is_merged_too() -> None:
    answers = [{"/nodes/a": (200, node("a", active=each))} for each in (1, 4)]
    assert (await ask(*answers, path="/nodes/a")).json() == node(
        "a", active=5, footprint={"tokens": 20, "sequences": 2}
    )


async def test_the_pages_state_is_that_of_all() -> None:
    def running(*seconds: float) -> list[dict[str, Any]]:
        return [{"id": str(each), "seconds": {"total": each}} for each in seconds]

    left = state(
        on_the_way=2, requests=running(1, 3), plans={"load": 1, "cached": 0}, hits=[{"way": "x", "prompts": 2}]
    )
    right = state(ready="no decode node serves", on_the_way=1, requests=running(2), plans={"load": 2, "cached": 0},
                  hits=[{"way": "x", "prompts": 3}], failures=[{"ago": 2.0}])  # fmt: skip
    merged = (await ask({"/ui/state": (200, right)}, {"/ui/state": (200, left)}, path="/ui/state")).json()
    assert (merged["ready"], merged["on_the_way"]) == ("ready", 3)
    assert [each["id"] for each in merged["requests"]] == ["1", "2", "3"]
    assert merged["plans"] == {"load": 3, "cached": 0}
    assert merged["hits"] == [{"way": "x", "prompts": 5}]
    assert merged["failures"] == [{"ago": 2.0}]


async def test_what_the_page_says_of_an_incident_is_what_all_workers_saw() -> None:
    left = state(incident=incident_of(Cause.LOAD, 5.0, requests=4, failed=1, keys=[("k", 3), ("l", 2)]))
    right = state(incident=incident_of(Cause.NODE, 9.0, requests=6, keys=[("l", 2)]))
    quiet = state()
    answers = [{"/ui/state": (200, each)} for each in (left, right, quiet)]
    merged = (await ask(*answers, path="/ui/state")).json()["incident"]
    assert (merged["cause"], merged["since"], merged["nodes"]) == ("node", 9.0, ["load", "node", "nothing"])
    assert (merged["hit"]["requests"], merged["hit"]["failed"]) == (10, 1)
    assert merged["hit"]["keys"] == [["l", 4], ["k", 3]]


async def test_needed_nodes_add_up_and_cohorts_have_the_requests_of_all() -> None:
    left = state(
        advice=dataclasses.asdict(Advice(1.5, 0.5, streams_each=4)), cohorts=[cohort("new", 3), cohort("old", 0)]
    )
    right = state(
        advice=dataclasses.asdict(Advice(0.25, 2.0, limit=Limit.CACHE, minutes=3)),
        cohorts=[cohort("new", 1, complete=False)],
    )
    merged = (await ask({"/ui/state": (200, left)}, {"/ui/state": (200, right)}, path="/ui/state")).json()
    advice = merged["advice"]
    assert (advice["prefill"], advice["decode"], advice["minutes"]) == (1.75, 2.5, 3)
    assert (advice["limit"], advice["streams_each"]) == (Limit.CACHE, 4)
    new, old = merged["cohorts"]
    assert (new["requests"], new["share"], new["complete"]) == (4, 1.0, False)
    assert (old["requests"], old["share"]) == (0, 0.0)


@pytest.mark.parametrize(("right", "leave"), [(True, True), (False, False)])
async def test_a_node_may_leave_where_all_workers_say_so(right: bool, leave: bool) -> None:
    path = "/may-leave?host=10.0.0.1&port=8100"
    answers = [{"/may-leave": (200, {"leave": each, "why": ""})} for each in (True, right)]
    assert (await ask(*answers, path=path)).json()["leave"] is leave


@pytest.mark.parametrize(("statuses", "status"), [((200, 503), 200), ((503, 503), 503), ((503, None), 503)])
async def test_ready_where_one_worker_is(statuses: tuple[int | None, ...], status: int) -> None:
    answers: list[Mapping[str, tuple[int, object]]] = [
        {} if each is None else {"/ready": (each, {"status": str(each)})} for each in statuses
    ]
    assert (await ask(*answers, path="/ready")).status_code == status


async def test_without_any_worker_it_is_not_alive() -> None:
    assert (await ask({}, {}, path="/health")).status_code == 503


async def test_a_drain_reaches_all_workers_with_the_operators_headers() -> None:
    workers = [FakeWorker(number, {"/nodes/a/drain": (202, node("a", state="draining"))}) for number in (0, 1)]
    headers = {"authorization": "Bearer word", "origin": "http://localhost", "cookie": "no"}
    answer = await ask_workers(workers, "POST", "/nodes/a/drain?seconds=3", headers=headers)
    assert (answer.status_code, answer.json()["state"]) == (202, "draining")
    for worker in workers:
        (asked,) = worker.asked
        assert (asked.method, asked.target) == ("POST", "/nodes/a/drain?seconds=3")
        assert asked.headers["authorization"] == "Bearer word"
        assert not {"cookie", "host", "origin"} & asked.headers.keys(), "the supervisor has looked at these"


async def test_an_answer_that_one_worker_does_not_give_says_which() -> None:
    done, path = {"/nodes/a/drain": (202, node("a"))}, "/nodes/a/drain"
    for other in ({path: (404, {"error": "there is no a"})}, {}):
        answer = await ask(done, other, method="POST", path=path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "workers_differ")
        assert "1 of 2 workers did it. worker 1: " in answer.json()["error"]["message"]


async def test_an_error_of_all_is_passed_on() -> None:
    refused = {"/nodes": (401, {"error": "the admin token"})}
    for method in ("GET", "POST"):
        answer = await ask(refused, refused, method=method, path="/nodes")
        assert (answer.status_code, answer.json()) == (401, {"error": "the admin token"})


async def test_other_paths_are_one_workers() -> None:
    plan = {"/debug/plan": (200, {"route": "local"})}
    workers = [FakeWorker(0, {}), FakeWorker(1, plan), FakeWorker(2, plan)]
    answer = await ask_workers(workers, "POST", "/debug/plan?endpoint=x", content=b"{}")
    assert (answer.json(), workers[1].asked[0].body, workers[2].asked) == ({"route": "local"}, b"{}", [])


async def test_a_worker_that_starts_again_is_told_what_still_holds() -> None:
    paths = {"/nodes": "new", "/nodes/b": "b", "/nodes/new": "new"}
    paths |= {f"/nodes/{name}/{what}": name for name in ("a", "new") for what in ("drain", "rejoin")}
    app = app_of([FakeWorker(0, {path: (202, node(name)) for path, name in paths.items()})])

    async def told(*changes: tuple[str, str]) -> list[tuple[str, str]]:
        for method, path in changes:
            assert (await ask_app(app, method, path)).status_code == 202
        return [(request.method, request.target) for request in app.changes.all()]

    assert await told(("POST", "/nodes"), ("POST", "/nodes/new/drain")) == [
        ("POST", "/nodes"), ("POST", "/nodes/new/drain")
    ]  # fmt: skip
    assert await told(("POST", "/nodes/new/rejoin")) == [("POST", "/nodes")]
    assert await told(("DELETE", "/nodes/new")) == []
    assert await told(("POST", "/nodes/a/drain")) == [("POST", "/nodes/a/drain")]
    assert await told(("POST", "/nodes/a/rejoin"), ("DELETE", "/nodes/b")) == [("DELETE", "/nodes/b")]


async def test_metrics_are_those_of_all() -> None:
    class Shows(FakeWorker):
        async def ask(self, request: OperatorRequest) -> Answer:
            return Answer(200, {}, b"# TYPE a_total counter\na_total 2.0\n")

    answer = await ask_workers([Shows(0, {}), Shows(1, {})], "GET", "/metrics")
    assert "a_total 4.0" in answer.text
    assert answer.headers["content-type"].startswith("text/plain")


def test_json_of_the_workers_is_read() -> None:
    assert read_json(write_json(node("a"))) == node("a")
