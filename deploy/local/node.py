"""One vLLM node on this machine, without a GPU: its command line, its environment, its start."""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path

from deploy.local.paths import MODEL, ROOT
from deploy.local.ports import HOST, free_row, require_free
from deploy.local.supervise import Part, Supervisor, inherited

SERVER = "deploy.local.server"
SERVED_NAME = "tiny-hybrid"
WORKER = "pdproxy_connector.cpu_worker.SeededCPUWorker"
"""A request with a seed ends vLLM 0.32 on a CPU without it."""

MAX_NUM_SEQS = 128
"""Requests that a small node works on at a time: what vLLM has by default on one CPU node."""
EXECUTOR = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""One process for scheduler and model, as on one GPU. By its whole name: vLLM turns "uni" into "mp" on a CPU, whose two
processes wait for each other by spinning, which two cores cannot afford."""

BLOCK_SIZE = 256
"""Tokens in a block of the tiny model, which vLLM comes to by itself. Said all the same: vLLM 0.32's CPU build forgets
what it came to in the engine's process (`EngineCore` runs `VllmConfig.__post_init__` again), and then no state is kept
of a prompt that ends more than 128 tokens after a block."""

PREFIX_MATCH_UNIT = 16
"""Tokens between the boundaries at which a hand-over of the tiny model may end, and its decode node resume."""

KV_EVENTS = {"enable_kv_cache_events": True, "endpoint": "tcp://*:0", "replay_endpoint": "tcp://*:0"}
"""A node tells what it caches, on ports that the system chooses, at `VLLM_HOST_IP` alone (vLLM binds an endpoint with a
port of its own at all addresses). `GET /kv_event_sources` says which ports."""
HASH_ALGORITHM = "sha256_cbor"
"""The prefix cache's hash: the one that vLLM documents as reproducible outside of it."""

PLUGINS = "pdproxy_connector,pdproxy_endpoints"
"""vLLM loads the second, which adds a route, only where it is named; naming one filters all."""

ENOUGH_BLOCKS = 2048
"""128 MiB of the tiny model's cache. Memory that is never used still costs time: a node touches all of it to start."""


class Role(Enum):
    """A node's role. A `PLAIN` node has no connector."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"
    PLAIN = "plain"


KV_ROLES = {Role.PREFILL: "kv_producer", Role.DECODE: "kv_consumer", Role.BOTH: "kv_consumer"}
"""vLLM's names for them."""


@dataclass(frozen=True)
class NodeSpec:
    """How to start one node.

    `gpu_blocks`: size of the KV cache in blocks; few for a node that overflows on purpose (vLLM refuses fewer than the
    longest prompt needs); None leaves it to `VLLM_CPU_KVCACHE_SPACE`, 1 GiB. `connector_module`: where vLLM finds the
    connector, "" for vLLM's own; it gets `connector_config` as `kv_connector_extra_config`. `more_arguments` and
    `more_environment` come last and so win. `side_channel_port` is the first data-parallel rank's; the others take
    those that follow it. `block_size`, `prefix_match_unit`: in tokens; None leaves them to vLLM, as the unit must be
    for a model without state groups, whose node would end at start.
    """

    name: str
    role: Role
    port: int
    side_channel_port: int
    model: Path = MODEL
    served_name: str = SERVED_NAME
    max_model_len: int = 4096
    gpu_blocks: int | None = ENOUGH_BLOCKS
    block_size: int | None = BLOCK_SIZE
    prefix_match_unit: int | None = PREFIX_MATCH_UNIT
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    connector_module: str = "pdproxy_connector.nixl_connector"
    connector_config: Mapping[str, object] = field(default_factory=dict)
    more_arguments: tuple[str, ...] = ()
    more_environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def url(self) -> str:
        """Its address, once it has a port."""
        return f"http://{HOST}:{self.port}"


@dataclass(frozen=True)
class Node:
    """A started node; not ready until `/health` says so."""

    spec: NodeSpec
    part: Part

    @property
    def url(self) -> str:
        return self.spec.url


def kv_transfer_config(spec: NodeSpec) -> dict[str, object]:
    """Our connector under vLLM's name for its own: the module path wins, and checks made by name still pass."""
    return {
        "kv_connector": "NixlConnector",
        **({"kv_connector_module_path": spec.connector_module} if spec.connector_module else {}),
        "kv_role": KV_ROLES[spec.role],
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            **({"pdproxy_roles": ["prefill", "decode"]} if spec.role is Role.BOTH else {}),
            **spec.connector_config,
        },
    }


def command(spec: NodeSpec) -> list[str]:
    """Return the command line.

    No `--mamba-cache-mode`: with prefix caching vLLM chooses `align` for models with mamba layers by itself, and a node
    of any other model that is told so dies of its first request. The state's type is said, for vLLM chooses it by the
    CPU (float32 where there is AVX-512 BF16, else the model's), and with it the block size: nodes on two kinds of CPU
    would not go together.
    """
    line = [sys.executable, "-m", SERVER, "--model", str(spec.model), "--served-model-name", spec.served_name]
    line += ["--host", HOST, "--port", str(spec.port), "--max-model-len", str(spec.max_model_len)]
    line += ["--max-num-seqs", str(MAX_NUM_SEQS)]
    line += ["--dtype", "bfloat16", "--mamba-ssm-cache-dtype", "float32", "--enforce-eager", "--enable-prefix-caching"]
    line += ["--enable-prompt-tokens-details", "--worker-cls", WORKER]
    if spec.tensor_parallel_size > 1:
        line += ["--tensor-parallel-size", str(spec.tensor_parallel_size)]
    else:
        line += ["--distributed-executor-backend", EXECUTOR]
    if spec.data_parallel_size > 1:
        line += ["--data-parallel-size", str(spec.data_parallel_size)]
    line += [each for flag, value in _cache_options(spec) if value is not None for each in (flag, str(value))]
    if spec.role is not Role.PLAIN:
        line += ["--kv-transfer-config", json.dumps(kv_transfer_config(spec))]
        line += ["--kv-events-config", json.dumps(KV_EVENTS), "--prefix-caching-hash-algo", HASH_ALGORITHM]
    return [*line, *spec.more_arguments]


def _cache_options(spec: NodeSpec) -> Iterator[tuple[str, int | None]]:
    yield "--num-gpu-blocks-override", spec.gpu_blocks
    yield "--block-size", spec.block_size
    yield "--prefix-match-unit", spec.prefix_match_unit


def environment(spec: NodeSpec, base: Mapping[str, str]) -> dict[str, str]:
    """Return what a small, offline node adds to `base`. Units: cache space in GiB (whole ones), threads per process."""
    return {
        **base,
        **({} if spec.role is Role.PLAIN else {"VLLM_PLUGINS": PLUGINS}),
        "VLLM_NIXL_SIDE_CHANNEL_HOST": HOST,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(spec.side_channel_port),
        "VLLM_HOST_IP": HOST,
        "VLLM_SSM_CONV_STATE_LAYOUT": "DS",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        # Some of vLLM's functions are compiled even with --enforce-eager, on first use and in mid-request: seconds of
        # compiler, while leases run.
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "NO_PROXY": HOST,
        "PYTHONUNBUFFERED": "1",
        **spec.more_environment,
    }


def start_node(supervisor: Supervisor, spec: NodeSpec) -> Node:
    """Start a node. Raises PortTakenError if one of its ports is in use."""
    require_free(spec.port, f"HTTP of {spec.name}", "choose another one, or end whatever listens there")
    for port in side_channel_ports(spec):
        require_free(
            port,
            f"NIXL side channel of {spec.name}",
            "vLLM would hang while starting, without a word; choose another one, or end whatever listens there",
        )
    return Node(spec, supervisor.start(spec.name, command(spec), environment(spec, inherited()), ROOT))


def side_channel_ports(spec: NodeSpec) -> range:
    """One for each data-parallel rank; a plain node has none."""
    ranks = 0 if spec.role is Role.PLAIN else spec.data_parallel_size
    return range(spec.side_channel_port, spec.side_channel_port + ranks)


def on_free_ports(*specs: NodeSpec) -> list[NodeSpec]:
    """Return the specs with every port that is 0 replaced by a free one."""
    row = iter(free_row(sum(1 + spec.data_parallel_size for spec in specs)))
    return [_on(spec, next(row), [next(row) for _ in range(spec.data_parallel_size)]) for spec in specs]


def _on(spec: NodeSpec, port: int, side_channels: Sequence[int]) -> NodeSpec:
    return replace(spec, port=spec.port or port, side_channel_port=spec.side_channel_port or side_channels[0])
