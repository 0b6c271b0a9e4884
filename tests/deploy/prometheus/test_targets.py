"""Prometheus asks the proxy where its nodes are, at the address that compose.yaml gives it."""

from typing import Any

import yaml

from deploy.local.paths import ROOT
from tests.deploy.compose import resolved


def jobs() -> dict[str, Any]:
    """The scrape configurations by name."""
    config = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
    return {job["job_name"]: job for job in config["scrape_configs"]}


def test_nodes_are_asked_for_at_the_operators_port_on_the_proxys_host() -> None:
    proxy, prometheus = resolved("decode")["proxy"], resolved("watch")["prometheus"]
    assert proxy["network_mode"] == prometheus["network_mode"] == "host"
    values = proxy["environment"]
    operators = f"{values['PDPROXY_LISTEN_ADMIN_HOST']}:{values['PDPROXY_LISTEN_ADMIN_PORT']}"
    [asked] = jobs()["vllm"]["http_sd_configs"]
    assert asked["url"] == f"http://{operators}/prometheus/targets"
    assert jobs()["pdproxy"]["static_configs"][0]["targets"] == [operators]
