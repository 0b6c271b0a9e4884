"""Run a rendered chart on this machine, with the order of events that Kubernetes guarantees.

Controllers (Deployment, StatefulSet), endpoint slices and the kubelet are modelled as far as an upgrade needs them:

- a Deployment makes new pods up to `maxSurge` above its replicas, and deletes an old pod only when more pods than
  replicas are ready; a StatefulSet deletes its last old pod, and makes it anew once it is gone;
- a pod's endpoint is ready while its readiness probe passes; a deleted pod's endpoint is terminating and serves until
  the probe fails;
- a deleted pod first runs its `preStop` hook; then its first process gets SIGTERM, and SIGKILL at the end of the grace
  period, which begins with the deletion;
- a changed secret reaches running pods as changed files.

Containers are processes here (`containers`).
"""

import asyncio
import base64
import contextlib
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from deploy.local.node import Role
from deploy.local.paths import MODEL, ROOT
from deploy.local.ports import HOST, free_ports
from deploy.local.supervise import Part, Supervisor, inherited
from deploy.local.watchdog import parents
from tests.e2e.containers import Containers
from tests.helm.engine import Manifest, Manifests, only_container
from tests.nodes.discovery.apiserver import ApiServer

ROLES = {"prefill": Role.PREFILL, "decode": Role.DECODE}
PROBE_S = 0.25
"""Seconds between two readiness probes; a kubelet takes five."""
REFUSED = "the service has no endpoints"
PATIENCE_S = 600.0
"""Seconds for a whole change. Starting a pair of nodes takes a minute on two busy cores."""


@dataclass
class Workload:
    """The desired state of a Deployment or StatefulSet."""

    name: str
    kind: str
    component: str
    replicas: int
    surge: int
    template: Manifest
    labels: Mapping[str, str]

    @classmethod
    def of(cls, manifest: Manifest, services: Iterable[Manifest]) -> "Workload":
        """The workload of a manifest, with the labels that endpoint slices get from its pods' service."""
        spec, pod = manifest["spec"], manifest["spec"]["template"]["metadata"]["labels"]
        chosen = [each for each in services if each["spec"]["selector"].items() <= pod.items()]
        labels = {**chosen[0]["metadata"]["labels"], "kubernetes.io/service-name": chosen[0]["metadata"]["name"]}
        surge = spec.get("strategy", {}).get("rollingUpdate", {}).get("maxSurge", 0)
        component = pod["app.kubernetes.io/component"]
        name = manifest["metadata"]["name"]
        return cls(name, manifest["kind"], component, spec["replicas"], surge, spec["template"], labels)


@dataclass(eq=False)
class Pod:
    """A running pod. `listed`: endpoint slices may list it. `killed`: it outlived its grace period."""

    name: str
    workload: Workload
    template: Manifest
    part: Part
    ports: Mapping[str, int]
    listed: bool
    ready: bool = False
    terminating: bool = False
    killed: bool = False
    probing: asyncio.Task[None] | None = None
    ending: asyncio.Task[None] | None = None

    @property
    def spec(self) -> Manifest:
        """The pod's specification, from its workload's template."""
        found: Manifest = self.template["spec"]
        return found

    @property
    def alive(self) -> bool:
        """Whether the pod's processes run."""
        return self.part.process.poll() is None


class Cluster:
    """A context manager; leaving it ends every process that it started.

    Args:
        mounts: a folder for the files that pods mount: keys, settings, the model.
        room: how many pods with an engine the GPUs hold; more wait.
    """

    def __init__(self, supervisor: Supervisor, api: ApiServer, mounts: Path, room: int = 4) -> None:
        self._supervisor = supervisor
        self._api = api
        self._mounts = mounts
        self._containers = Containers(mounts)
        self._room = room
        self._numbers = itertools.count()
        self._services: list[Manifest] = []
        self._settings: dict[str, str] = {}
        self.pods: list[Pod] = []
        self.model = MODEL
        self.log: list[str] = []
        self._began = time.monotonic()

    async def __aenter__(self) -> "Cluster":
        return self

    async def __aexit__(self, *exc: object) -> None:
        for pod in self.pods:
            for task in (pod.probing, pod.ending):
                if task is not None:
                    task.cancel()
                    await asyncio.gather(task, return_exceptions=True)

    # -- what clients and operators see

    def endpoints(self, component: str) -> list[Pod]:
        """The pods of a component that its service routes to."""
        return [pod for pod in self.pods if pod.workload.component == component and pod.ready and not pod.terminating]

    def url(self) -> str:
        """The clients' port of a ready proxy, round robin. Raises ConnectError if none is ready, as a service
        refuses."""
        proxies = self.endpoints("proxy")
        if not proxies:
            raise httpx.ConnectError(REFUSED)
        return f"http://{HOST}:{proxies[next(self._numbers) % len(proxies)].ports['http']}"

    def operators(self) -> str:
        """The operators' port of a ready proxy; a closed port where none is ready."""
        proxies = self.endpoints("proxy")
        return f"http://{HOST}:{proxies[0].ports['admin'] if proxies else 1}"

    def secret(self, path: str) -> str:
        """The contents of a file that pods mount below `containers.MOUNTS`."""
        return (self._mounts / path).read_text()

    # -- controllers

    async def apply(self, *releases: Manifests) -> None:
        """Apply the releases, and wait until the old pods are gone. Raises TimeoutError after PATIENCE_S."""
        for release in releases:
            self._mount(release)
        self._services = [each for release in releases for each in release.of("Service")]
        services = [each for each in self._services if each["spec"].get("clusterIP") == "None"]
        fronts = [each for each in self._services if "pdproxy.io/port" in each["metadata"]["labels"]]
        wanted = [
            Workload.of(each, [*services, *fronts])
            for release in releases
            for each in release.of("Deployment") + release.of("StatefulSet")
        ]
        gone = {pod.workload.name for pod in self.pods} - {each.name for each in wanted}
        async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as group:
            for pod in [pod for name in gone for pod in self._of(name)]:
                await self._unlist(pod)  # its service is gone too
                self._delete(pod)
            for workload in wanted:
                control = self._deployment if workload.kind == "Deployment" else self._stateful_set
                group.create_task(control(workload))
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*(pod.ending for pod in self.pods if pod.ending is not None))

    def _of(self, name: str) -> list[Pod]:
        """The pods of a workload that are not deleted."""
        return [pod for pod in self.pods if pod.workload.name == name and not pod.terminating]

    async def _deployment(self, workload: Workload) -> None:
        while True:
            mine = self._of(workload.name)
            new = [pod for pod in mine if pod.template == workload.template]
            old = [pod for pod in mine if pod not in new]
            ready = [pod for pod in mine if pod.ready]
            if len(new) < workload.replicas and len(mine) < workload.replicas + workload.surge:
                await self._start(workload, f"{workload.name}-{next(self._numbers)}")
            elif len(ready) > workload.replicas or (len(mine) > workload.replicas and not old):
                self._delete((old or new)[-1])
            elif not old and len(ready) == len(mine) == workload.replicas:
                return
            else:
                await self._pause()

    async def _stateful_set(self, workload: Workload) -> None:
        names = [f"{workload.name}-{ordinal}" for ordinal in range(workload.replicas)]
        for pod in self._of(workload.name):
            if pod.name not in names:
                self._delete(pod)
        there = {pod.name for pod in self._of(workload.name)}
        for name in names:
            if name not in there:
                await self._start(workload, name)
        await self._until_ready(workload)
        for name in reversed(names):
            [pod] = [pod for pod in self._of(workload.name) if pod.name == name]
            if pod.template != workload.template:
                self._delete(pod)
                while pod in self.pods:
                    await self._pause()
                await self._start(workload, name)
                await self._until_ready(workload)

    async def _until_ready(self, workload: Workload) -> None:
        while not all(pod.ready for pod in self._of(workload.name)):
            await self._pause()

    async def _pause(self) -> None:
        for pod in self.pods:
            if not pod.terminating:
                pod.part.require_alive()
        await asyncio.sleep(PROBE_S)

    # -- the kubelet

    def note(self, text: str) -> None:
        """Add a line to the log of events."""
        self.log.append(f"{time.monotonic() - self._began:7.1f} s  {text}")

    async def _start(self, workload: Workload, name: str) -> None:
        if workload.component != "proxy":
            while sum(pod.workload.component != "proxy" for pod in self.pods) >= self._room:
                await self._pause()
        ports = dict(zip(("http", "admin", "side-channel"), free_ports(3), strict=True))
        if workload.component == "proxy":
            started = self._containers.proxy(workload.template, self._settings[workload.name], self._api.url, ports)
        else:
            started = self._containers.node(workload.template, ROLES[workload.component], self.model, ports)
        part = self._supervisor.start(f"{name}-{next(self._numbers)}", started.command, started.variables, ROOT)
        pod = Pod(name, workload, workload.template, part, ports, listed=workload.component != "proxy")
        self.pods.append(pod)
        self.note(f"{name} starts")
        pod.probing = asyncio.get_running_loop().create_task(self._probe(pod))

    def _mount(self, release: Manifests) -> None:
        """Write secrets and settings where pods read them, as the kubelet does: whole files, renamed."""
        for secret in release.of("Secret"):
            for key, value in secret["data"].items():
                folder = {"node.key": "access", "admin.token": "access", "api.keys": "keys", "ticket.keys": "tickets"}
                path = self._mounts / folder[key] / key
                path.parent.mkdir(parents=True, exist_ok=True)
                path.with_suffix(".new").write_bytes(base64.b64decode(value))
                path.with_suffix(".new").rename(path)
        for each in release.of("ConfigMap"):
            self._settings[each["metadata"]["name"]] = each["data"]["pdproxy.yaml"]

    async def _probe(self, pod: Pod) -> None:
        """Run the readiness probe and set the pod's endpoint by it, until the pod is gone."""
        probe = only_container(pod.template)["readinessProbe"]["httpGet"]
        url = f"http://{HOST}:{pod.ports[probe['port']]}{probe['path']}"
        async with httpx.AsyncClient(trust_env=False, timeout=5) as client:
            while True:
                try:
                    ready = (await client.get(url)).is_success
                except httpx.HTTPError:
                    ready = False
                if ready is not pod.ready:
                    pod.ready = ready
                    self.note(f"{pod.name} {'is' if ready else 'is not'} ready")
                    await self._publish(pod)
                await asyncio.sleep(PROBE_S)

    async def _publish(self, pod: Pod) -> None:
        if not pod.listed:
            return
        conditions = {"ready": pod.ready and not pod.terminating, "serving": pod.ready, "terminating": pod.terminating}
        await self._api.put(pod.part.name, HOST, port=pod.ports["http"], labels=pod.workload.labels, **conditions)

    async def _unlist(self, pod: Pod) -> None:
        pod.listed = False
        if pod.part.name in self._api.slices:
            await self._api.delete(pod.part.name)

    def _delete(self, pod: Pod) -> None:
        pod.terminating = True
        pod.ending = asyncio.get_running_loop().create_task(self._end(pod))

    async def _end(self, pod: Pod) -> None:
        began, grace = time.monotonic(), float(pod.spec["terminationGracePeriodSeconds"])
        self.note(f"{pod.name} is deleted")
        await self._publish(pod)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace):
                await self._pre_stop(pod)
        self.note(f"{pod.name} gets SIGTERM")
        if pod.alive:
            os.kill(min(pid for pid, parent in parents().items() if parent == pod.part.process.pid), signal.SIGTERM)
        left = max(0.0, grace - (time.monotonic() - began))
        try:
            await asyncio.to_thread(pod.part.process.wait, left)
        except subprocess.TimeoutExpired:
            pod.killed = True
        assert pod.probing is not None
        pod.probing.cancel()
        await asyncio.to_thread(self._supervisor.stop, pod.part)
        self.pods.remove(pod)
        self.note(f"{pod.name} is gone{', killed' if pod.killed else ''}")
        await self._unlist(pod)

    async def _pre_stop(self, pod: Pod) -> None:
        hook: dict[str, Any] = only_container(pod.template).get("lifecycle", {}).get("preStop", {})
        if "sleep" in hook:
            await asyncio.sleep(hook["sleep"]["seconds"])
        if "exec" in hook:
            python, option, script, address, port, *words = hook["exec"]["command"]
            assert (python, option, port) == ("python3", "-c", "8000")
            name = address.removeprefix("http://").partition(":")[0]
            assert name in {each["metadata"]["name"] for each in self._services}, f"there is no service {name}"
            script = script.replace("/proc/1/fd/1", str(pod.part.log) + ".preStop")
            command = [sys.executable, "-c", script, self.operators(), str(pod.ports["http"]), *words]
            variables = {**inherited(), "POD_IP": HOST, "NO_PROXY": HOST, "no_proxy": HOST}
            asked = await asyncio.create_subprocess_exec(*command, env=variables)
            try:
                await asked.wait()
            finally:
                if asked.returncode is None:
                    asked.kill()
                    await asked.wait()
