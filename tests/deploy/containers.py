"""Services of compose.yaml as a container engine would run them, on top of the images that they are built from.

`Moved` takes it out of its container: the few texts that only a container makes true are exchanged, nothing else is.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from deploy.local.paths import ROOT
from tests.deploy.compose import Service
from tests.deploy.dockerfile import Health, seconds, stages


@dataclass(frozen=True)
class Container:
    """One container. `grace` in seconds, from SIGTERM on.

    `after`: those that are started before it, and stopped after it; `waits`: those of them that must be healthy first;
    `ended`: those that must have ended well before it starts.
    """

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    health: Health
    after: frozenset[str]
    waits: frozenset[str]
    ended: frozenset[str]
    grace: float
    published: Mapping[str, str]
    """Its ports that the host offers, by their number on the host."""


def container(name: str, service: Service, base: Mapping[str, str]) -> Container:
    """A service's container; `base` is the environment of the base image."""
    image = stages(ROOT / service["build"]["dockerfile"])[-1]
    needs = service.get("depends_on", {})
    ended = frozenset(
        other for other, needed in needs.items() if needed["condition"] == "service_completed_successfully"
    )
    given = {name: str(value) for name, value in service.get("environment", {}).items() if value is not None}
    return Container(
        name,
        (*(service.get("entrypoint") or image.listed("ENTRYPOINT")), *(service.get("command") or image.listed("CMD"))),
        {**image.environment(base), **given},
        image.health(),
        frozenset(needs) - ended,
        frozenset(other for other, needed in needs.items() if needed["condition"] == "service_healthy"),
        ended,
        seconds(service["stop_grace_period"]),
        dict(port.split(":")[-2:] for port in service.get("ports", [])),
    )


@dataclass(frozen=True)
class Moved:
    """Texts of the container's world, each with what stands for it here; a number or a name is replaced as a whole."""

    texts: Mapping[str, str]

    def of(self, one: Container) -> Container:
        """The same container, here."""
        return replace(
            one,
            command=tuple(self.text(word) for word in one.command),
            environment={name: self.text(value) for name, value in one.environment.items()},
            health=replace(one.health, command=tuple(self.text(word) for word in one.health.command)),
        )

    def text(self, text: str) -> str:
        """One word of it."""
        longest_first = sorted(self.texts, key=len, reverse=True)
        pattern = "|".join(rf"(?<![\w.-]){re.escape(each)}(?![\w.-])" for each in longest_first)
        return re.sub(pattern, lambda found: self.texts[found[0]], text)


def copied(dockerfile: Path) -> dict[str, str]:
    """Paths in the image with those in the repository that they were copied from."""
    lines = [line.split() for line in stages(dockerfile)[-1].all("COPY") if not line.startswith("--from")]
    return {target: str(ROOT / source) for source, target in lines}
