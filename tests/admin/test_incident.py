"""The questions of an incident, answered from what a proxy has seen. The texts are those of the page."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from pdproxy.admin.commands import HERE, Commands
from pdproxy.admin.incident import Cause, Finding, Incident, incident
from pdproxy.admin.next_step import DOCS, MOST_CHECKED, PAGE, NextStep, PageSection, next_step
from pdproxy.admin.seen import JUST_NOW, WINDOW, Seen
from pdproxy.errors import ClientError, Fault
from pdproxy.failures import Step
from pdproxy.nodes.hand_over_verdict import HandOverVerdict, verdict
from pdproxy.nodes.hand_overs import Used
from pdproxy.nodes.no_hand_over import SideChannel, Told, sentence
from pdproxy.nodes.node import BOTH, DECODE, PREFILL, Bars, Node, NodeView, Outage, PoolState, Role, State
from pdproxy.observe.labels import Leg, Outcome, Rejection
from pdproxy.orchestration.client_errors import final_error_of, rejected_error
from pdproxy.orchestration.in_flight import MAX_BAD, LegFailure, RecentEnds
from pdproxy.orchestration.request_queue import QueueLimits, QueueStatus
from pdproxy.orchestration.request_record import FailureRecord, RequestRecord
from pdproxy.request import Endpoint
from pdproxy.settings.types import OnNoDecode, OnPrefillFailure
from tests.orchestration.cluster import FakeCluster
from tests.test_docs import anchors

ROOT = Path(__file__).parents[2]
NOW = 10_000.0
PREFILLS, DECODES = ("p0",), ("d0", "d1")


def view(
    name: str, state: State = State.UP, ago: float = 3600.0, reason: str = "", *, silent: bool = False, model: str = "m"
) -> NodeView:
    roles = {"p": PREFILL, "d": DECODE, "n": BOTH}[name[0]]
    node = Node(name, f"http://{name}:8000", roles, model)
    return NodeView(node, state, reason=reason, since=NOW - ago, silent=silent)


def back(name: str, lasted: float, ago: float, reason: str = "") -> NodeView:
    """A node that came back so many seconds ago from an outage of so many."""
    made = view(name, ago=ago)
    made.outage = Outage(NOW - ago - lasted, NOW - ago, reason)
    return made


ALL_UP = [view(name) for name in (*PREFILLS, *DECODES)]


def request(key: str = "alice", model: str = "m") -> RequestRecord:
    return RequestRecord("r", Endpoint.CHAT, Endpoint.CHAT, model, key)


def turned_away(limit: Rejection, key: str = "alice") -> RequestRecord:
    record = request(key)
    record.failure.ended_with(final_error_of(rejected_error(limit, "Too many.", 1)))
    return record


def seen(*, faults: dict[str, list[float]] | None = None, ends: dict[Outcome, list[float]] | None = None) -> RecentEnds:
    """Legs that failed, by node, and requests that ended, by outcome; each so many seconds ago."""
    recent = RecentEnds()
    legs = [(ago, node) for node, times in (faults or {}).items() for ago in times]
    for ago, node in sorted(legs, reverse=True):
        recent.faults.append(LegFailure(NOW - ago, "r", Leg.DECODE, node, Fault.RESET, Step.FAIL, FailureRecord()))
    requests = [(ago, outcome) for outcome, times in (ends or {}).items() for ago in times]
    for ago, outcome in sorted(requests, reverse=True):
        record = turned_away(Rejection.QUEUE_FULL) if outcome is Outcome.REJECTED else request()
        recent.ended(record, NOW - ago, outcome)
    return recent


def look(nodes: list[NodeView] = ALL_UP, recent: RecentEnds | None = None, **more: Any) -> Seen:
    bars = more.pop("bars", Bars())
    hand_overs = verdict(PoolState(tuple(nodes), bars), more.pop("used", Used()))
    return Seen(NOW, nodes, recent or seen(), bars, hand_overs=hand_overs, **more)


def ask(nodes: list[NodeView] = ALL_UP, recent: RecentEnds | None = None, **more: Any) -> Incident:
    return incident(look(nodes, recent, **more))


def step(nodes: list[NodeView] = ALL_UP, recent: RecentEnds | None = None, **more: Any) -> NextStep:
    commands = more.pop("commands", Commands())
    looked = look(nodes, recent, **more)
    found = next_step(looked, incident(looked), commands)
    assert found is not None
    return found


def processes(host: str) -> str:
    return f"ssh {host} \"ps -eo pid,stat,args | grep -i '[v]llm'\""


def texts(findings: Any) -> list[str]:
    return [each.what for each in findings]


def test_nothing_is_wrong() -> None:
    looked = look(recent=seen(ends={Outcome.OK: [1.0, 2.0], Outcome.CLIENT_ERROR: [3.0], Outcome.CLIENT_GONE: [4.0]}))
    found = incident(looked)
    assert (found.cause, found.now, found.earlier, found.since, found.nodes) == (Cause.NOTHING, [], [], None, [])
    assert (found.loss, next_step(looked, found, Commands())) == ("", None)
    assert (found.hit.requests, found.hit.failed, found.hit.rejected) == (4, 0, 0)


KILLED = "health: cannot be reached: d0:8000: connection refused"


def test_a_node_is_down_and_nobody_is_hit() -> None:
    nodes = [view("p0"), view("d0", State.DOWN, 190.0, KILLED), view("d1")]
    found = ask(nodes, seen(faults={"d0": [200.0, 195.0]}, ends={Outcome.OK: [1.0] * 50}))
    assert (found.cause, found.nodes) == (Cause.NODE, ["d0"])
    assert found.now == [Finding(f"d0 has been down for 3 min ({KILLED}).", 190.0)]
    assert found.loss == "Served, with less room: 1 of 2 decode nodes take requests as usual."
    assert found.since == pytest.approx(200.0)
    assert (found.hit.requests, found.hit.failed, found.hit.legs) == (50, 0, 2)


LOADS_OR_ENDED = "vLLM is loading its model (wait: minutes for a large one), or no process runs: start it"


def test_a_dead_process_is_asked_for_by_a_command_that_can_be_pasted() -> None:
    found = step([view("p0"), view("d0", State.DOWN, 190.0, KILLED), view("d1")])
    assert found.commands == [processes("d0")]
    assert found.what.startswith(f"Connections to d0 are refused: {LOADS_OR_ENDED}")
    assert (found.docs, found.then) == (f"{DOCS}/troubleshooting.md#a-node-is-down", "")


def test_a_node_that_is_down_for_another_fault_is_asked() -> None:
    found = step([view("p0"), view("d0", State.DOWN, 190.0, "last fault: reset"), view("d1")])
    assert found.commands == ["curl -sS -i -m 5 http://d0:8000/health", processes("d0")]
    assert "If the connection is refused, no process listens there: start it." in found.then
    both = step([view("p0"), *(view(name, State.DOWN, 190.0, "last fault: reset") for name in DECODES)])
    assert [processes(name) in both.commands for name in DECODES] == [True, True]
    assert both.what == "Ask d0 and d1 from the proxy's host, and look at their processes:"
    assert found.section == PageSection.A_NODE_IS_DOWN


def test_a_node_that_fails_and_gets_requests_is_named() -> None:
    found = ask(recent=seen(faults={"d1": [20.0, 10.0, 5.0]}, ends={Outcome.FAILED: [5.0]}))
    assert (found.cause, found.nodes) == (Cause.NODE, ["d1"])
    assert found.now == [Finding("On d1 3 legs failed in the last 30 s (reset); it still gets requests.", 20.0)]
    assert found.since == pytest.approx(20.0)
    assert found.hit.failed == 1
    asked = step(recent=seen(faults={"d1": [5.0]}))
    assert asked.commands[0] == "curl -sS -i -m 5 http://d1:8000/health"
    assert asked.commands[1].endswith("http://d1:8000/metrics | grep vllm:num_requests")
    assert "engine makes no step (stall)" in asked.then


def test_a_node_that_has_left_is_said_to_have() -> None:
    assert texts(ask(recent=seen(faults={"d7": [20.0]})).now) == [
        "On d7 1 leg failed in the last 30 s (reset); it has left."
    ]
    earlier = ask(recent=seen(faults={"d7": [JUST_NOW + 1]}))
    assert (earlier.cause, texts(earlier.earlier)) == (Cause.NOTHING, ["On d7 1 leg failed; it has left."])
    assert step(recent=seen(faults={"d7": [20.0]})).commands == [f"curl -sS {HERE}/nodes"]


WAITING = "Streams that ran wait for a decode node, up to 10 min (limits.queue_seconds), and go on there."


def test_refused_connections_mean_the_nodes_and_not_us() -> None:
    """Two decode nodes are killed, 22 s apart: each host answers that no process listens."""
    nodes = [view("p0"), view("d0", State.DOWN, 60.0, KILLED), view("d1", State.DOWN, 38.0, "health: refused")]
    found = ask(nodes, seen(ends={Outcome.FAILED: [5.0]}), not_ready="no decode node serves")
    assert (found.cause, found.nodes) == (Cause.NODE, ["d0", "d1"])
    assert texts(found.now) == [
        "This proxy serves nothing: no decode node serves.",
        WAITING,
        f"d0 has been down for 60 s ({KILLED}).",
        "d1 has been down for 38 s (health: refused).",
    ]
    assert found.loss == "New requests get a 503: no decode node serves."
    asked = step(nodes, not_ready="no decode node serves")
    assert asked.commands == [processes("d0"), processes("d1")], "one for each"
    assert "restart the proxy with policy.on_no_decode: prefill. Streams that wait end with it." in asked.then


def test_a_stopgap_is_named_where_there_is_one() -> None:
    """Not where prefill nodes do it already, where none is left, or where another node decodes."""
    down, more = view("d0", State.DOWN, 60.0, KILLED), dict[str, Any](not_ready="no decode node serves")
    assert "on_no_decode" in step([view("p0"), down], **more).then
    assert step([view("p0"), down], on_no_decode=OnNoDecode.PREFILL, **more).then == ""
    assert step([view("p0", State.DOWN, 60.0, KILLED), down], **more).then == ""
    assert step([view("p0"), down, view("d1")]).then == ""


def test_streams_that_may_not_move_do_not_wait() -> None:
    found = ask([view("d0", State.DOWN, 60.0, KILLED)], not_ready="no decode node serves", stream_moves=0)
    assert WAITING not in texts(found.now)


def test_where_nothing_is_served_the_last_nodes_end_counts_and_not_the_firsts() -> None:
    nodes = [view("p0"), view("d0", State.DOWN, 60.0, KILLED), view("d1", State.DOWN, 38.0, KILLED)]
    recent = seen(faults={"d0": [61.0]}, ends={Outcome.FAILED: [61.0, 5.0]})
    unserved: dict[str, Any] = {"not_ready": "no decode node serves", "unserved_since": NOW - 38.0}
    assert ask(nodes, recent, **unserved).since == 38.0
    assert ask(nodes, recent, **unserved | {"not_ready": ""}).since == 61.0


SILENT = "health: cannot be reached: no connection in time"


def test_all_nodes_of_a_role_on_several_hosts_that_are_silent_point_to_us() -> None:
    nodes = [view("p0"), *(view(name, State.DOWN, 60.0, SILENT, silent=True) for name in DECODES)]
    found = ask(nodes, seen(ends={Outcome.FAILED: [5.0]}), not_ready="no decode node serves")
    assert found.cause is Cause.PROXY
    assert texts(found.now)[:4] == [
        "This proxy serves nothing: no decode node serves.",
        WAITING,
        "Nothing comes back from any decode node, on several hosts: look at this proxy's own network first.",
        f"d0 has been down for 60 s ({SILENT}). Nothing comes back from it.",
    ]
    asked = step(nodes, not_ready="no decode node serves")
    assert asked.commands == ["curl -sS -i -m 5 http://d0:8000/health"]
    assert asked.section == PageSection.NOTHING_COMES_BACK_FROM_ANY_NODE


def test_one_silent_node_of_each_role_points_to_us() -> None:
    nodes = [view(name, State.DOWN, 60.0, SILENT, silent=True) for name in ("p0", "d0")]
    assert ask(nodes).cause is Cause.PROXY
    assert "any prefill or decode node" in ask(nodes).now[0].what


def test_silent_nodes_on_one_host_are_that_hosts() -> None:
    nodes = [view(name, State.DOWN, 60.0, SILENT, silent=True) for name in DECODES]
    for each in nodes:
        each.become(Node(each.name, f"http://one:80{each.name[-1]}0", (Role.DECODE,), "m"), 1.0)
    assert ask([view("p0"), *nodes]).cause is Cause.NODE


def test_one_sign_of_life_clears_the_network() -> None:
    nodes = [view("p0"), view("d0", State.DOWN, 60.0, SILENT, silent=True), view("d1", State.DOWN, 60.0, KILLED)]
    assert ask(nodes).cause is Cause.NODE


def test_the_only_node_of_a_role_is_a_node() -> None:
    nodes = [view("p0", State.DOWN, 60.0, SILENT, silent=True), view("d0"), view("d1")]
    found = ask(nodes)
    assert (found.cause, found.loss) == (
        Cause.NODE,
        "Served, slower: decode nodes compute the prompts themselves.",
    )
    asked = step(nodes)
    assert "frozen, or its host or network" in asked.what
    assert asked.commands == [processes("p0"), "curl -sS -i -m 5 http://p0:8000/health"]
    assert "kill -CONT PID" in asked.then


def test_a_node_that_never_came_is_a_node() -> None:
    nodes = [view("p0"), view("d0", State.JOINING, 60.0, "cannot be reached: d0:8000: connection refused")]
    found = ask(nodes, not_ready="no decode node serves")
    assert (found.cause, found.nodes) == (Cause.NODE, ["d0"])
    what = "d0 has been trying to join for 60 s (cannot be reached: d0:8000: connection refused)."
    assert texts(found.now)[2:] == [f"{what} It has not served here yet."]
    assert ask([view("p0"), view("d0"), view("d1", State.JOINING, 2.0)]).cause is Cause.NOTHING


def test_a_node_that_is_tried_again_is_out() -> None:
    found = ask([view("p0"), view("d0", State.PROBING, 20.0, "last fault: reset"), view("d1")])
    assert texts(found.now) == ["d0 has been out for 20 s (last fault: reset)."]


def test_a_refused_node_is_named_with_its_setting() -> None:
    nodes = [view("p0"), view("d0"), view("d1", State.REFUSED, 20.0, "mamba_cache_mode is 'all' there")]
    found = ask(nodes)
    assert (found.cause, found.nodes) == (Cause.NODE, ["d1"])
    assert texts(found.now) == ["d1 has been refused for 20 s (mamba_cache_mode is 'all' there)."]
    check = "pdproxy check --prefill http://p0:8000 --decode http://d0:8000 --decode http://d1:8000"
    assert (step(nodes).commands, step(nodes).section) == ([check], PageSection.A_NODE_IS_REFUSED)
    assert "restart d1" in step(nodes).what


def test_a_drain_is_told_and_is_no_incident() -> None:
    nodes = [view("p0"), view("d0", State.DRAINING, 10.0, "drained by the operator"), view("d1")]
    found = ask(nodes)
    assert (found.cause, found.nodes, found.since) == (Cause.NOTHING, [], 10.0)
    assert texts(found.now) == ["d0 has been draining for 10 s (drained by the operator). No leg runs on it any more."]
    nodes[1].active = 1
    assert texts(ask(nodes).now)[0].endswith(" 1 leg still runs on it.")
    nodes[1].active = 3
    assert texts(ask(nodes).now)[0].endswith(" 3 legs still run on it.")
    assert found.loss == "Served, with less room: 1 of 2 decode nodes take requests as usual."


def test_where_all_nodes_are_drained_these_are_the_cause() -> None:
    nodes = [view("p0"), view("d0", State.DRAINING, 10.0, "drained by the operator")]
    more: dict[str, Any] = {"not_ready": "no decode node serves"}
    assert (ask(nodes, **more).cause, ask(nodes, **more).nodes, ask(nodes, **more).since) == (Cause.NODE, ["d0"], 10.0)
    assert step(nodes, **more).commands == [f"curl -sS -X POST {HERE}/nodes/d0/rejoin"]


def test_a_node_that_came_back_leaves_the_headline() -> None:
    nodes, recent = [view("p0"), back("d0", 40.0, 10.0, KILLED), view("d1")], seen(faults={"d0": [50.0, 45.0]})
    found = ask(nodes, recent)
    assert (found.cause, found.nodes, found.now, found.since) == (Cause.NOTHING, [], [], None)
    what = f"d0 was out for 40 s ({KILLED}), and 2 legs failed; it came back 10 s ago."
    assert found.earlier == [Finding(what, 50.0)]
    asked = step(nodes, recent)
    assert (asked.commands, asked.section) == (["grep 'node d0 is' pdproxy.log"], PageSection.A_NODE_IS_DOWN)
    assert ask([back("d0", 40.0, WINDOW + 1)]).earlier == []


def test_a_fault_before_the_return_is_over_and_one_after_it_is_not() -> None:
    came_back = [view("p0"), back("d0", 5.0, 10.0), view("d1")]
    assert ask(came_back, seen(faults={"d0": [12.0]}, ends={Outcome.FAILED: [12.0]})).cause is Cause.NOTHING
    again = ask(came_back, seen(faults={"d0": [12.0, 3.0]}))
    assert (again.cause, again.since) == (Cause.NODE, 3.0)


def test_what_failed_a_minute_ago_is_earlier() -> None:
    found = ask(recent=seen(faults={"d1": [70.0, 60.0]}, ends={Outcome.FAILED: [70.0, 60.0], Outcome.REJECTED: [50.0]}))
    assert (found.cause, found.now) == (Cause.NOTHING, [])
    assert found.earlier == [
        Finding("On d1 2 legs failed; it serves now.", 70.0),
        Finding("Requests failed: 2, the last one 60 s ago.", 70.0),
        Finding("Requests turned away: 1, the last one 50 s ago.", 50.0),
    ]


@pytest.mark.parametrize(
    ("out", "policies", "loss"),
    [
        ("p0", {}, "Served, slower: decode nodes compute the prompts themselves."),
        (
            "p0",
            {"on_prefill_failure": OnPrefillFailure.FAIL},
            "New requests get a 503: no prefill node serves, and policy.on_prefill_failure is fail.",
        ),
        ("d0", {}, "New requests get a 503: no decode node serves."),
        ("d0", {"on_no_decode": OnNoDecode.PREFILL}, "Served, slower: prefill nodes serve whole requests."),
        ("p0 d0", {"on_no_decode": OnNoDecode.PREFILL}, "New requests get a 503: no decode node serves."),
        (
            "",
            {"hand_overs": HandOverVerdict(("why",), fail=True)},
            "Served, slower: decode nodes compute the prompts themselves.",
        ),
    ],
)
def test_what_clients_lose(out: str, policies: dict[str, Any], loss: str) -> None:
    nodes = [view(name, State.DOWN if name in out.split() else State.UP) for name in ("p0", "d0")]
    assert incident(Seen(NOW, nodes, seen(), **policies)).loss == loss


def test_what_clients_of_each_model_lose() -> None:
    nodes = [view("p0", State.DOWN, model="a"), view("d0", model="a"), view("p1", model="b"), view("d1", model="b")]
    assert ask(nodes).loss == "a: Served, slower: decode nodes compute the prompts themselves."


def test_every_link_into_the_docs_leads_to_a_heading() -> None:
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    assert urls["Documentation"] == DOCS
    assert set(PageSection) <= anchors(ROOT / "docs" / PAGE)


def test_requests_that_fail_without_a_node_are_ours() -> None:
    found = ask(recent=seen(ends={Outcome.FAILED: [9.0], Outcome.OK: [1.0]}))
    assert found.cause is Cause.PROXY
    assert found.since == pytest.approx(9.0)
    assert texts(found.now) == ["Requests failed, and no leg on a node did: the log names each of them."]


def test_a_proxy_that_ends_is_us() -> None:
    assert ask(not_ready="the proxy is ending").cause is Cause.PROXY


def test_requests_that_are_turned_away_are_load() -> None:
    found = ask(recent=seen(ends={Outcome.REJECTED: [9.0, 8.0], Outcome.OK: [1.0] * 3}))
    assert (found.cause, found.hit.rejected) == (Cause.LOAD, 2)
    queue = "all nodes are full, and so is the queue, which all keys share (limits.queue)"
    assert found.now[0] == Finding(f"Requests were turned away: {queue}. 2 in the last 30 s.", 9.0)
    assert found.loss == "Some requests get a 429: 2 of 5 in 5 minutes. They may ask again."
    over = ask(recent=seen(ends={Outcome.REJECTED: [JUST_NOW + 1]}))
    assert over.loss == ""
    most = ask(recent=seen(ends={Outcome.REJECTED: [9.0, 8.0], Outcome.OK: [1.0]}))
    assert most.loss == "Most requests get a 429: 2 of 3 in 5 minutes. They may ask again."


def test_a_full_queue_is_told_with_its_limits_and_with_who_fills_it() -> None:
    more: dict[str, Any] = {
        "queue": QueueStatus(4, 7, {"bob": 2, "alice": 5}),
        "limits": QueueLimits(concurrency=4, queue=8),
        "recent": seen(ends={Outcome.REJECTED: [9.0]}),
    }
    run, wait = "4 run (limits.concurrency is 4)", "7 wait (limits.queue is 8)"
    assert texts(ask(**more).now)[1:] == [f"Of prompts, {run}, and {wait}; these wait by key: alice: 5, bob: 2."]
    nothing_waits = more | {"queue": QueueStatus(4, 0)}
    assert texts(ask(**nothing_waits).now)[1].endswith("and 0 wait (limits.queue is 8).")
    asked = step(**more, commands=Commands("/run/token of ours"))
    header = "-H \"authorization: Bearer $(cat '/run/token of ours')\""
    assert asked.commands[0] == f"curl -sS {header} {HERE}/nodes | jq -c .queue"
    assert "raise limits.queue or limits.concurrency, and restart the proxy" in asked.then


def test_a_keys_own_limit_says_nothing_of_the_queue() -> None:
    recent = RecentEnds()
    recent.ended(turned_away(Rejection.REQUEST_RATE), NOW - 5, Outcome.REJECTED)
    assert len(ask(recent=recent).now) == 1
    assert step(recent=recent).commands == [f"curl -sS {HERE}/metrics | grep '^pdproxy_key_rejected_total.* [1-9]'"]


@pytest.mark.parametrize("limit", Rejection)
def test_each_limit_is_named_by_its_settings(limit: Rejection) -> None:
    settings = {
        Rejection.KEY_LIMIT: "concurrency, or limits.key_concurrency",
        Rejection.REQUEST_RATE: "requests_per_minute",
        Rejection.INPUT_RATE: "input_tokens_per_minute",
        Rejection.OUTPUT_RATE: "output_tokens_per_minute",
        Rejection.QUEUE_FULL: "limits.queue",
        Rejection.QUEUE_TIMEOUT: "limits.queue_seconds",
        Rejection.BODIES_FULL: "limits.held_bytes",
    }
    recent = RecentEnds()
    recent.ended(turned_away(limit), NOW - 5, Outcome.REJECTED)
    found = texts(ask(recent=recent).now)[0]
    assert f"{settings[limit]})" in found
    assert ("API key" in found) == (limit.startswith("key") or limit.endswith("rate"))


def test_limits_are_told_apart_and_beside_a_node_that_is_down() -> None:
    recent = RecentEnds()
    for ago, limit in ((20, Rejection.KEY_LIMIT), (9, Rejection.QUEUE_FULL), (8, Rejection.QUEUE_FULL)):
        recent.ended(turned_away(limit), NOW - ago, Outcome.REJECTED)
    found = ask([view("p0"), view("d0", State.DOWN, 60.0, KILLED), view("d1")], recent)
    assert found.cause is Cause.NODE
    assert [(each.what.split(".")[-2].strip(), each.began) for each in found.now[1:3]] == [
        ("2 in the last 30 s", 9.0),
        ("1 in the last 30 s", 20.0),
    ]


@pytest.mark.parametrize(
    ("nodes", "loss"),
    [
        ([view("n0")], ""),
        ([view("n0", State.DOWN, 20.0, KILLED)], "New requests get a 503: no decode node serves."),
        ([view("n0"), view("n1", State.DOWN)], "Served, with less room: 1 of 2 nodes take requests as usual."),
        ([view("n0"), view("n1", State.PROBING)], "Served, with less room: 1 of 2 nodes take requests as usual."),
        (
            [view("n0", State.DOWN), view("p0"), view("d0")],
            " ".join(f"Served, with less room: 1 of 2 {role} nodes take requests as usual." for role in Role),
        ),
    ],
)
def test_equal_nodes_are_counted_once(nodes: list[NodeView], loss: str) -> None:
    assert ask(nodes).loss == loss


def test_prompts_that_are_computed_twice_are_a_loss() -> None:
    assert ask(used=Used(20, 9)).loss == ""
    found = ask(used=Used(20, 10))
    assert found.loss == "Served, slower: decode nodes compute most of the prompts again that were handed over."


def test_a_node_that_goes_away_has_a_next_step_though_nothing_is_wrong() -> None:
    drained = step([view("p0"), view("d0", State.DRAINING, 5.0), view("d1")])
    assert (drained.commands, drained.section) == (
        [f"curl -sS -X POST {HERE}/nodes/d0/rejoin"],
        PageSection.A_NODE_GOES_AWAY,
    )
    nodes = [view("p0"), view("d0", State.TERMINATING, 5.0), view("d1")]
    ending = step(nodes)
    assert (ending.commands, ending.section) == ([f"curl -sS {HERE}/nodes"], PageSection.A_NODE_GOES_AWAY)
    with_token = step(nodes, commands=Commands("/run/token"))
    assert with_token.commands == [f'curl -sS -H "authorization: Bearer $(cat /run/token)" {HERE}/nodes']


def test_a_node_that_does_not_join_may_have_a_wrong_address() -> None:
    found = step([view("p0"), view("d0", State.JOINING, 5.0, "cannot be reached: d0: connection refused"), view("d1")])
    assert LOADS_OR_ENDED in found.what
    assert found.then.startswith(
        "If http://d0:8000 is not its address, correct it where discovery reads it, or in nodes"
    )
    assert (found.commands, found.section) == ([processes("d0")], PageSection.A_NODE_DOES_NOT_JOIN)


def test_nodes_that_exchange_no_tickets() -> None:
    found = ask(bars=Bars({("p0", "d1"): "other tokens"}))
    assert (found.cause, found.nodes) == (Cause.HAND_OVERS, ["p0", "d1"])
    assert texts(found.now) == ["p0 and d1 exchange no tickets: other tokens."]
    asked = step(bars=Bars({("p0", "d1"): "other tokens"}))
    assert asked.what == "Ask every node why it hands nothing over:"
    assert asked.commands == ["pdproxy check --prefill http://p0:8000 --decode http://d0:8000 --decode http://d1:8000"]


def test_where_it_is_known_what_to_change_that_is_the_next_step() -> None:
    nodes = [view("p0"), view("d0")]
    at, told = SideChannel("127.0.0.1", 5600), Told("peer_unreachable", "[Errno 111] Connection refused")
    why = sentence(nodes[0].node, nodes[1].node, at, told)
    more: dict[str, Any] = {"bars": Bars({("p0", "d0"): why})}
    asked = step(nodes, **more, commands=Commands(check_options=["--upstream-ca-file", "ours.pem"]))
    assert asked.what.startswith("Set NODE_ADDRESS on p0's host ")
    assert asked.what.endswith(" other hosts reach it, and restart p0. Then see whether it works:")
    check = "pdproxy check --prefill http://p0:8000 --decode http://d0:8000 --upstream-ca-file ours.pem"
    assert asked.commands == [check]
    assert ask(nodes, **more).nodes == ["p0", "d0"]


def test_of_a_refused_prefill_node_the_setting_is_the_next_step() -> None:
    nodes = [view("p0", State.REFUSED, 20.0, "side_channel: it is at 127.0.0.1: set NODE_ADDRESS"), view("d0")]
    assert ask(nodes).cause is Cause.HAND_OVERS
    assert step(nodes).section == PageSection.A_NODE_IS_REFUSED


def test_of_many_nodes_those_are_checked_that_it_is_about() -> None:
    nodes = [view(f"{role}{number}") for role in "pd" for number in range(MOST_CHECKED)]
    found = step(nodes, bars=Bars({("p3", "d5"): "other tokens"}))
    urls = [f"--{role} http://{name}:8000" for role, name in (("prefill", "p3"), ("decode", "d5"))]
    others = ["--prefill http://p0:8000", "--decode http://d0:8000"]
    assert found.commands == [" ".join(["pdproxy check", *urls, *others])]


def test_since_when_hand_overs_fail_is_told_apart_from_nodes_that_are_out() -> None:
    pairs = {("p0", "d0"): "p0 and d0: no way", ("p0", "d1"): "p0 and d1: no way"}
    bars = Bars(pairs, began={("p0", "d0"): NOW - 40, ("p0", "d1"): NOW - 30})
    down = view("p1", State.DOWN, 500.0, KILLED)
    found = ask([*ALL_UP, down], bars=bars)
    assert (found.cause, found.since) == (Cause.HAND_OVERS, 40.0)
    assert [finding.began for finding in found.now] == [500.0, 40.0, 30.0]
    one_pair = Bars({("p0", "d0"): "p0 and d0: no way"}, began={("p0", "d0"): NOW - 900})
    assert (ask([*ALL_UP, down], bars=one_pair).cause, ask([*ALL_UP, down], bars=one_pair).since) == (
        Cause.NODE,
        500.0,
    )


def test_nodes_that_make_no_pair_do_so_since_the_later_one_serves() -> None:
    other = view("d0", ago=70.0, model="other")
    found = ask([view("p0", ago=3600.0), other])
    assert (found.cause, found.since) == (Cause.HAND_OVERS, 70.0)


def test_what_is_over_is_not_counted() -> None:
    over = [WINDOW + 1.0, WINDOW + 50.0]
    found = ask(recent=seen(faults={"d0": over}, ends={Outcome.FAILED: over}))
    assert (found.cause, found.since, found.hit.failed) == (Cause.NOTHING, None, 0)


def test_since_when_is_when_the_last_row_of_failures_began() -> None:
    """An hour ago there was another one."""
    row = [3600.0, *(900.0 - 220.0 * n for n in range(5))]
    assert ask(recent=seen(ends={Outcome.FAILED: row})).since == pytest.approx(900.0)


def test_who_is_hit_most() -> None:
    recent = RecentEnds()
    for number, key in enumerate(["alice"] * 5 + ["bob"] * 3 + ["carol", "dave", ""]):
        recent.ended(request(key, "m" * 100), NOW - 20 + number, Outcome.FAILED)
    hit = ask(recent=recent).hit
    assert hit.keys == [("alice", 5), ("bob", 3), ("carol", 1)]
    assert hit.models == [("m" * 60, 11)]
    assert hit.endpoints == [("/v1/chat/completions", 11)]


def test_who_was_turned_away_before_the_request_was_read_is_hit_too_and_who_erred_is_not() -> None:
    cluster = FakeCluster()
    cluster.clock.advance(NOW - 3 - cluster.clock.now())
    refused, too_many = cluster.orchestrator.refused, rejected_error(Rejection.KEY_LIMIT, "Too many.", 1)
    refused("r-1", Endpoint.CHAT, Endpoint.CHAT, "alice", too_many)
    refused("r-2", "/v1/embeddings", None, "alice", too_many)
    refused("r-3", Endpoint.CHAT, Endpoint.CHAT, "bob", ClientError(400, "No JSON."))
    found = ask(recent=cluster.context.in_flight.recent)
    hit = found.hit
    assert "an API key has as many open as it may" in found.now[0].what
    assert (hit.requests, hit.rejected, hit.keys, hit.models) == (2, 2, [("alice", 2)], [])
    assert hit.endpoints == [("/v1/chat/completions", 1)]


def test_a_flood_of_bad_ends_stays_bounded() -> None:
    recent = RecentEnds()
    for _ in range(10_000):
        recent.ended(request(), NOW - 5, Outcome.REJECTED)
    hit = ask(recent=recent).hit
    assert (hit.requests, hit.rejected) == (10_000, 10_000)
    assert hit.keys == [("alice", MAX_BAD)]
