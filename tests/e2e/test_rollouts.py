"""The upgrade test: a small Kubernetes turns the chart rendered before a change into the chart after it, under load. It
runs real engines, real proxies and the rendered `preStop`.

`make test` makes one change, a new image by surge; `make test-long` makes all of them.
"""

import asyncio
import shutil
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file, save_file

from deploy.local.paths import MODEL
from deploy.local.stack import logs_of
from deploy.local.supervise import Supervisor
from tests.e2e.cluster import PATIENCE_S, REFUSED, Cluster
from tests.e2e.containers import FIRST_RELEASE
from tests.e2e.metrics_reader import read
from tests.e2e.rollout_load import Load, under_load
from tests.e2e.rollout_values import (
    API_KEY,
    NEXT_API_KEY,
    NEXT_TICKET_KEY,
    TICKET_KEY,
    SteadyChart,
    base,
    changed,
    next_chart,
)
from tests.helm.engine import Manifests, engine
from tests.nodes.discovery.apiserver import ApiServer

pytestmark = [pytest.mark.e2e, pytest.mark.own_engines, pytest.mark.timeout(1800)]

NEXT_RELEASE, PROXY_TAG, NODE_TAG = "0.1.1", "image.proxy.tag", "image.node.tag"
BEFORE_S = AFTER_S = 3.0
"""Seconds of load before and after a change."""
KEYS_READ_WITHIN_S = 8.0
"""Nodes read their file every five seconds."""


@pytest.fixture(scope="module")
def chart() -> Iterator[SteadyChart]:
    """Helm's engine."""
    with engine() as helm:
        yield SteadyChart(helm)


class Rollouts:
    """A cluster and the changes made to it so far, one line each."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.key = API_KEY
        self.table: list[str] = []

    async def install(self, *releases: Manifests, nodes: int) -> None:
        """Install without load. Returns once the proxies serve with all nodes."""
        await self.cluster.apply(*releases)
        await self._settled(nodes)

    async def change(self, name: str, *releases: Sequence[Manifests], nodes: int) -> Load:
        """Apply each list of releases in turn, under load. Returns the clients' results."""
        before = set(map(id, self.cluster.pods))
        begun = len(self.cluster.log)
        async with under_load(self.cluster.url, lambda: self.key, seed=len(self.table)) as load:
            await asyncio.sleep(BEFORE_S)
            watch = asyncio.create_task(self._watch_cohorts())
            try:
                for each in releases:
                    await self.cluster.apply(*each)
                    await self._settled(nodes)
            finally:
                watch.cancel()
            await asyncio.sleep(AFTER_S)
        await load.forgive_the_model()
        new = sorted(pod.workload.name for pod in self.cluster.pods if id(pod) not in before)
        self.table.append(f"{name}: {load.summary()}; new pods: {', '.join(new) or 'none'}")
        print("\n" + "\n".join(["", self.table[-1], *self.cluster.log[begun:]]))
        return load

    async def nodes(self) -> Any:
        """The proxy's /nodes; no nodes where no proxy is ready."""
        if not self.cluster.endpoints("proxy"):
            return {"nodes": [], "cohorts": []}
        headers = {"authorization": f"Bearer {self.cluster.secret('access/admin.token').strip()}"}
        async with httpx.AsyncClient(trust_env=False) as client:
            answer = await client.get(f"{self.cluster.operators()}/nodes", headers=headers)
        return answer.raise_for_status().json()

    async def cohorts(self) -> list[Any]:
        """The cohorts with nodes that serve."""
        found = (await self.nodes())["cohorts"]
        return [each for each in found if each["prefill"]["serving"] + each["decode"]["serving"]]

    async def _settled(self, nodes: int) -> None:
        """Wait until so many nodes are up, and no others are known."""
        async with asyncio.timeout(PATIENCE_S):
            states: list[str] = []
            while states != ["up"] * nodes:
                states = [each["state"] for each in (await self.nodes())["nodes"]]
                await asyncio.sleep(0.5)

    async def _watch_cohorts(self) -> None:
        """Note each change in the proxy's report of cohorts."""
        last = ""
        while True:
            found = (await self.nodes())["cohorts"]
            if (now := "; ".join(map(_standing, found))) != last:
                shares = " and ".join(f"{each['share']:.0%}" for each in found)
                self.cluster.note(f"    cohorts: {now}; share of requests: {shares}")
            last = now
            await asyncio.sleep(0.5)


def _standing(cohort: Any) -> str:
    nodes = "+".join(f"{cohort[role]['serving']}{role[0].upper()}" for role in ("prefill", "decode"))
    state = "complete" if cohort["complete"] else "not complete"
    return f"{cohort['name'][:22] or 'not known'} {nodes} {state}"


@asynccontextmanager
async def a_cluster(name: str, mounts: Path, room: int) -> AsyncIterator[Rollouts]:
    """An empty cluster. Logs: `.run/e2e-NAME`. No pod may have been killed when it is left."""
    with Supervisor(logs_of(f"e2e-{name}")) as supervisor:
        async with ApiServer() as api, Cluster(supervisor, api, mounts, room) as cluster:
            made = Rollouts(cluster)
            yield made
            print("\n\n" + "\n".join(made.table))
    assert not [line for line in cluster.log if line.endswith("killed")]


async def test_new_images_by_surge(chart: SteadyChart, tmp_path: Path) -> None:
    """Images of nodes and proxy change at once, as in a release."""
    values = base(strategy="surge")
    upgraded = changed(changed(values, NODE_TAG, NEXT_RELEASE), PROXY_TAG, NEXT_RELEASE)
    async with a_cluster("surge", tmp_path, room=4) as it:
        await it.install(chart(values), nodes=2)
        load = await it.change("node image by surge, and proxy image", [chart(upgraded)], nodes=2)
        assert not load.failures()
        [cohort] = await it.cohorts()
        assert (f"+{NEXT_RELEASE}+" in cohort["name"], cohort["complete"]) == (True, True)


@pytest.mark.long
async def test_what_needs_no_spare_node(chart: SteadyChart, tmp_path: Path) -> None:
    """The chart's version, the proxy's image and all keys change; then, by surge, the weights under the same path."""
    model = tmp_path / "model"
    shutil.copytree(MODEL, model)
    values = base(strategy="surge")
    async with a_cluster("charts", tmp_path, room=4) as it:
        it.cluster.model = model
        await it.install(chart(values), nodes=2)
        pods = list(it.cluster.pods)

        load = await it.change("chart version", [chart(values, chart=next_chart(tmp_path / "next"))], nodes=2)
        assert not load.failures()
        assert it.cluster.pods == pods

        values = changed(values, PROXY_TAG, NEXT_RELEASE)
        load = await it.change("proxy image", [chart(values)], nodes=2)
        assert not load.failures()
        assert [pod for pod in it.cluster.pods if pod in pods] == it.cluster.endpoints(
            "prefill"
        ) + it.cluster.endpoints("decode")

        await rotate_keys(it, chart, values)
        values = changed(changed(values, "apiKeys.keys", [f"{NEXT_API_KEY} load"]), "tickets.keys", [NEXT_TICKET_KEY])

        before = (await it.nodes())["nodes"][0]["fingerprint"]
        replace_weights(model / "model.safetensors")
        load = await it.change("weights, same path", [chart(changed(values, "model.weightsLabel", "two"))], nodes=2)
        assert not load.failures()
        after = (await it.nodes())["nodes"][0]["fingerprint"]
        assert {part for part in before if before[part] != after[part]} == {"checkpoint", "weights_label", "all"}


async def rotate_keys(it: Rollouts, chart: SteadyChart, values: dict[str, Any]) -> None:
    """API keys and ticket keys: append, put first, remove. No pod restarts, and no ticket is refused."""
    pods = list(it.cluster.pods)
    names = [(API_KEY, NEXT_API_KEY), (NEXT_API_KEY, API_KEY), (NEXT_API_KEY,)]
    tickets = [(TICKET_KEY, NEXT_TICKET_KEY), (NEXT_TICKET_KEY, TICKET_KEY), (NEXT_TICKET_KEY,)]
    for step, api, ticket in zip(("append", "put first", "remove"), names, tickets, strict=True):
        keyed = changed(changed(values, "apiKeys.keys", list(api)), "tickets.keys", list(ticket))
        load = await it.change(f"keys, {step}", [chart(keyed)], nodes=2)
        assert not load.failures()
        await asyncio.sleep(KEYS_READ_WITHIN_S)
        it.key = api[0]
    assert it.cluster.pods == pods
    [decode] = it.cluster.endpoints("decode")
    url = f"http://127.0.0.1:{decode.ports['http']}"
    assert read(url, "pdproxy_connector_refused_total") == 0
    assert read(it.cluster.operators(), "pdproxy_recomputed_total") == 0


def replace_weights(file: Path) -> None:
    """Write weights with the same answers: one value changes by the last bit. The new file is renamed into place."""
    tensors = load_file(file)
    name = min(tensors, key=lambda each: tensors[each].numel())
    tensors[name].view(-1)[0] *= 1.01
    save_file(tensors, file.with_suffix(".new"), metadata={"format": "pt"})
    file.with_suffix(".new").rename(file)


@pytest.mark.long
async def test_in_place(chart: SteadyChart, tmp_path: Path) -> None:
    values = changed(base(strategy="inPlace"), "decode.replicas", 2)
    async with a_cluster("in-place", tmp_path, room=3) as it:
        await it.install(chart(values), nodes=3)
        values = changed(values, NODE_TAG, NEXT_RELEASE)
        load = await it.change("node image in place, two decode nodes", [chart(values)], nodes=3)
        assert not load.failures()

        values = changed(values, "decode.replicas", 1)
        load = await it.change("scale-in, two decode nodes to one", [chart(values)], nodes=2)
        assert not load.failures()

        values = changed(values, NODE_TAG, FIRST_RELEASE)
        load = await it.change("node image in place, one decode node", [chart(values)], nodes=2)
        assert load.failures(), "the notes say that nothing is served meanwhile"
        assert all(each.failure.startswith("503: ") or REFUSED in each.failure for each in load.failures())

        values = changed(changed(values, "prefill.replicas", 2), "proxy.settings.policy.on_no_decode", "prefill")
        load = await it.change("a second prefill node, which may serve whole requests", [chart(values)], nodes=3)
        assert not load.failures()
        values = changed(values, NODE_TAG, NEXT_RELEASE)
        load = await it.change("node image in place, one decode node, two prefill nodes", [chart(values)], nodes=3)
        assert not load.failures()


@pytest.mark.long
async def test_blue_and_green(chart: SteadyChart, tmp_path: Path) -> None:
    proxy, sets = base(strategy="blueGreen"), base(strategy="blueGreen", proxy="demo-pdproxy")
    green = changed(sets, NODE_TAG, NEXT_RELEASE)
    emptied = changed(changed(sets, "prefill.replicas", 0), "decode.replicas", 0)
    async with a_cluster("blue-green", tmp_path, room=4) as it:
        front, blue, next_set = chart(proxy), chart(sets, "blue"), chart(green, "green")
        await it.install(front, blue, nodes=2)
        load = await it.change("node image blue/green: green comes", [front, blue, next_set], nodes=4)
        assert not load.failures()
        assert [cohort["complete"] for cohort in await it.cohorts()] == [True, True]
        away = ([front, chart(emptied, "blue"), next_set], [front, next_set])
        load = await it.change("node image blue/green: blue goes", *away, nodes=2)
        assert not load.failures()
        [cohort] = await it.cohorts()
        assert f"+{NEXT_RELEASE}+" in cohort["name"]
