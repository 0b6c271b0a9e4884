"""Helm, as the tests ask it."""

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm" / "pdproxy"
RELEASE, NAMESPACE = "demo", "llm"

KINDS = ("prefill", "decode", "node")
"""The kinds of nodes."""
WORKLOADS = ("StatefulSet", "LeaderWorkerSet", "Deployment")

Manifest = dict[str, Any]


class Refused(Exception):
    """Helm would not; the message is what an operator reads."""


class Engine:
    """One child process, asked in turn, each question once: without a cluster the answer stays the same."""

    def __init__(self, child: "subprocess.Popen[str]", chart: Path = CHART) -> None:
        self._child = child
        self._chart = chart
        self._replies: dict[str, str] = {}

    def of(self, chart: Path) -> "Engine":
        """The same process, for another chart."""
        return Engine(self._child, chart)

    def render(self, values: Mapping[str, Any], kubeconfig: str = "", release: str = RELEASE) -> dict[str, str]:
        """Text by template. Raises Refused."""
        reply: dict[str, str] = self._ask("render", values, kubeconfig, release)
        return reply

    def lint(self, values: Mapping[str, Any]) -> list[str]:
        """Faults that `helm lint --strict` finds. Raises Refused."""
        reply: list[str] = self._ask("lint", values)
        return reply

    def package(self) -> Path:
        """The chart as an archive, made beside its folder as `helm package` makes it. Raises Refused."""
        return Path(self._ask("package", {}))

    def version(self) -> str:
        """Helm's own, such as v4.2.3."""
        return str(self._ask("version", {}))

    def manifests(self, values: Mapping[str, Any], kubeconfig: str = "", release: str = RELEASE) -> "Manifests":
        """Objects that would be applied. Raises Refused."""
        files = self.render(values, kubeconfig, release)
        texts = [text for path, text in files.items() if path.endswith(".yaml")]
        return Manifests([found for text in texts for found in pickle.loads(_parsed(text))])

    def _ask(self, do: str, values: Mapping[str, Any], kubeconfig: str = "", release: str = RELEASE) -> Any:
        where = {"chart": str(self._chart), "release": release, "namespace": NAMESPACE, "kubeconfig": kubeconfig}
        question = json.dumps({"do": do, "values": values, **where})
        if kubeconfig or question not in self._replies:
            self._replies[question] = self._answer(question)
        reply = json.loads(self._replies[question])
        if "error" in reply:
            raise Refused(reply["error"])
        return reply["reply"]

    def _answer(self, question: str) -> str:
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.write(question + "\n")
        self._child.stdin.flush()
        return self._child.stdout.readline()


@cache
def _parsed(text: str) -> bytes:
    """The objects in a rendered file, pickled: many values render the same file, each caller gets objects of its own,
    and to unpickle takes far less than to parse."""
    return pickle.dumps([found for found in yaml.load_all(text, yaml.CSafeLoader) if found])


class Manifests:
    """Rendered objects."""

    def __init__(self, found: list[Manifest]) -> None:
        self.all = found

    def of(self, kind: str) -> list[Manifest]:
        """All of a kind."""
        return [each for each in self.all if each["kind"] == kind]

    def one(self, kind: str, ending: str = "") -> Manifest:
        """The only one of a kind whose name ends so."""
        [found] = [each for each in self.of(kind) if each["metadata"]["name"].endswith(ending)]
        return found

    def kinds(self) -> list[str]:
        """The kinds of nodes that there are: prefill, decode, node."""
        names = [each["metadata"]["name"] for kind in WORKLOADS for each in self.of(kind)]
        return [kind for kind in KINDS if any(name.endswith(f"-{kind}") for name in names)]

    def node(self, role: str) -> Manifest:
        """The pod of a kind of nodes (of the leader, where a node has several machines)."""
        for each in (found for kind in WORKLOADS for found in self.of(kind)):
            if each["metadata"]["name"].endswith(f"-{role}"):
                spec = each["spec"]
                pod: Manifest = (
                    spec["leaderWorkerTemplate"]["leaderTemplate"] if "template" not in spec else spec["template"]
                )
                return pod
        raise LookupError(role)


def only_container(pod: Manifest) -> Manifest:
    """The container of a pod (template)."""
    [container] = pod["spec"]["containers"]
    found: Manifest = container
    return found


def read_values(path: Path | None) -> dict[str, Any]:
    """A values file; None: no values, the chart's defaults."""
    values: dict[str, Any] = {} if path is None else yaml.load(path.read_text(), yaml.CSafeLoader)
    return values


def value_files() -> dict[str, Path | None]:
    """The values that everything must hold for, by name."""
    paths = sorted([*CHART.glob("ci/*-values.yaml"), *CHART.glob("examples/*.yaml")])
    return {"default": None, **{path.stem: path for path in paths}}


def kinds_of(values: Mapping[str, Any]) -> list[str]:
    """The kinds of nodes that values ask for."""
    kinds: list[str] = values.get("nodes", {}).get("kinds", ["prefill", "decode"])
    return kinds


def nodes_of_files() -> list[tuple[str, str]]:
    """Every kind of nodes of every values file: the file's name and the kind."""
    return [(name, kind) for name, path in value_files().items() for kind in kinds_of(read_values(path))]


@contextmanager
def engine() -> Iterator[Engine]:
    """Helm, while inside."""
    command = [sys.executable, "-m", "tests.helm.engine_child"]
    environment = {**os.environ, "GOGC": "800"}  # a tenth less CPU, for some megabytes
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdin=pipe, stdout=pipe, text=True) as child:
        try:
            yield Engine(child)
        finally:
            assert child.stdin is not None
            child.stdin.close()
            try:
                child.wait(30)
            except subprocess.TimeoutExpired:
                child.kill()
