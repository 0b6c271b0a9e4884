"""Helm's own engine in a process of its own: its Go runtime stays out of the tests'. JSON lines in, JSON lines out.

A line is ``{"do": a name of `ACTIONS`, "chart": …, "values": …, "release": …, "namespace": …}``; with ``kubeconfig``,
``lookup`` asks that cluster, and what is rendered is an upgrade. A package is written beside its chart's folder. A
reply is ``{"reply": …}`` or ``{"error": "…"}``.
"""

import functools
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import helm_python as helm


@functools.cache
def loaded(path: str) -> helm.Chart:
    """The chart, read once."""
    return helm.Chart.load(path)


def render(request: Mapping[str, Any]) -> dict[str, str]:
    """Manifests by template."""
    where = {"name": request["release"], "namespace": request["namespace"]}
    chart = loaded(request["chart"])
    if not request.get("kubeconfig"):
        return dict(chart.render(request["values"], **where))
    with helm.Config(kubeconfig_content=request["kubeconfig"], namespace=request["namespace"]) as cluster:
        return dict(cluster.render(chart, request["values"], **where, is_upgrade=True))


def lint(request: Mapping[str, Any]) -> list[str]:
    """Faults that Helm finds."""
    found = helm.lint(request["chart"], request["values"], strict=True, namespace=request["namespace"])
    return [f"{message['path']}: {message['error']}" for message in found["messages"]] + list(found["errors"])


def package(request: Mapping[str, Any]) -> str:
    """The path of the chart as an archive."""
    return str(helm.package(request["chart"], destination=Path(request["chart"]).parent))


ACTIONS: Mapping[str, Callable[[Mapping[str, Any]], object]] = {
    "render": render,
    "lint": lint,
    "package": package,
    "version": lambda _: helm.helm_sdk_version(),
}


def main() -> None:
    """Answer until the input ends."""
    for line in sys.stdin:
        request = json.loads(line)
        try:
            reply: object = {"reply": ACTIONS[request["do"]](request)}
        except helm.HelmError as error:
            reply = {"error": str(error)}
        sys.stdout.write(json.dumps(reply) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
