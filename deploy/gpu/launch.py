"""What is started: each node's command and environment, and the proxy's settings. Nothing is started here.

GPU nodes are compose.yaml's (`compose_node`), CPU nodes those of `make demo` (`deploy.local.node`).
"""

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from deploy.gpu.compose_node import plain, read_node
from deploy.gpu.options import Machine, Options
from deploy.local.node import NodeSpec, Role, command, environment, on_free_ports
from deploy.local.ports import HOST

KEYS_VARIABLE = "PDPROXY_TICKET_KEYS"
ALONE = "alone"
TAKEN = ("UCX_TLS", "UCX_NET_DEVICES", "RESUME_ARGS", "COMPILE_CACHE")
"""Of compose's variables, those that say how nodes run on this machine: taken from the environment, where they are set;
PREFILL_ARGS and DECODE_ARGS too."""
TELLING = {"UCX_LOG_LEVEL": "info"}
"""Has UCX say which transports and devices it uses."""
PROXY_SETTINGS: Mapping[str, str] = {
    # A node that comes back is taken in within seconds, so that a run does not wait for it.
    "PDPROXY_HEALTH_INTERVAL": "1",
    "PDPROXY_HEALTH_COOL_DOWN": "1",
    "PDPROXY_HEALTH_SLOW_START": "0",
    # With one decode node its streams have nowhere else to go.
    "PDPROXY_POLICY_ON_NO_DECODE": "prefill",
}
"""What the proxy of a run has beside its defaults; a variable that is set in the environment wins."""


@dataclass(frozen=True)
class Launch:
    """One node: its name, role and ports, how it is started, and what it adds to the environment."""

    spec: NodeSpec
    command: tuple[str, ...]
    environment: Mapping[str, str]

    def shown(self, hidden: str) -> str:
        """A line for a shell, with `hidden` (the ticket key) left out."""
        pairs = {name: "…" if value == hidden else value for name, value in self.environment.items()}
        assigned = " ".join(f"{name}={shlex.quote(value)}" for name, value in sorted(pairs.items()))
        return f"{assigned} {shlex.join(self.command)}"


def pair(options: Options, key: str) -> list[Launch]:
    """A prefill node and the decode nodes, on free ports, with one key that signs tickets."""
    specs = [NodeSpec("prefill", Role.PREFILL, 0, 0)]
    specs += [NodeSpec(name, Role.DECODE, 0, 0) for name in options.decode_names]
    gpus = [options.prefill_gpu, *options.decode_gpus]
    return [_launch(options, spec, gpu, key) for spec, gpu in zip(on_free_ports(*specs), gpus, strict=True)]


def alone(options: Options) -> Launch:
    """One plain engine that does all by itself, on the prefill node's GPU: what the others are compared with."""
    [spec] = on_free_ports(NodeSpec(ALONE, Role.PLAIN, 0, 0))
    launch = _launch(replace(options, decode_gpus=()), spec, options.prefill_gpu, "")
    kept = {name: value for name, value in launch.environment.items() if name != "VLLM_PLUGINS"}
    return replace(launch, command=plain(launch.command), environment=kept)


def proxy_settings(given: Mapping[str, str], options: Options) -> dict[str, str]:
    """The proxy's environment variables: ours, and over them those of this process."""
    ours = {**PROXY_SETTINGS, "PDPROXY_POLICY_TICKET_LIFE": str(options.lease_seconds)}
    return {name: given.get(name, value) for name, value in ours.items()}


def _launch(options: Options, spec: NodeSpec, gpu: str, key: str) -> Launch:
    return _on_cpu(options, spec, key) if options.machine is Machine.CPU else _on_gpu(options, spec, gpu, key)


def _on_cpu(options: Options, spec: NodeSpec, key: str) -> Launch:
    lease = {} if spec.role is Role.PLAIN else {"kv_lease_duration": options.lease_seconds}
    keys = {KEYS_VARIABLE: key} if key else {}
    more = {**TELLING, **keys}
    whole = replace(spec, max_model_len=options.max_model_len, connector_config=lease, more_environment=more)
    return Launch(whole, tuple(command(whole)), environment(whole, {}))


def _on_gpu(options: Options, spec: NodeSpec, gpu: str, key: str) -> Launch:
    service = "decode" if spec.role is Role.DECODE else "prefill"
    prefix = service.upper()
    node = read_node(
        service,
        {
            "MODEL": options.model,
            "MODEL_REVISION": options.revision,
            "MAX_MODEL_LEN": str(options.max_model_len),
            "GPU_MEMORY": str(options.memory_of(gpu)),
            "LEASE_SECONDS": str(options.lease_seconds),
            f"{prefix}_GPUS": gpu,
            f"{prefix}_PORT": str(spec.port),
            f"{prefix}_SIDE_CHANNEL_PORT": str(spec.side_channel_port),
            **{name: os.environ[name] for name in (*TAKEN, f"{prefix}_ARGS") if name in os.environ},
            **({KEYS_VARIABLE: key} if key else {}),
        },
    )
    return Launch(spec, (*serve(), *node.arguments, "--host", HOST), {**TELLING, **node.environment})


def serve() -> Sequence[str]:
    """`vllm serve`, as the node's image has it: of this very environment, if it is there."""
    beside = Path(sys.executable).with_name("vllm")
    return (str(beside) if beside.exists() else "vllm", "serve")
