"""Values and charts for a small cluster on this machine."""

import copy
import shutil
from pathlib import Path
from typing import Any

import yaml

from pdproxy import __version__
from tests.helm.engine import CHART, Engine, Manifests, read_values, value_files

API_KEY, NEXT_API_KEY = "sk-first-0123456789", "sk-next-0123456789"
TICKET_KEY, NEXT_TICKET_KEY = "first-key-0123456789abcdef", "next-key-0123456789abcdef"
LEAVE_S, DRAIN_S = 3, 15
"""Node settings, shorter than the chart's defaults: answers take seconds here."""

Values = dict[str, Any]


def base(**upgrade: object) -> Values:
    """The values of the example without GPUs. ``upgrade``: `nodes.upgrade`."""
    values = read_values(value_files()["no-gpu"])
    values["model"]["extraArgs"] = [*values["model"]["extraArgs"], "--num-gpu-blocks-override=2048"]
    values["nodes"] |= {"leaveSeconds": LEAVE_S, "drainSeconds": DRAIN_S, "upgrade": upgrade}
    values["image"]["proxy"] = {"repository": "pdproxy", "tag": __version__}
    values["proxy"] |= {"replicas": 1, "leaveSeconds": 2, "drainSeconds": 10, "requestSeconds": 120}
    values["apiKeys"] = {"keys": [f"{API_KEY} load"]}
    values["tickets"] = {"keys": [TICKET_KEY]}
    return values


def changed(values: Values, path: str, value: object) -> Values:
    """Copy the values with another value at a dotted path."""
    result = copy.deepcopy(values)
    *parents, last = path.split(".")
    place = result
    for name in parents:
        place = place.setdefault(name, {})
    place[last] = value
    return result


def next_chart(folder: Path) -> Path:
    """Copy the chart with another version and no other change."""
    chart = folder / "pdproxy"
    shutil.copytree(CHART, chart)
    said = yaml.safe_load((chart / "Chart.yaml").read_text())
    (chart / "Chart.yaml").write_text(yaml.safe_dump({**said, "version": "0.9.9", "appVersion": "0.9.8"}))
    return chart


class SteadyChart:
    """Renders a chart as an upgrade does: the secrets that it made before are kept."""

    def __init__(self, helm: Engine) -> None:
        self._helm = helm
        self._kept: dict[str, Any] = {}

    def __call__(self, values: Values, release: str = "demo", chart: Path = CHART) -> Manifests:
        manifests = self._helm.of(chart).manifests(values, release=release)
        for secret in manifests.of("Secret"):
            name = secret["metadata"]["name"]
            if name.endswith("-access"):
                secret["data"] = self._kept.setdefault(name, secret["data"])
        return manifests
