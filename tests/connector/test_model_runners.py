"""A rank in the order in which each of vLLM's model runners calls it, with vLLM's own code in the runner's place.

V1 runs CPU nodes; V2 is the default on GPUs. Both post loads after the forward pass, unless a connector loads within
the step. 0.33's V2 may clear the metadata later than it takes the results, behind a drafter's forward pass; what it
does is written out below as it was read there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.forward_context import override_forward_context
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

from connector.counters import ReadOutcome
from connector.metadata import ConnectorMetadata, ReadEnd, WorkerReport
from connector.nixl_connector import NixlConnector
from connector.worker import ConnectorWorker
from tests.connector.rank import alias_of, lease_step, read_step
from tests.connector.worker import BLOCK_BYTES, NONCE, MakeRank, Prefill, agent, until

Runner = Callable[[ConnectorMetadata], KVConnectorOutput]
"""One step: metadata in, what the worker's process sends to the scheduler's out."""


class Forward:
    """In the place of a forward pass: what the rank has posted when it runs."""

    def __init__(self, worker: ConnectorWorker) -> None:
        self._worker = worker
        self.posted: list[int] = []

    def run(self) -> None:
        self.posted.append(len(agent(self._worker).blocks))


def facade(worker: ConnectorWorker) -> NixlConnector:
    """The class that vLLM's runners call, around a rank that was made without an engine."""
    connector = object.__new__(NixlConnector)
    connector.connector_worker, connector.connector_scheduler = worker, None
    connector._connector_metadata = None
    connector.kv_transfer_config = SimpleNamespace(kv_role="kv_both")
    return connector


def plan(metadata: ConnectorMetadata, *, within_step: bool) -> Any:
    """The part of vLLM's SchedulerOutput that the runners read."""
    return SimpleNamespace(kv_connector_metadata=metadata, has_sync_kv_loads=within_step, finished_req_ids=set())


@contextmanager
def context() -> Iterator[None]:
    with override_forward_context(SimpleNamespace()):
        yield


def v1(connector: NixlConnector, forward: Forward, *, within_step: bool, drafts: bool) -> Runner:
    def step(metadata: ConnectorMetadata) -> KVConnectorOutput:
        mixin = KVConnectorModelRunnerMixin
        with context(), mixin.maybe_get_kv_connector_output(plan(metadata, within_step=within_step), drafts) as output:
            forward.run()
        if drafts:
            forward.run()
            mixin.finalize_kv_connector()
        assert output is not None
        return output

    return step


class Active(ActiveKVConnector):
    """vLLM's, around a connector that is made already."""

    def __init__(self, connector: NixlConnector) -> None:
        self.kv_connector = connector
        self._pending_load_kwargs: dict[str, Any] | None = None
        self._disabled = False


class ActiveOf033(Active):
    """With a drafter, as in 0.33: what `post_forward(…, defer_finalize=True)` leaves to `finalize_step`."""

    def post_forward(self, finished_req_ids: set[str]) -> KVConnectorOutput:
        if self._pending_load_kwargs is not None:
            self._start_load_kv()
        results = self.kv_connector.get_transfer_results(finished_req_ids)
        return KVConnectorOutput(
            finished_sending=results.finished_sending or None,
            finished_recving=results.finished_recving or None,
            failed_recving=results.failed_recving,
            invalid_block_ids=self.kv_connector.get_block_ids_with_load_errors(),
            kv_connector_stats=self.kv_connector.get_kv_connector_stats(),
            kv_cache_events=self.kv_connector.get_kv_connector_kv_cache_events(),
            kv_connector_worker_meta=self.kv_connector.build_connector_worker_meta(),
        )

    def finalize_step(self) -> None:
        self.kv_connector.wait_for_save()
        self.kv_connector.clear_connector_metadata()


def v2(active: Active, forward: Forward, *, within_step: bool) -> Runner:
    def step(metadata: ConnectorMetadata) -> KVConnectorOutput:
        scheduled = plan(metadata, within_step=within_step)
        with context():
            active.pre_forward(scheduled)
            forward.run()
            active.finish_forward()
            output = active.post_forward(scheduled.finished_req_ids)
        if isinstance(active, ActiveOf033):
            forward.run()
            active.finalize_step()
        assert output is not None
        return output

    return step


def v2_without_a_forward(active: Active) -> Runner:
    def step(metadata: ConnectorMetadata) -> KVConnectorOutput:
        with context():
            output = active.no_forward(plan(metadata, within_step=False)).kv_connector_output
        return output or KVConnectorOutput()

    return step


RUNNERS = {
    "V1": lambda connector, forward: v1(connector, forward, within_step=False, drafts=False),
    "V1 with drafts": lambda connector, forward: v1(connector, forward, within_step=False, drafts=True),
    "V1, loads before": lambda connector, forward: v1(connector, forward, within_step=True, drafts=False),
    "V2": lambda connector, forward: v2(Active(connector), forward, within_step=False),
    "V2, loads before": lambda connector, forward: v2(Active(connector), forward, within_step=True),
    "V2 without a forward pass": lambda connector, forward: v2_without_a_forward(Active(connector)),
    "V2 of 0.33 with drafts": lambda connector, forward: v2(ActiveOf033(connector), forward, within_step=False),
    "V2 of 0.33, loads before": lambda connector, forward: v2(ActiveOf033(connector), forward, within_step=True),
}


@pytest.fixture(params=list(RUNNERS))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def start_runner(monkeypatch: pytest.MonkeyPatch, kind: str) -> Callable[[ConnectorWorker], tuple[Runner, Forward]]:
    def start_runner(worker: ConnectorWorker) -> tuple[Runner, Forward]:
        connector, forward = facade(worker), Forward(worker)
        monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", connector)
        return RUNNERS[kind](connector, forward), forward

    return start_runner


StartRunner = Callable[[ConnectorWorker], tuple[Runner, Forward]]


def test_a_read_is_posted_landed_judged_and_reported(
    make: MakeRank, prefill: Prefill, start_runner: StartRunner
) -> None:
    worker = make()
    step, _ = start_runner(worker)
    first = step(read_step("r", NONCE, prefill.port, local=[3, 4], remote=[7, 8, 9]))
    assert not first.finished_recving
    assert agent(worker).blocks[0] == ([3, 4], [8, 9])
    agent(worker).end(0)
    output = until(lambda: step(ConnectorMetadata()), lambda output: bool(output.finished_recving))
    assert (output.finished_recving, output.failed_recving) == ({"r"}, set())
    assert output.kv_connector_worker_meta == WorkerReport(
        reads_ended={"r": ReadEnd(NONCE, ReadOutcome.VERIFIED, 2 * BLOCK_BYTES, 0)}
    )
    assert output.kv_connector_stats is not None


def test_a_read_that_fails_says_how_in_the_same_output(
    make: MakeRank, prefill: Prefill, start_runner: StartRunner
) -> None:
    worker = make()
    step, _ = start_runner(worker)
    step(read_step("r", NONCE, prefill.port, local=[3], remote=[7]))
    agent(worker).end(0, "ERR")
    output = until(lambda: step(ConnectorMetadata()), lambda output: bool(output.finished_recving))
    assert output.failed_recving == {"r"}
    assert output.kv_connector_worker_meta == WorkerReport(
        reads_ended={"r": ReadEnd(NONCE, ReadOutcome.TRANSFER_FAILED)}
    )


def test_a_lease_is_held_read_and_let_go(make: MakeRank, start_runner: StartRunner) -> None:
    worker = make()
    step, _ = start_runner(worker)
    assert not step(lease_step("p")).finished_sending
    agent(worker).inbox.append(f"{alias_of('p')}#{NONCE}:1".encode())
    output = step(ConnectorMetadata())
    assert output.finished_sending == {"p"}
    assert output.kv_connector_worker_meta == WorkerReport(reads_seen={"p": {NONCE: 1}})


def test_a_release_ends_a_lease(make: MakeRank, start_runner: StartRunner) -> None:
    worker = make()
    step, _ = start_runner(worker)
    step(lease_step("p"))
    release = ConnectorMetadata()
    release.releases = frozenset({"p"})
    assert step(release).finished_sending == {"p"}


def test_reads_are_posted_on_the_side_of_the_forward_pass_that_vllm_chooses(
    make: MakeRank, prefill: Prefill, start_runner: StartRunner, kind: str
) -> None:
    worker = make()
    step, forward = start_runner(worker)
    step(read_step("r", NONCE, prefill.port, local=[3], remote=[7]))
    before = 1 if "before" in kind else 0
    assert forward.posted[:1] == ([] if kind == "V2 without a forward pass" else [before])


def test_metadata_is_gone_when_the_step_is_over(make: MakeRank, start_runner: StartRunner) -> None:
    worker = make()
    step, _ = start_runner(worker)
    step(lease_step("p"))
    connector = kv_transfer_state._KV_CONNECTOR_AGENT
    assert connector is not None
    assert not connector.has_connector_metadata()


def test_a_disabled_connector_is_left_alone(make: MakeRank, prefill: Prefill) -> None:
    """V2 turns it off for dummy runs, whose step has no metadata of the scheduler's."""
    worker = make()
    active = Active(facade(worker))
    active._disabled = True
    step = plan(read_step("r", NONCE, prefill.port, local=[3], remote=[7]), within_step=False)
    active.pre_forward(step)
    active.finish_forward()
    assert active.post_forward(set()) is None
    assert agent(worker).blocks == {}
