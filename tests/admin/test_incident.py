"""The three questions of an incident, answered from what a proxy has seen."""

from typing import Any

import pytest

from pdproxy.admin.incident import WINDOW, Cause, Incident, incident
from pdproxy.errors import ClientError, Fault
from pdproxy.nodes.hand_over_verdict import verdict
from pdproxy.nodes.hand_overs import Used
from pdproxy.nodes.node import Bars, Node, NodeView, Role, Snapshot, State
from pdproxy.observe.labels import Outcome, Rejection
from pdproxy.orchestration.client_errors import rejected_error
from pdproxy.orchestration.in_flight import MAX_BAD, LegFault, RecentEnds
from pdproxy.orchestration.request_record import RequestRecord
from pdproxy.request import Endpoint
from tests.orchestration.cluster import FakeCluster

NOW = 10_000.0
PREFILLS, DECODES = ("p0",), ("d0", "d1")


def view(name: str, state: State = State.UP, ago: float = 3600.0, reason: str = "") -> NodeView:
    role = Role.PREFILL if name.startswith("p") else Role.DECODE
    return NodeView(Node(name, f"http://{name}", (role,), "m"), state, reason=reason, since=NOW - ago)


ALL_UP = [view(name) for name in (*PREFILLS, *DECODES)]


def request(key: str = "alice", model: str = "m") -> RequestRecord:
    return RequestRecord("r", Endpoint.CHAT, Endpoint.CHAT, model, key)


def seen(*, faults: dict[str, list[float]] | None = None, ends: dict[Outcome, list[float]] | None = None) -> RecentEnds:
    """Legs that failed, by node, and requests that ended, by outcome; each so many seconds ago."""
    recent = RecentEnds()
    legs = [(ago, node) for node, times in (faults or {}).items() for ago in times]
    for ago, node in sorted(legs, reverse=True):
        recent.faults.append(LegFault(NOW - ago, node, Fault.RESET))
    requests = [(ago, outcome) for outcome, times in (ends or {}).items() for ago in times]
    for ago, outcome in sorted(requests, reverse=True):
        recent.ended(request(), NOW - ago, outcome)
    return recent


def ask(nodes: list[NodeView] = ALL_UP, recent: RecentEnds | None = None, **more: Any) -> Incident:
    bars = more.get("bars", Bars())
    hand_overs = verdict(Snapshot(tuple(nodes), bars), more.get("used", Used()))
    return incident(NOW, nodes, bars, more.get("not_ready", ""), recent or seen(), hand_overs)


def test_nothing_is_wrong() -> None:
    found = ask(recent=seen(ends={Outcome.OK: [1.0, 2.0], Outcome.CLIENT_ERROR: [3.0], Outcome.CLIENT_GONE: [4.0]}))
    assert (found.cause, found.what, found.since, found.nodes) == (Cause.NOTHING, [], None, [])
    assert (found.hit.requests, found.hit.failed, found.hit.rejected) == (4, 0, 0)


def test_a_node_is_down_and_nobody_is_hit() -> None:
    nodes = [view("p0"), view("d0", State.DOWN, 190.0, "health: refused"), view("d1")]
    found = ask(nodes, seen(faults={"d0": [200.0, 195.0]}, ends={Outcome.OK: [1.0] * 50}))
    assert (found.cause, found.nodes) == (Cause.NODE, ["d0"])
    assert found.what == ["d0 has been down for 3 min (health: refused)."]
    assert found.since == pytest.approx(200.0)
    assert (found.hit.requests, found.hit.failed, found.hit.legs) == (50, 0, 2)


def test_a_node_that_fails_and_serves_is_named() -> None:
    found = ask(recent=seen(faults={"d1": [20.0, 10.0, 5.0]}, ends={Outcome.FAILED: [5.0]}))
    assert (found.cause, found.nodes) == (Cause.NODE, ["d1"])
    assert found.what == ["On d1 3 legs failed; it serves now."]
    assert found.since == pytest.approx(20.0)
    assert found.hit.failed == 1


def test_a_node_that_has_left_is_said_to_have() -> None:
    found = ask(recent=seen(faults={"d7": [20.0]}))
    assert found.what == ["On d7 1 leg failed; it has left now."]


def test_all_nodes_of_a_role_at_once_point_to_us() -> None:
    nodes = [view("p0"), *(view(name, State.DOWN, 60.0, "health: connect") for name in DECODES)]
    found = ask(nodes, seen(ends={Outcome.FAILED: [5.0]}), not_ready="no decode node serves")
    assert found.cause is Cause.PROXY
    assert found.what[:2] == [
        "This proxy serves nothing: no decode node serves.",
        "No decode node answers, though there are several: look at this proxy's own network first.",
    ]


def test_the_only_node_of_a_role_is_a_node() -> None:
    nodes = [view("p0", State.DOWN, 60.0), view("d0"), view("d1")]
    assert ask(nodes).cause is Cause.NODE


def test_requests_that_fail_without_a_node_are_ours() -> None:
    found = ask(recent=seen(ends={Outcome.FAILED: [9.0], Outcome.OK: [1.0]}))
    assert found.cause is Cause.PROXY
    assert found.since == pytest.approx(9.0)
    assert found.what == ["Requests failed, and no leg on a node did: the log names each of them."]


def test_a_proxy_that_ends_is_us() -> None:
    assert ask(not_ready="the proxy is ending").cause is Cause.PROXY


def test_requests_that_are_turned_away_are_load() -> None:
    found = ask(recent=seen(ends={Outcome.REJECTED: [9.0, 8.0]}))
    assert (found.cause, found.hit.rejected) == (Cause.LOAD, 2)
    assert found.what[0].startswith("Requests were turned away")


def test_nodes_that_exchange_no_tickets() -> None:
    found = ask(bars=Bars({("p0", "d1"): "other tokens"}))
    assert (found.cause, found.nodes) == (Cause.HAND_OVERS, ["p0", "d1"])
    assert found.what == ["p0 and d1 exchange no tickets: other tokens."]


def test_what_is_over_is_not_counted() -> None:
    over = [WINDOW + 1.0, WINDOW + 50.0]
    found = ask(recent=seen(faults={"d0": over}, ends={Outcome.FAILED: over}))
    assert (found.cause, found.since, found.hit.failed) == (Cause.NOTHING, None, 0)


def test_since_when_is_when_the_last_row_of_failures_began() -> None:
    """An hour ago there was another one."""
    row = [3600.0, *(900.0 - 200.0 * n for n in range(5))]
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
    hit = ask(recent=cluster.context.in_flight.recent).hit
    assert (hit.requests, hit.rejected, hit.keys, hit.models) == (2, 2, [("alice", 2)], [])
    assert hit.endpoints == [("/v1/chat/completions", 1)]


def test_a_flood_of_bad_ends_stays_bounded() -> None:
    recent = RecentEnds()
    for _ in range(10_000):
        recent.ended(request(), NOW - 5, Outcome.REJECTED)
    hit = ask(recent=recent).hit
    assert (hit.requests, hit.rejected) == (10_000, 10_000)
    assert hit.keys == [("alice", MAX_BAD)]
