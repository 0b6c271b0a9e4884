"""What a step found: checks that hold or not, and figures. Kept as one JSON file for each step."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

FOLDER = "results"


class Step(StrEnum):
    """The steps, in order."""

    PREFLIGHT = "preflight"
    ALONE = "alone"
    START = "start"
    ANSWERS = "answers"
    ATTACKS = "attacks"
    KILLS = "kills"
    MEASURE = "measure"
    COLLECT = "collect"


@dataclass(frozen=True)
class Check:
    """One thing that must hold. `advice` says what to do where it does not."""

    name: str
    holds: bool
    detail: str
    advice: str = ""

    def line(self) -> str:
        """As it is told in a terminal."""
        if self.holds:
            return f"ok      {self.name}: {self.detail}"
        return f"FAILED  {self.name}: {self.detail}. What to do: {self.advice}"


@dataclass(frozen=True)
class StepResult:
    """`broken`: why a step could not go on to its end; empty where it did. `figures` are the step's own."""

    step: Step
    checks: Sequence[Check]
    seconds: float = 0.0
    broken: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)
    at: str = ""

    @property
    def good(self) -> bool:
        """Whether it went to its end and every check holds."""
        return not self.broken and all(check.holds for check in self.checks)


def save(folder: Path, result: StepResult) -> None:
    """Write a step's result, whole or not at all."""
    path = folder / FOLDER / f"{result.step}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    told = asdict(result) | {"at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
    new = path.with_suffix(".new")
    new.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    new.rename(path)


def load(folder: Path, step: Step) -> StepResult | None:
    """A step's result of this run, or None. Raises ValueError for a file that is none."""
    path = folder / FOLDER / f"{step}.json"
    if not path.exists():
        return None
    told = json.loads(path.read_text(encoding="utf-8"))
    checks = [Check(**each) for each in told["checks"]]
    return StepResult(step, checks, told["seconds"], told["broken"], told["figures"], told["at"])
