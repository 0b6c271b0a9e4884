"""Dockerfiles, read as far as ours go."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path

from deploy.local.paths import ROOT

FOLDER = ROOT / "deploy/docker"
IMAGES = sorted(FOLDER.glob("*.Dockerfile"))
UNITS = {"s": 1, "m": 60, "h": 3600}


@dataclass(frozen=True)
class Instruction:
    """One line, continued ones joined: its word in capitals, and what follows."""

    word: str
    rest: str


@dataclass(frozen=True)
class Health:
    """A health check; times in seconds."""

    command: tuple[str, ...]
    interval: float
    timeout: float
    start_period: float
    retries: int


@dataclass(frozen=True)
class Stage:
    """From one FROM to the next. `name`: what later stages call it by; empty for the last one."""

    base: str
    name: str
    lines: tuple[Instruction, ...]

    def all(self, word: str) -> list[str]:
        """The texts after each of these words."""
        return [line.rest for line in self.lines if line.word == word]

    def listed(self, word: str) -> list[str]:
        """The list in the exec form of the last such line; empty without one. Raises ValueError for another form."""
        return list(json.loads(self.all(word)[-1])) if self.all(word) else []

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """Variables that ENV lines add to the environment of the base image."""
        pairs = [pair for line in self.all("ENV") for pair in re.findall(r"(\w+)=(\S*)", line)]
        return reduce(lambda known, pair: {**known, pair[0]: _filled(pair[1], known)}, pairs, dict(base))

    def labels(self) -> dict[str, str]:
        """The labels that LABEL lines set."""
        return dict(re.findall(r'([\w.]+)="([^"]*)"', " ".join(self.all("LABEL"))))

    def health(self) -> Health:
        """The health check. Raises ValueError where it leaves a time to its default."""
        options, _, command = self.all("HEALTHCHECK")[-1].partition(" CMD ")
        given = dict(re.findall(r"--([\w-]+)=(\S+)", options))
        interval, timeout, start = (seconds(given[name]) for name in ("interval", "timeout", "start-period"))
        return Health(tuple(json.loads(command)), interval, timeout, start, int(given["retries"]))


def stages(path: Path) -> list[Stage]:
    """The stages of a Dockerfile; the last one is the image."""
    lines = _instructions(path.read_text(encoding="utf-8"))
    begins = [number for number, line in enumerate(lines) if line.word == "FROM"]
    ends = [*begins[1:], len(lines)]
    return [_stage(lines[begin:end]) for begin, end in zip(begins, ends, strict=True)]


def seconds(text: str) -> float:
    """A duration as Docker writes it, such as 1m30s. Raises KeyError for units that we do not use."""
    return sum(float(count) * UNITS[unit] for count, unit in re.findall(r"([\d.]+)([a-z]+)", text))


def _stage(lines: Sequence[Instruction]) -> Stage:
    base, _, name = lines[0].rest.partition(" AS ")
    return Stage(base, name, tuple(lines[1:]))


def _instructions(text: str) -> list[Instruction]:
    plain = "\n".join(line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#"))
    joined = re.sub(r"\\\n\s*", "", plain)
    return [Instruction(*line.split(maxsplit=1)) for line in joined.splitlines()]


def _filled(value: str, known: Mapping[str, str]) -> str:
    """`value` with each $NAME and ${NAME} filled in."""
    return re.sub(r"\$\{?(\w+)\}?", lambda found: known.get(found[1], ""), value)
