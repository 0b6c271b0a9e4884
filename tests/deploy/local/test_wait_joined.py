"""Reading the state of the proxy's nodes."""

import json

import pytest

from deploy.local.ports import free_ports
from deploy.local.wait_joined import NodeRefusedError, Standing, all_joined, all_up, parse


def standing(state: str, reason: str = "") -> Standing:
    return Standing("n", state, reason)


def test_the_answer_of_the_operators_port_is_read() -> None:
    body = json.dumps({"nodes": [{"name": "a", "state": "up", "reason": "", "url": "http://x"}]}).encode()
    assert parse(body) == [Standing("a", "up", "")]


def test_all_must_serve() -> None:
    assert all_up([standing("up"), standing("up")])
    assert not all_up([standing("up"), standing("joining")])
    assert not all_up([standing("down")])
    assert not all_up([])


def test_a_refused_node_is_reported_with_the_proxys_reason() -> None:
    with pytest.raises(NodeRefusedError, match="refuses node n: another model"):
        all_up([standing("joining"), standing("refused", "another model")])


def test_a_proxy_that_does_not_answer_has_not_joined_its_nodes() -> None:
    assert not all_joined(f"http://127.0.0.1:{free_ports(1)[0]}/nodes")
