"""The plugins: one sets the layout that can be transferred, unless the environment has one; the other adds a route."""

import tomllib
from importlib import import_module
from importlib.metadata import EntryPoint, distribution
from pathlib import Path

import pytest

from connector import config
from connector.config import (
    ENDPOINT_PLUGIN,
    STATE_LAYOUT,
    TCP_LIMITS,
    has_endpoints,
    limit_tcp,
    set_state_layout,
)

NIXL_LIBRARIES = Path(str(distribution("nixl-cu12").locate_file("nixl_cu12.libs")))
PROJECT = tomllib.loads((Path(__file__).parents[2] / "connector/pyproject.toml").read_text())["project"]
DECLARED = PROJECT["entry-points"]


def test_the_layout_is_set() -> None:
    environ: dict[str, str] = {}
    set_state_layout(environ)
    assert environ == {STATE_LAYOUT: "DS"}


def test_an_operator_s_choice_stays() -> None:
    environ = {STATE_LAYOUT: "SD"}
    set_state_layout(environ)
    assert environ == {STATE_LAYOUT: "SD"}


def test_tcp_is_bounded_and_an_operator_s_choice_stays() -> None:
    """The names are those of the UCX that NIXL brings: one that it does not know would bound nothing."""
    environ = {"UCX_TCP_USER_TIMEOUT": "60s"}
    limit_tcp(environ)
    assert environ == {**TCP_LIMITS, "UCX_TCP_USER_TIMEOUT": "60s"}
    libraries = b"".join(path.read_bytes() for path in NIXL_LIBRARIES.glob("libuc[ts]-*.so*"))
    for name in TCP_LIMITS:
        assert b"\0" + name.removeprefix("UCX_TCP_").encode() + b"\0" in libraries, name


def test_the_route_is_declared_under_the_name_that_is_looked_for() -> None:
    [(name, value)] = DECLARED["vllm.endpoint_plugins"].items()
    module, factory = value.split(":")
    assert name == ENDPOINT_PLUGIN == getattr(import_module(module), factory).name


def test_where_vllm_loads_a_module_by_its_installed_name() -> None:
    """The name is the folder's module: classes that meet in one process are the same."""
    for module in ("nixl_connector", "tiers.stats", "cpu_worker"):
        ours = import_module(f"connector.{module}")
        assert import_module(f"pdproxy_connector.{module}") is ours
        assert ours.__spec__ is not None
        assert ours.__spec__.name == f"connector.{module}"


@pytest.mark.parametrize(
    ("environ", "installed", "has_routes"),
    [
        ({}, True, False),
        ({"VLLM_PLUGINS": ""}, True, False),
        ({"VLLM_PLUGINS": "pdproxy_connector"}, True, False),
        ({"VLLM_PLUGINS": "pdproxy_connector,pdproxy_endpoints"}, True, True),
        ({"VLLM_PLUGINS": "pdproxy_connector,pdproxy_endpoints"}, False, False),
    ],
)
def test_a_node_has_our_routes_where_the_plugin_is_named_and_installed(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], installed: bool, has_routes: bool
) -> None:
    point = EntryPoint(ENDPOINT_PLUGIN, "connector.endpoints:NodeRoutes", "vllm.endpoint_plugins")
    monkeypatch.setattr(config, "entry_points", lambda **asked: [point] if installed else [])
    assert has_endpoints(environ) is has_routes
