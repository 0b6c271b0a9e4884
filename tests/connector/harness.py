"""A real vLLM scheduler with our connector in it, on a CPU, and no model: the test plays the workers.

The model is the repository's tiny hybrid one, of which only the config is read; its cache groups are made here, with
blocks of 16 tokens, so that small prompts fill them.
"""

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from copy import copy
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash, resolve_kv_cache_block_sizes
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheSpec, MambaSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from connector import node_fingerprint
from connector.counters import ReadOutcome
from connector.metadata import ConnectorMetadata, ReadEnd, WorkerReport
from connector.resumed_requests import CPU_WORKER
from connector.scheduler import ConnectorScheduler
from connector.stats import COUNTS
from connector.weights import WeightsSource, checkpoint_text

MODEL = Path(__file__).parents[2] / "deploy" / "local" / "model" / "tiny-hybrid"
BLOCK = 16
MODEL_PARTS = node_fingerprint.model_parts


def attention() -> KVCacheSpec:
    """A full-attention group."""
    return FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=16, dtype=torch.bfloat16)


def state(mode: str) -> KVCacheSpec:
    """A mamba group in one of vLLM's cache modes, with a page as large as attention's."""
    page = BLOCK * 2 * 16 * 2
    return MambaSpec(
        block_size=BLOCK if mode != "none" else 4096,
        shapes=((page // 2,),),
        dtypes=(torch.bfloat16,),
        mamba_cache_mode=mode,
    )


HYBRID = (attention(), state("align"))
DENSE = (attention(),)


@dataclass(frozen=True, slots=True)
class Pace:
    """How an engine steps. `behind`: how many more steps are planned before a step's output is processed.

    `v2`: for vLLM's newer model runner, with which the scheduler counts otherwise.
    """

    scheduler: type[Scheduler]
    behind: int
    v2: bool = False


IN_STEP = Pace(Scheduler, 0)
"""The pace of a CPU node."""
ONE_BEHIND = Pace(AsyncScheduler, 1)
"""Async scheduling, the default of GPU nodes."""
ONE_BEHIND_V2 = Pace(AsyncScheduler, 1, v2=True)
"""The pace of GPU nodes by default."""
PACES: Mapping[str, Pace] = {"in step": IN_STEP, "one behind": ONE_BEHIND, "one behind, V2": ONE_BEHIND_V2}
PACE: ContextVar[Pace] = ContextVar("pace", default=IN_STEP)
"""The pace of the nodes that a test makes; `at_pace` sets it."""


@contextmanager
def at_pace(pace: Pace) -> Iterator[None]:
    """Nodes that are made inside keep this pace."""
    token = PACE.set(pace)
    yield
    PACE.reset(token)


def make_scheduler(config: VllmConfig, kv_cache: KVCacheConfig) -> Scheduler:
    """As vLLM's engine makes it, at the test's pace."""
    block_size, hash_block_size = resolve_kv_cache_block_sizes(kv_cache, config)
    pace = PACE.get()
    config.scheduler_config.async_scheduling = pace.behind > 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(node_fingerprint, "checkpoint_text", _checkpoint_text)
        patch.setattr(node_fingerprint, "model_parts", _model_parts)
        scheduler = pace.scheduler(
            vllm_config=config,
            kv_cache_config=kv_cache,
            structured_output_manager=StructuredOutputManager(config),
            block_size=block_size,
            hash_block_size=hash_block_size,
            log_stats=True,
        )
    scheduler.use_v2_model_runner = pace.v2
    return scheduler


@dataclass
class Node:
    """One engine's scheduler; `step` runs it once, with the workers' output that the test gives.

    At a pace of one behind it comes with the output of the step before: `ahead` has the steps whose output is not
    processed yet. `says`: what requests sample, one token after the other, instead of always the token 7.
    """

    scheduler: Scheduler
    hasher: Any
    ahead: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = field(default_factory=deque)
    metas: list[ConnectorMetadata] = field(default_factory=list)
    planned: list[SchedulerOutput] = field(default_factory=list)
    scheduled: list[dict[str, int]] = field(default_factory=list)
    says: dict[str, list[int]] = field(default_factory=dict)
    totals: Counter[tuple[str, ...]] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        for _ in range(PACE.get().behind):
            plan = self.scheduler.schedule()
            self.ahead.append((plan, self._run(plan)))

    @property
    def side(self) -> ConnectorScheduler:
        """Our half of the connector."""
        side = self.scheduler.connector.connector_scheduler
        assert isinstance(side, ConnectorScheduler)
        return side

    @property
    def free_blocks(self) -> int:
        """Blocks that no request holds."""
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def add(
        self, request_id: str, tokens: Sequence[int], params: Any = None, *, max_tokens: int = 4, **more: Any
    ) -> Request:
        """Send a request in, with whatever `kv_transfer_params`."""
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **more.pop("sampling", {}))
        sampling.extra_args = {"kv_transfer_params": params}
        request = Request(
            request_id=request_id,
            prompt_token_ids=list(tokens),
            sampling_params=sampling,
            pooling_params=None,
            block_hasher=self.hasher,
            **more,
        )
        self.scheduler.add_request(request)
        return request

    def step(self, seen: KVConnectorOutput | None = None) -> list[EngineCoreOutput]:
        """Plan, run (every scheduled request samples a token once its prompt is done), take the output in."""
        outputs = self._step(seen)
        for stats in (each.scheduler_stats.kv_connector_stats for each in outputs if each.scheduler_stats):
            self._count((stats or {}).get(COUNTS, ()))
        return [output for each in outputs for output in each.outputs]

    def _step(self, seen: KVConnectorOutput | None) -> list[EngineCoreOutputs]:
        plan = self.scheduler.schedule()
        self._keep(plan.kv_connector_metadata)
        self.planned.append(plan)
        self.scheduled.append(dict(plan.num_scheduled_tokens))
        self.ahead.append((plan, self._run(plan)))
        plan, output = self.ahead.popleft()
        output.kv_connector_output = seen
        return list(self.scheduler.update_from_output(plan, output).values())

    def _keep(self, meta: Any) -> None:
        assert isinstance(meta, ConnectorMetadata)
        self.metas.append(meta)

    def _run(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        names = list(plan.num_scheduled_tokens)
        sampled = []
        for name in names:
            request = self.scheduler.requests[name]
            done = request.num_computed_tokens >= request.num_tokens
            sampled.append([self.says[name].pop(0) if name in self.says else 7] if done else [])
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=sampled,
        )

    def run_out(self, request_id: str, steps: int = 50) -> list[EngineCoreOutput]:
        """Step until the request ends; its outputs."""
        mine: list[EngineCoreOutput] = []
        for _ in range(steps):
            mine += [output for output in self.step() if output.request_id == request_id]
            if mine and mine[-1].finish_reason is not None:
                return mine
        raise AssertionError(f"{request_id} did not end within {steps} steps")

    def abort(self, request_id: str) -> None:
        """The client is gone."""
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def counts(self, name: str) -> dict[str, int]:
        """One counter from the start, by its label values joined with a slash."""
        self._count(self.side.counters.drain().counts)
        return {"/".join(labels): count for (counter, *labels), count in self.totals.items() if counter == name}

    def _count(self, counts: Iterable[tuple[str, Sequence[str], int]]) -> None:
        for name, labels, count in counts:
            self.totals[name, *labels] += count


def make_node(
    role: str = "kv_producer",
    groups: Sequence[KVCacheSpec] = HYBRID,
    *,
    num_blocks: int = 400,
    engine_id: str | None = None,
    extra: Mapping[str, Any] | None = None,
    unit: int | None = None,
    scheduling: Mapping[str, Any] | None = None,
) -> Node:
    """An engine's scheduler, as vLLM builds it, on `groups`. `unit`: of `--prefix-match-unit`; `scheduling`: fields of
    vLLM's `SchedulerConfig`."""
    config = _config(role, groups, engine_id or role, num_blocks, extra or {})
    vars(config.scheduler_config).update(scheduling or {})
    config.cache_config.prefix_match_unit = unit
    cache = KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec([f"layer{index}"], spec) for index, spec in enumerate(groups)],
    )
    hash_fn = get_hash_fn_by_name("sha256")
    init_none_hash(hash_fn)
    scheduler = make_scheduler(config, cache)
    return Node(scheduler, get_request_block_hasher(scheduler.hash_block_size, hash_fn))


def _config(
    role: str, groups: Sequence[KVCacheSpec], engine_id: str, num_blocks: int, extra: Mapping[str, Any]
) -> VllmConfig:
    modes = [spec.mamba_cache_mode for spec in groups if isinstance(spec, MambaSpec)]
    config = _copied(_template(role, modes[0] if modes else "none"))
    config.cache_config.num_gpu_blocks = num_blocks
    config.kv_transfer_config = _transfer(role, engine_id, extra)
    return config


def _transfer(role: str, engine_id: str, extra: Mapping[str, Any]) -> KVTransferConfig:
    return KVTransferConfig(
        kv_connector="NixlConnector",
        kv_connector_module_path="connector.nixl_connector",
        kv_role=role,
        engine_id=engine_id,
        kv_load_failure_policy="recompute",
        kv_connector_extra_config=dict(extra),
    )


@cache
def _template(role: str, mode: str) -> VllmConfig:
    """vLLM's configuration of a node's settings; made once for each kind, for that takes a third of a node's time."""
    return VllmConfig(
        model_config=copy(_model()),
        cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=True, mamba_cache_mode=mode),
        scheduler_config=SchedulerConfig(
            max_num_seqs=32,
            max_num_batched_tokens=4096,
            max_model_len=4096,
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
            disable_hybrid_kv_cache_manager=False,
        ),
        parallel_config=ParallelConfig(worker_cls=f"connector.{CPU_WORKER}"),
        device_config=DeviceConfig("cpu"),
        kv_transfer_config=_transfer(role, "template", {}),
    )


def _copied(config: VllmConfig) -> VllmConfig:
    """With parts of its own, which the engine writes to; what is in those, as the model's `config.json`, is shared."""
    made = copy(config)
    for name in (each.name for each in fields(VllmConfig)):
        part = getattr(config, name)
        if is_dataclass(part):
            setattr(made, name, copy(part))
    return made


@cache
def _checkpoint_text(source: WeightsSource) -> str:
    """The fingerprint's part, once for each model: reading its weights takes half of a node's time."""
    return checkpoint_text(source)


def _model_parts(config: VllmConfig) -> dict[str, str]:
    """The fingerprint's part of the model that every node here has, once; of any other as the node makes it."""
    return _own_model_parts() if config.model_config.hf_config is _model().hf_config else MODEL_PARTS(config)


@cache
def _own_model_parts() -> dict[str, str]:
    return MODEL_PARTS(_template("kv_producer", "none"))


@cache
def _model() -> ModelConfig:
    """The model's configuration: reading it takes longer than anything else of a node."""
    return ModelConfig(model=str(MODEL), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=4096)


def prompt(length: int, seed: int = 0) -> list[int]:
    """Token ids, different for every seed from the first on."""
    return [(seed * 7919 + index * 31) % 900 + 10 for index in range(length)]


def sent(*request_ids: str, report: WorkerReport | None = None) -> KVConnectorOutput:
    """The workers' output: these requests' blocks may be freed."""
    return KVConnectorOutput(finished_sending=set(request_ids), kv_connector_worker_meta=report)


def received(node: Node, *request_ids: str) -> KVConnectorOutput:
    """The workers' output: these reads are verified."""
    ends = {name: ReadEnd(nonce_of(node, name), ReadOutcome.VERIFIED) for name in request_ids}
    return KVConnectorOutput(finished_recving=set(request_ids), kv_connector_worker_meta=WorkerReport(reads_ended=ends))


def lost(node: Node, outcome: ReadOutcome, *request_ids: str, stalled: Iterable[str] = ()) -> KVConnectorOutput:
    """The workers' output: these reads failed."""
    ends = {name: ReadEnd(nonce_of(node, name), outcome) for name in request_ids}
    report = WorkerReport(reads_ended=ends, stalled=dict.fromkeys(stalled, 1))
    return KVConnectorOutput(
        finished_recving=set(request_ids), failed_recving=set(request_ids), kv_connector_worker_meta=report
    )


def probed(node: Node, *, passed: bool = True) -> KVConnectorOutput:
    """The workers' output: the probes that were ordered last have ended so."""
    ended = dict.fromkeys(next(meta.probes for meta in reversed(node.metas) if meta.probes), 1)
    report = WorkerReport(paths_passed=ended) if passed else WorkerReport(paths_failed=ended)
    return KVConnectorOutput(kv_connector_worker_meta=report)


def nonce_of(node: Node, request_id: str) -> str:
    """The nonce of the last read that was ordered for a request."""
    for meta in reversed(node.metas):
        if request_id in meta.reads:
            return meta.reads[request_id].nonce
    raise AssertionError(f"no read was ordered for {request_id}")


def take_ticket(node: Node, tokens: Sequence[int], request_id: str = "p-0", **ours: Any) -> dict[str, Any]:
    """Run a prefill leg to its end; the ticket as the proxy would get it."""
    node.add(request_id, tokens, {"do_remote_decode": True, **ours}, max_tokens=1)
    ticket = node.run_out(request_id)[-1].kv_transfer_params
    assert ticket is not None
    return dict(ticket)
