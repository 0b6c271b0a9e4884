"""The run-book for GPUs: `python -m deploy.gpu --model NAME --revision COMMIT`; `--cpu`: a dry run without any.

It starts a prefill node, decode nodes and the proxy, compares answers with those of one engine, attacks, kills nodes,
measures, and packs all that it found into one archive. docs/gpu.md says what each step shows.
"""

import argparse
import http.client
import io
import json
import os
import platform
import re
import secrets
import subprocess
import sys
import tarfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import distributions
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

import httpx

from connector.side_channel import NEEDS_KEY
from deploy.bench.engines.legs import TO_HAND_OVER, Connection
from deploy.bench.rounds import BenchError
from deploy.local import bench_serve, node
from deploy.local.model.quiz import MOST_LINES, TOKENS_PER_LINE, quiz, recite
from deploy.local.node import Node, NodeSpec, Role
from deploy.local.paths import MODEL, ROOT, RUNS
from deploy.local.ports import HOST, PortTakenError
from deploy.local.readiness import NotReadyError
from deploy.local.stack import ProxySpec, Until, await_nodes, await_proxy, start_proxy
from deploy.local.supervise import PartEndedError, Stopped, Supervisor, inherited, stop_signals
from deploy.local.wait_joined import NodeRefusedError
from tests.e2e.metrics_reader import becomes_true, read
from tests.e2e.process_faults import ProcessFault, go_on, strike
from tests.e2e.strangers import shake_hands

ADVICE = {
    "preflight": "pip install nixl==1.5.1 && pip install . ./connector, where vLLM and the GPUs are (docs/install.md)",
    "start": "read logs/. Out of memory: docs/memory.md. A model without mamba layers: RESUME_ARGS= in the environment",
    "answers": "logs/ says why; docs/metrics.md, 'Reads', explains each outcome; docs/routing.md, 'KV events'",
    "attacks": "do not serve with these nodes: open an issue, with the archive",
    "kills": "logs/proxy.log names the fault; docs/failures.md says what should have followed",
    "measure": "bench/ and logs/ name each fault. Too much: fewer --concurrencies, or shorter --lengths",
    "collect": "make room on the disk",
}
"""The steps in order, each with what to do where a check of it fails."""
KILLS = (
    (Role.DECODE, ProcessFault.KILLED),
    (Role.PREFILL, ProcessFault.KILLED),
    (Role.DECODE, ProcessFault.STOPPED),
)
STREAMS = 8
"""Streams under each kill."""
DECISIVE = 0.5
"""Nats by which the best token led: rounding changes less."""
TELLING = 8
"""Tokens of an answer that tells something."""
LEASE_S = 30.0
"""A node's default: it holds for so long what nobody reads."""
LOADED_WITHIN_S, BENCH_WITHIN_S, ANSWERED_WITHIN_S, COUNTED_WITHIN_S = 3600.0, 1800.0, 300.0, 60.0
LONGEST_LIST = MOST_LINES * TOKENS_PER_LINE
READS, REFUSED = "pdproxy_connector_reads_total", "pdproxy_connector_refused_total"
HELD = (
    *("vllm:kv_cache_usage_perc", "vllm:num_requests_running", "vllm:num_requests_waiting"),
    *("pdproxy_requests_active", "pdproxy_requests_queued"),
)
"""Metrics of nodes and proxy that are 0 where nothing runs."""
PACKAGES = """import sys, nixl._api, torch
import pdproxy.app.run, pdproxy_connector.endpoints, pdproxy_connector.nixl_connector as connector
connector.require_tested(None)
assert torch.cuda.device_count() >= int(sys.argv[1]), f"torch sees {torch.cuda.device_count()} GPUs"
print("all are there")"""
SECRET = re.compile(
    rb"hf_[A-Za-z0-9]{16,}|\bsk-[A-Za-z0-9_-]{16,}|(?<=bearer )[A-Za-z0-9._~+/=-]{8,}"
    rb"|(?<=://)[^/\s:@\"']{1,128}:[^/\s@\"']{1,128}(?=@)"
    rb"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?-----END [A-Z ]*PRIVATE KEY-----",
    re.DOTALL | re.IGNORECASE,
)
"""A token of the hub, an API key, an Authorization header, a password in an address, a private key."""
FAILURES = (
    *(PortTakenError, NotReadyError, PartEndedError, NodeRefusedError, BenchError, AssertionError, ValueError, OSError),
    *(httpx.HTTPError, http.client.HTTPException, subprocess.SubprocessError),
)
"""Errors that end a step, each told in a line."""
Params = dict[str, Any]
Known = tuple[Params, str]
"""A question, and the answer of one engine."""
Pieces = list[tuple[float, str]]
"""The texts of a stream, and when each came, in monotonic seconds; the first, "", when the request was sent."""
Meanwhile = Callable[[Sequence[Pieces]], None]


def options_of(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line, parsed. Raises SystemExit, with a message, for options that do not go together."""
    parser = argparse.ArgumentParser(prog="python -m deploy.gpu", description=(__doc__ or "").partition("\n\n")[2])
    either, add = parser.add_mutually_exclusive_group(required=True), parser.add_argument
    either.add_argument("--cpu", action="store_true", help="the same steps on CPUs with a tiny model: a dry run")
    either.add_argument("--model", help="a name on the hub, or a folder")
    add("--revision", default="main", metavar="COMMIT", help="of a model on the hub")
    add("--folder", type=Path, help="a new folder for results and logs (default: .run/gpu-TIME)")
    add("--gpus", nargs="+", metavar="GPU", default=["0", "1"], help="of prefill and decode nodes (default: 0 1)")
    add("--lengths", type=int, nargs="+", metavar="TOKENS", default=[1000, 8000], help="of prompts (1000 8000)")
    add("--concurrencies", type=int, nargs="+", metavar="N", default=[1, 8, 32], help="of loads (1 8 32)")
    add("flags", nargs="*", metavar="-- FLAG", help="of `vllm serve`, for every node: -- --max-model-len=8192")
    parser.set_defaults(folder=RUNS / f"gpu-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}")
    if "--cpu" in arguments:
        parser.set_defaults(model=str(MODEL), lengths=[300, 1500], concurrencies=[2])
    asked = parser.parse_args(arguments)
    if not Path(asked.model).is_dir() and not re.fullmatch(r"[0-9a-f]{40}", asked.revision):
        parser.error(f"{asked.model} is no folder: give --revision the commit of its page on the hub (40 digits)")
    if len(asked.gpus) < 2:
        parser.error("--gpus: name the prefill node's, then one for each decode node; they may be the same")
    if asked.folder.exists():
        parser.error(f"{asked.folder} exists: give each run a new folder (--folder)")
    asked.folder = asked.folder.absolute()
    return asked


def nodes_of(options: argparse.Namespace, key: str) -> list[NodeSpec]:
    """A prefill node and decode nodes, each with its GPU, on free ports, with one key that signs tickets."""
    specs = list[NodeSpec]()
    for at, gpu in enumerate(options.gpus):
        name, role = (f"decode-{at - 1}", Role.DECODE) if at else ("prefill", Role.PREFILL)
        # UCX tells at this level which transports it takes between nodes.
        more = {"PDPROXY_TICKET_KEYS": key, "CUDA_VISIBLE_DEVICES": gpu, "UCX_LOG_LEVEL": "info"}
        specs.append(NodeSpec(name, role, 0, 0, more_environment=more))
    return node.on_free_ports(*specs)


def started(options: argparse.Namespace, spec: NodeSpec) -> tuple[list[str], dict[str, str]]:
    """The command and environment of a node: the demo's on a CPU, compose.yaml's on a GPU, whose memory nodes share."""
    if options.cpu:
        return [*node.command(spec), *options.flags], node.environment(spec, {})
    share = 0.9 / options.gpus.count(spec.more_environment["CUDA_VISIBLE_DEVICES"])
    line = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", options.model]
    line += f"--revision {options.revision} --tokenizer-revision {options.revision} --enable-prefix-caching".split()
    line += f"--host {HOST} --port {spec.port} --max-model-len 32768 --max-num-seqs 256".split()
    line += f"--gpu-memory-utilization {share:.3f} --enable-prompt-tokens-details".split()
    line += ["--kv-transfer-config", json.dumps(node.kv_transfer_config(spec))]
    line += ["--kv-events-config", json.dumps(node.KV_EVENTS), "--prefix-caching-hash-algo", node.HASH_ALGORITHM]
    line += os.environ.get("RESUME_ARGS", "--prefix-match-unit=16").split()
    # VLLM_HOST_IP: else vLLM publishes KV events at the machine's own address, where the proxy does not ask.
    told = {"VLLM_PLUGINS": node.PLUGINS, "VLLM_HOST_IP": HOST, "VLLM_NIXL_SIDE_CHANNEL_HOST": HOST}
    told |= {"VLLM_NIXL_SIDE_CHANNEL_PORT": f"{spec.side_channel_port}", "PYTHONUNBUFFERED": "1"}
    return [*line, *options.flags], {**told, **spec.more_environment}


# --- Questions: lists of names and numbers whose last lines are to be recited. The tiny model was trained on them, and
# --- others copy well. An answer need not be right. It must be the same: a lost state or block changes it.


def question(model: str, seed: int, tokens: int, lines: int) -> Params:
    """A request for the last lines, of about so many tokens of the tiny model; longer ones have several lists."""
    lists = [quiz(seed + 10_000 * (at + 1), LONGEST_LIST).listing for at in range(max(0, tokens - 1) // LONGEST_LIST)]
    rest = max(tokens - LONGEST_LIST * len(lists), (lines + 2) * TOKENS_PER_LINE)
    prompt = "\n".join([*lists, recite(seed, rest, lines).prompt()])
    return {"model": model, "prompt": prompt, "max_tokens": 2 * lines * TOKENS_PER_LINE, "temperature": 0}


def whole(url: str, asked: Params, **more: object) -> Params:
    """An answer in one piece. Raises BenchError where it is an error."""
    with closing(Connection(url, ANSWERED_WITHIN_S)) as connection:
        return connection.whole({**asked, **more})


def follow(url: str, asked: Params, pieces: Pieces) -> None:
    """Read a stream to its end. Raises BenchError where it is an error."""
    pieces.append((time.monotonic(), ""))
    with closing(Connection(url, ANSWERED_WITHIN_S)) as connection:
        for text in connection.pieces(asked):
            pieces.append((time.monotonic(), text))


def learn(url: str, asked: Params) -> Known:
    """Ask one engine, and shorten the question to the tokens of which it is certain: rounding may change the others.

    The salt keeps the engine's prefix cache from having the prompt when it is asked again.
    """
    [choice] = whole(url, asked, logprobs=2, cache_salt="learned")["choices"]
    best = [sorted(top.values())[-2:] for top in choice["logprobs"]["top_logprobs"]]
    certain = len(list(takewhile(lambda two: two[-1] - two[0] >= DECISIVE, best)))
    shorter = {**asked, "max_tokens": max(1, certain)}
    if certain < len(best):
        [choice] = whole(url, shorter, cache_salt="learned")["choices"]
    return shorter, choice["text"]


# --- The archive: files of known kinds, without what is secret.


def secrets_of(variables: Mapping[str, str]) -> list[bytes]:
    """The secrets of an environment, the longest first: keys, keys in files, passwords in addresses."""
    found = {told[1] for value in variables.values() if (told := re.match(r"\w+://[^/:@]*:([^/@]+)@", value))}
    for name, value in variables.items():
        if re.search(r"KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|AUTH(?!OR)", name, re.IGNORECASE):
            found |= {value, *(part.strip() for part in value.split(","))}
            if name.endswith("FILE") and Path(value).is_file():
                lines = Path(value).read_text(encoding="utf-8", errors="replace").splitlines()
                found |= {line.split()[0] for line in lines if line.strip() and not line.startswith("#")}
    # Shorter ones would be found in every number.
    return sorted((each.encode() for each in found if len(each) >= 8), key=len, reverse=True)


def without_secrets(content: bytes, secret: Sequence[bytes]) -> bytes:
    """The same with a mark in the place of each secret."""
    for value in secret:
        content = content.replace(value, b"[left out]")
    return SECRET.sub(b"[left out]", content)


def pack(folder: Path, to: Path, secret: Sequence[bytes]) -> list[str]:
    """Write the archive; the names in it. Raises ValueError, and writes none, where a secret would be in it."""
    paths = [each for each in sorted(folder.rglob("*")) if each.is_file() and not each.is_symlink()]
    paths = [each for each in paths if each.suffix in (".log", ".json", ".prom", ".txt")]
    files = {f"{folder.name}/{path.relative_to(folder)}": without_secrets(path.read_bytes(), secret) for path in paths}
    if any(value in name.encode() + content for name, content in files.items() for value in secret):
        raise ValueError("a secret would be in the archive, which is not written: send what is harmless by hand")
    with tarfile.open(to, "w:gz") as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mtime = len(content), int(time.time())
            archive.addfile(entry, io.BytesIO(content))
    return list(files)


def run(line: Sequence[str], within: float = 120.0, **more: str) -> tuple[bool, str]:
    """Whether a command succeeds, and its output with its errors; `more` is added to the environment."""
    env, out = {**inherited(), **more}, subprocess.PIPE
    done = subprocess.run(line, cwd=ROOT, env=env, timeout=within, check=False, stdout=out, stderr=subprocess.STDOUT)
    return done.returncode == 0, done.stdout.decode(errors="replace").strip()


@dataclass
class Run:
    """One run in a new folder; what it says is kept in `summary.txt`, and its checks in `results.json`."""

    options: argparse.Namespace
    supervisor: Supervisor
    key: str = field(default_factory=lambda: secrets.token_hex(32))
    began: float = field(default_factory=time.monotonic)
    results: dict[str, list[Params]] = field(default_factory=dict)
    passed: list[str] = field(default_factory=list)
    nodes: dict[str, Node] = field(default_factory=dict)
    starts: Counter[str] = field(default_factory=Counter)
    urls: dict[str, str] = field(default_factory=dict)
    front: str = ""
    known: dict[str, list[Known]] = field(default_factory=dict)

    def go(self) -> bool:
        """Run all steps that can be run, and pack what there is, whatever happens; True if all hold."""
        self.write("settings.txt", "".join(f"{name}: {value}\n" for name, value in vars(self.options).items()))
        try:
            with self.supervisor:
                if self.attempt("preflight", self.preflight) and self.attempt("start", self.start):
                    for step in (self.answers, self.attacks, self.kills, self.measure):
                        self.attempt(step.__name__, partial(self.on_whole_nodes, step))
        finally:
            self.attempt("collect", self.collect)
        bad = [step for step in ADVICE if step not in self.passed]
        self.say(f"not all holds: {', '.join(bad)}. The first of them first" if bad else "everything holds")
        return not bad

    def attempt(self, step: str, work: Callable[[], None]) -> bool:
        """Run one step and keep its checks; True if it went to its end and every check holds."""
        self.say(f"{step} …")
        self.results[step] = []
        try:
            work()
        except FAILURES as error:
            self.check("the step", False, f"{type(error).__name__}: {error}")
        self.write("results.json", json.dumps(self.results, indent=1))
        self.passed += [step] if all(check["holds"] for check in self.results[step]) else []
        return step in self.passed

    def check(self, name: str, holds: bool, detail: str) -> None:
        """Keep one thing of the running step that must hold."""
        advice = ADVICE[step := list(self.results)[-1]]
        self.results[step].append({"name": name, "holds": holds, "detail": detail, "advice": advice})
        self.say(f"  ok      {name}: {detail}" if holds else f"  FAILED  {name}: {detail}. What to do: {advice}")

    def say(self, line: str) -> None:
        """Print a line, with the time since the run began, and keep it."""
        minutes, seconds = divmod(int(time.monotonic() - self.began), 60)
        print(told := f"{minutes:3d}:{seconds:02d}  {line}", flush=True)
        with (self.options.folder / "summary.txt").open("a", encoding="utf-8") as kept:
            kept.write(f"{told}\n")

    def write(self, name: str, text: str) -> None:
        """Keep a file in the run's folder."""
        path = self.options.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def preflight(self) -> None:
        """Look for what a node would miss only when its model is loaded."""
        gpus = 0 if self.options.cpu else len(set(self.options.gpus))
        good, told = run([sys.executable, "-W", "ignore", "-c", PACKAGES, f"{gpus}"])
        self.check("packages and GPUs", good, told.rpartition("\n")[2])

    def start(self) -> None:
        """Start the nodes, learn what the prefill node answers by itself, start the proxy, and run `pdproxy check`."""
        for each in nodes_of(self.options, self.key):
            self.start_node(each)
        self.learn("answers", 8, 8, self.options.lengths)
        self.learn("attacks", 4, 8, [400])
        self.learn("kills", STREAMS * len(KILLS), 48, [400])
        # Nodes that come back serve within seconds, and streams of an only decode node go on.
        quick = {"PDPROXY_HEALTH_INTERVAL": "1", "PDPROXY_HEALTH_SLOW_START": "0"}
        settings = {**quick, "PDPROXY_POLICY_ON_NO_DECODE": "prefill", **inherited()}
        spec = ProxySpec(more_environment=settings, until=Until.ALIVE)
        proxy = start_proxy(self.supervisor, spec, list(self.nodes.values()), self.say)
        self.front, self.urls["proxy"] = proxy.url, proxy.admin_url
        self.make_whole()
        flags = [f"--{each.spec.role.value}={each.url}" for each in self.nodes.values()]
        good, told = run([sys.executable, "-m", "pdproxy", "check", *flags])
        self.write("pdproxy-check.txt", told)
        self.check("pdproxy check", good, told.rpartition("\n")[2])

    def start_node(self, spec: NodeSpec) -> None:
        """Start a node and wait for it: nodes that share a GPU measure one after the other what memory is free."""
        self.starts[spec.name] += 1
        line, more = started(self.options, spec)
        part = self.supervisor.start(f"{spec.name}.{self.starts[spec.name]}", line, {**inherited(), **more}, ROOT)
        self.nodes[spec.name], self.urls[spec.name] = Node(spec, part), spec.url
        await_nodes(self.supervisor, [self.nodes[spec.name]], self.say, LOADED_WITHIN_S)

    def learn(self, step: str, count: int, lines: int, lengths: Sequence[int]) -> None:
        """Ask one engine twice as much as is needed, and keep the longest answers of each length."""
        model = node.SERVED_NAME if self.options.cpu else self.options.model
        first, known = 1_000_000 * len(self.known), list[Known]()
        for length in lengths:
            asked = [question(model, first + length + at, length, lines) for at in range(2 * count)]
            with ThreadPoolExecutor(8) as threads:
                answers = list(threads.map(partial(learn, self.urls["prefill"]), asked))
            known += sorted(answers, key=lambda each: -each[0]["max_tokens"])[:count]
        self.known[step] = known
        tokens = sorted(asked["max_tokens"] for asked, _ in known)
        self.check(f"learned for {step}", True, f"{len(known)} answers of {tokens[0]} to {tokens[-1]} tokens")

    def make_whole(self) -> None:
        """Wake frozen nodes, start those anew that have ended, and wait until the proxy serves with every node."""
        ended = [each for each in self.nodes.values() if each.part.process.poll() is not None]
        for each in ended:
            self.supervisor.stop(each.part)
        for each in self.nodes.values():
            go_on(each.part)
        for each in ended:
            self.start_node(each.spec)
        await_proxy(self.supervisor, self.urls["proxy"], Until.JOINED, self.say, ANSWERED_WITHIN_S)

    def on_whole_nodes(self, step: Callable[[], None]) -> None:
        """Run a step on nodes that are whole. They hold nothing after it; what they count then is kept."""
        self.make_whole()
        step()
        free = becomes_true(lambda: not self.total(*HELD), LEASE_S + COUNTED_WITHIN_S)
        self.check(f"nothing is held after {step.__name__}", free, f"{self.total(*HELD):g} of cache and requests")
        for name, url in self.urls.items():
            self.write(f"metrics/{step.__name__}-{name}.prom", httpx.get(f"{url}/metrics", trust_env=False).text)

    def total(self, *names: str, **labels: str) -> float:
        """The sum of metrics over all nodes and the proxy."""
        return sum(read(url, name, **labels) for url in self.urls.values() for name in names)

    def growth(self, name: str, **labels: str) -> Callable[[], float]:
        """A function that says how much a counter has grown since now."""
        before = self.total(name, **labels)
        return lambda: self.total(name, **labels) - before

    def compare(self, case: str, known: Sequence[Known], at_once: int, meanwhile: Meanwhile) -> None:
        """Stream the answers through the proxy: each comes to its end with the one engine's text."""
        heard, bad = [Pieces() for _ in known], list[str]()
        with ThreadPoolExecutor(at_once) as threads:
            ends = [threads.submit(follow, self.front, asked, to) for (asked, _), to in zip(known, heard, strict=True)]
            meanwhile(heard)
        for (_, right), pieces, end in zip(known, heard, ends, strict=True):
            text = "".join(piece for _, piece in pieces)
            if text != right or end.exception():
                bad.append(f"{end.exception() or 'ended'} after {text!r}; one engine says {right!r}")
        stall = max(after - earlier for pieces in heard for (earlier, _), (after, _) in pairwise(pieces))
        told = f"{len(known) - len(bad)} of {len(known)} the same, longest stall {stall:.1f} s"
        if 2 * sum(asked["max_tokens"] >= TELLING for asked, _ in known) < len(known):
            bad.append("the model is certain of too little for this to tell anything: take another one")
        self.check(case, not bad, "; ".join([told, *bad[:1]]))

    def answers(self) -> None:
        """Each question goes through the proxy once: prompts are handed over, and the answers are the one engine's."""
        known, reads, verified = self.known["answers"], self.growth(READS), self.growth(READS, outcome="verified")
        blocks = partial(self.growth, "pdproxy_connector_blocks_total", kind="pulled")
        moved = {"attention": blocks(group="attention"), "state": blocks(group="state")}
        events = self.growth("pdproxy_kv_event_batches_total", outcome="applied")
        self.compare("same tokens through both nodes as from one", known, 1, lambda _: None)
        good = becomes_true(lambda: verified() >= len(known)) and reads() == verified()
        self.check("every prompt was handed over", good, f"{verified():g} of {reads():g} reads verified")
        hybrid = 'limit="state"' in httpx.get(f"{self.urls['decode-0']}/metrics", trust_env=False).text
        pulled = {group: count() for group, count in moved.items() if hybrid or group == "attention"}
        told = ", ".join(f"{count:g} of {group}" for group, count in pulled.items())
        self.check("blocks moved", all(pulled.values()), told)
        good = becomes_true(lambda: events() > 0)
        self.check("the proxy follows what nodes cache", good, f"{events():g} batches of KV events")

    def attack(self, name: str, known: Known, ticket: Params, counted: Callable[[], float]) -> None:
        """Send a ticket as somebody would who can reach the decode node: it is counted, and the answer is right."""
        asked, right = known
        [choice] = whole(self.urls["decode-0"], asked, kv_transfer_params=ticket)["choices"]
        noticed = "counted" if becomes_true(lambda: counted() > 0) else "NOT counted"
        good = choice["text"] == right and noticed == "counted"
        self.check(name, good, f"{noticed}, answer {'right' if choice['text'] == right else 'WRONG'}")

    def attacks(self) -> None:
        """Tickets that are wrong, late or used twice, and a stranger on the side channel."""
        known, prefill = self.known["attacks"], self.urls["prefill"]
        expired = self.growth("pdproxy_connector_leases_ended_total", how="expired")

        def to_prefill(at: int) -> Params:
            asked = {**known[at][0], "max_tokens": 1}
            return dict(whole(prefill, asked, kv_transfer_params=TO_HAND_OVER)["kv_transfer_params"])

        late, good, another = map(to_prefill, range(3))
        altered = {**good, "remote_request_id": another["remote_request_id"]}
        self.attack("a ticket of another prompt", known[1], another, self.growth(REFUSED))
        self.attack("a ticket that was altered", known[1], altered, self.growth(REFUSED, reason="bad_signature"))
        strangers = self.growth("pdproxy_connector_side_channel_refused_total", reason="unsigned")
        told = shake_hands(self.nodes["prefill"].spec.side_channel_port)["compatibility_hash"]
        once, reads = to_prefill(3), self.growth(READS, outcome="verified")
        refused = told == NEEDS_KEY and becomes_true(lambda: strangers() > 0)
        self.check("a stranger on the side channel", refused, f"{told}")
        self.attack("an honest ticket", known[3], once, reads)
        self.attack("the same ticket again", known[3], once, reads)
        self.check("a ticket used twice", reads() == 1, f"its blocks were read {reads():g} times")
        becomes_true(lambda: expired() > 0, LEASE_S + COUNTED_WITHIN_S)
        self.attack("an expired ticket", known[0], late, self.growth(READS, outcome="not_held"))

    def kills(self) -> None:
        """A node dies or freezes under streams, and every stream goes on with the same text."""
        for at, (role, fault) in enumerate(KILLS):
            case, known = f"a {role.value} node {fault.name.lower()}", self.known["kills"][at :: len(KILLS)]
            moved = self.growth("pdproxy_migrations_total", outcome="done")
            self.compare(f"{case}: streams go on", known, STREAMS, partial(self.strike_under_way, role, fault))
            self.make_whole()
            self.check(f"{case}: streams moved", moved() > 0 or role is Role.PREFILL, f"{moved():g} to another node")

    def strike_under_way(self, role: Role, fault: ProcessFault, streams: Sequence[Pieces]) -> None:
        """Let a node fail under streams: a decode node when most of them run, the prefill node when the first one does.

        Of several decode nodes the one with most streams: the proxy may have given all of them to one node.
        """
        most = 0 if role is Role.PREFILL else len(streams) / 2
        becomes_true(lambda: sum(len(pieces) > 4 for pieces in streams) > most, COUNTED_WITHIN_S)
        nodes = [each for each in self.nodes.values() if each.spec.role is role]
        legs = partial(read, self.urls["proxy"], "pdproxy_node_active")
        strike(max(nodes, key=lambda each: legs(node=each.spec.name)).part, fault)

    def measure(self) -> None:
        """The same loads on the prefill node by itself, which answers as any engine does, and through the proxy."""
        loads = [(length, clients) for length in self.options.lengths for clients in self.options.concurrencies]
        for length, clients in loads:
            self.load(f"one-engine-{length}-{clients}", self.urls["prefill"], length, clients)
        reads, verified = self.growth(READS), self.growth(READS, outcome="verified")
        pulled = self.growth("pdproxy_connector_bytes_total", kind="pulled")
        seconds = self.growth("vllm:nixl_xfer_time_seconds_sum")
        for length, clients in loads:
            self.load(f"both-nodes-{length}-{clients}", self.front, length, clients)
        rate = f"{pulled() / seconds() / 1e9:.3f} GB/s while NIXL transferred" if seconds() else "not timed"
        told = f"{verified():g} of {reads():g} reads verified, {pulled() / 1e6:,.1f} MB, {rate}"
        self.check("hand-overs while measured", reads() == verified() > 0, told)

    def load(self, name: str, url: str, length: int, clients: int) -> None:
        """One load of vLLM's own generator: closed, prompts that are all different, answers of one length."""
        to, model = self.options.folder / "bench" / f"{name}.json", self.options.model
        line = bench_serve.command(url, node.SERVED_NAME if self.options.cpu else model, model, to)
        line += [f"--random-input-len={length}", "--random-output-len=64", f"--seed={sum(name.encode())}"]
        line += [f"--num-prompts={4 * clients}", f"--max-concurrency={clients}", f"--num-warmups={clients}"]
        offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"} if self.options.cpu else {}
        good, log = run([*line, "--temperature=0"], BENCH_WITHIN_S, NO_PROXY=HOST, **offline)
        self.write(f"bench/{name}.log", log)
        if not good:
            raise BenchError(f"vLLM's load generator failed: see bench/{name}.log")
        told = json.loads(to.read_text(encoding="utf-8"))
        names = [f"{which}_{time}_ms" for time in ("ttft", "itl") for which in ("median", "p99")]
        figures = ", ".join(f"{each} {told[each]:.1f}" for each in (*names, "output_throughput", "request_throughput"))
        self.check(name, told["failed"] == 0, f"{figures}; {told['failed']} failed")

    def collect(self) -> None:
        """Write down what ran, and pack everything."""
        folder = self.options.folder
        logs = [path.read_text(encoding="utf-8", errors="replace") for path in folder.glob("logs/decode-*.log")]
        lanes = re.compile(r"UCX +INFO .*?((?:intra|inter)-node cfg#\d+ .*)")
        versions = {"UCX between nodes": "; ".join(sorted({lane for log in logs for lane in lanes.findall(log)}))}
        # By the shell, which says where there is no git.
        versions |= {"commit": run(["sh", "-c", "git describe --always --dirty"])[1], "system": platform.release()}
        # Where a package is there twice, the first one is imported.
        installed = {each.name: each.version for each in reversed([*distributions()])}
        versions |= {"python": platform.python_version(), **installed}
        self.write("versions.txt", "".join(f"{name}: {value}\n" for name, value in versions.items()))
        if not self.options.cpu:
            self.write("nvidia-smi.txt", run(["sh", "-c", "nvidia-smi; nvidia-smi topo -m"])[1])
        to = folder.with_name(f"{folder.name}.tar.gz")
        names = pack(folder, to, [self.key.encode(), *secrets_of(inherited())])
        self.check("the archive", True, f"{to}: {len(names)} files, {to.stat().st_size / 1e6:.1f} MB, no secret found")


def main(arguments: Sequence[str]) -> int:
    """Return 0 if every step holds, 1 if one does not."""
    options = options_of(arguments)
    try:
        with stop_signals():
            return 0 if Run(options, Supervisor(options.folder / "logs")).go() else 1
    except Stopped as stopped:
        print("\nStopped; nothing is left running.", flush=True)
        return 128 + stopped.number


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
