"""compose.yaml's node services, read for what they say: the command, and the environment that goes with it.

So that a node on this machine is started as compose starts it in a container, and is described nowhere else. What only
a container has is replaced: its folders by those that are mounted there, its GPUs by CUDA_VISIBLE_DEVICES.
"""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from deploy.gpu.options import RunError
from deploy.local.paths import ROOT

COMPOSE = ROOT / "compose.yaml"
VARIABLE = re.compile(r"\$\{(\w+)(?:(:?-)([^}]*))?\}")
HAND_OVER_OPTIONS = ("--kv-transfer-config", "--kv-events-config")
"""What a node has that hands over, and a plain one has not."""


@dataclass(frozen=True)
class ComposeNode:
    """A node service with every variable filled in. `arguments` follow `vllm serve`."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str]


def fill_in(text: str, variables: Mapping[str, str]) -> str:
    """Compose's `${NAME}`, `${NAME-default}` (if it is not set) and `${NAME:-default}` (if it is not set, or empty)."""

    def value(found: re.Match[str]) -> str:
        name, kind, default = found.groups()
        given = variables.get(name)
        return (default or "") if given is None or (kind == ":-" and not given) else given

    return VARIABLE.sub(value, text)


def read_node(service: str, variables: Mapping[str, str]) -> ComposeNode:
    """A service of compose.yaml as a process of this machine. Raises RunError where it cannot be read."""
    try:
        described = yaml.safe_load(COMPOSE.read_text(encoding="utf-8"))["services"][service]
        words = shlex.split(fill_in(described["command"], variables))
        environment = dict(_environment(described["environment"], variables))
        [device] = described["deploy"]["resources"]["reservations"]["devices"]
    except (OSError, yaml.YAMLError, KeyError, ValueError) as error:
        raise RunError(f"{COMPOSE} cannot be read ({error!r}): run this from a whole checkout") from error
    gpus = ",".join(fill_in(each, variables) for each in device["device_ids"])
    folders = dict(_folders(described["volumes"], variables))
    placed = {name: _on_host(value, folders) for name, value in environment.items()}
    return ComposeNode(tuple(words), {**placed, "CUDA_VISIBLE_DEVICES": gpus})


def plain(arguments: Sequence[str]) -> tuple[str, ...]:
    """The same node without hand-overs: one engine that does all by itself."""
    kept, words = list[str](), iter(arguments)
    for word in words:
        if not word.startswith(HAND_OVER_OPTIONS):
            kept.append(word)
        elif "=" not in word:
            next(words)  # its value
    return tuple(kept)


def _environment(described: Mapping[str, Any], variables: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """What is set there. A name without a value is passed on; an empty value hides nothing that is set here."""
    for name, value in described.items():
        filled = variables.get(name, "") if value is None else fill_in(str(value), variables)
        if filled:
            yield name, filled


def _folders(volumes: Sequence[str], variables: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Folders of the container, and where they lie on this machine."""
    for volume in volumes:
        here, there, *_ = fill_in(volume, variables).split(":")
        yield there, str((ROOT / here).resolve())


def _on_host(value: str, folders: Mapping[str, str]) -> str:
    for there, here in folders.items():
        if value == there or value.startswith(f"{there}/"):
            return here + value.removeprefix(there)
    return value
