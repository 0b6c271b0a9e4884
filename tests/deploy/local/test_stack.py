"""The proxy's command line with its nodes."""

import pytest

from deploy.local.node import NodeSpec, Role
from deploy.local.stack import equal_specs, pair_specs, proxy_command


def test_a_pair_is_one_node_of_each_role() -> None:
    assert [spec.role for spec in pair_specs()] == [Role.PREFILL, Role.DECODE]


def test_equal_nodes_have_names_of_their_own() -> None:
    assert [(spec.name, spec.role) for spec in equal_specs(2)] == [("node-0", Role.BOTH), ("node-1", Role.BOTH)]


@pytest.mark.parametrize(
    ("roles", "flags"),
    [
        ((Role.PREFILL, Role.DECODE), ["--prefill", "http://127.0.0.1:8001", "--decode", "http://127.0.0.1:8002"]),
        ((Role.PLAIN,), ["--decode", "http://127.0.0.1:8001"]),
        ((Role.BOTH, Role.BOTH), ["--node", "http://127.0.0.1:8001", "--node", "http://127.0.0.1:8002"]),
    ],
    ids=["pair", "one plain engine", "equal nodes"],
)
def test_each_node_is_named_by_its_role(roles: tuple[Role, ...], flags: list[str]) -> None:
    nodes = [NodeSpec(f"n{i}", role, 8000 + i, 0) for i, role in enumerate(roles, 1)]
    line = proxy_command(8000, 8100, nodes, ["--log-level", "debug"])
    listen = ["--host", "127.0.0.1", "--port", "8000", "--admin-port", "8100"]
    assert line[1:] == ["-m", "pdproxy", "serve", *listen, *flags, "--log-level", "debug"]
