"""What a run is told: which machine, which model, how much to measure."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path

from deploy.gpu.results import Step, load
from deploy.local.node import SERVED_NAME
from deploy.local.paths import MODEL, RUNS

SETTINGS_FILE = "settings.json"


class Machine(StrEnum):
    """What the nodes run on."""

    GPU = "gpu"
    CPU = "cpu"
    """The tiny model of `make demo`: a dry run of the same steps."""


class RunError(Exception):
    """A run cannot go on; the message says why and what to do."""


@dataclass(frozen=True)
class Options:
    """`decode_gpus` has an item for each decode node; two nodes may share a GPU. `lengths`: tokens of a prompt, about;
    `concurrencies`: streams at once; `output_tokens`: of each stream; `ready_seconds`: for a node to load the model.
    `folder` is where everything is written, and what a run is resumed by.
    """

    machine: Machine
    folder: Path
    model: str
    revision: str
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
        """Of the decode nodes."""
        return tuple(f"decode-{at}" for at in range(len(self.decode_gpus)))

    def memory_of(self, gpu: str) -> float:
        """The share of a GPU's memory that each of its nodes takes."""
        return round(self.gpu_memory / max(1, [self.prefill_gpu, *self.decode_gpus].count(gpu)), 3)


def on_cpu(folder: Path | None) -> Options:
    """What a dry run does: the tiny model, and little of everything."""
    return Options(
        Machine.CPU,
        folder or RUNS / "gpu-dry-run",
        str(MODEL),
        "",
        max_model_len=4096,
        lease_seconds=10,
        streams=6,
        lengths=(300, 1500),
        concurrencies=(1, 2),
        output_tokens=32,
        ready_seconds=600,
    )


def on_gpus(folder: Path | None, model: str, revision: str) -> Options:
    """What a run on two GPUs does."""
    name = "".join(each if each.isalnum() or each in "-._" else "-" for each in model.strip("/"))
    return Options(Machine.GPU, folder or RUNS / f"gpu-{name}", model, revision)


def remember(options: Options) -> None:
    """Write the options down, or compare them with those of the run that is resumed here. Raises RunError.

    Until `alone` holds there is nothing to resume, and options may change.
    """
    alone = load(options.folder, Step.ALONE)
    path = options.folder / SETTINGS_FILE
    told = json.loads(json.dumps({**asdict(options), "folder": ""}))
    if path.exists() and alone is not None and alone.good:
        before = json.loads(path.read_text(encoding="utf-8"))
        changed = sorted(name for name in told if before.get(name) != told[name])
        if changed:
            raise RunError(
                f"{options.folder} holds a run with another {', '.join(changed)}. Resume it with the same options, or "
                "give this one a folder of its own (--folder)"
            )
        return
    options.folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")


def with_changes(options: Options, changes: dict[str, object]) -> Options:
    """The options with what was said on the command line; None was not said."""
    return replace(options, **{name: value for name, value in changes.items() if value is not None})  # type: ignore[arg-type]


def list_of_numbers(text: str) -> tuple[int, ...]:
    """A list with commas; ValueError for what is none of numbers above 0."""
    numbers = tuple(int(each) for each in text.split(","))
    if min(numbers) < 1:
        raise ValueError(f"{text}: numbers above 0 were expected")
    return numbers


def list_of_gpus(text: str) -> tuple[str, ...]:
    """A list with commas of a GPU for each node; ValueError for an empty one."""
    gpus = tuple(each.strip() for each in text.split(","))
    if not all(gpus):
        raise ValueError(f"{text}: numbers of GPUs with commas between them were expected")
    return gpus


def quantity(numbers: Sequence[object]) -> str:
    """Numbers as a person reads them: 1, 8 and 32."""
    words = [str(each) for each in numbers]
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))
