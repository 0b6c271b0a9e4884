"""docker or podman, whichever answers, and its compose: found, and told what to do by their command lines."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from deploy.local.paths import ROOT, RUNS

COMMANDS = ("docker", "podman")
COMPOSE: Mapping[str, tuple[str, ...]] = {
    "docker": ("docker", "compose"),
    # The one that our development requirements pin: `podman compose` would take whichever is installed.
    "podman": (sys.executable, "-m", "podman_compose"),
}
"""The first words of a compose command, by container engine."""

ANSWERS_WITHIN_S = 60.0
HEALTHY_WITHIN_S = 600.0
POLL_S = 1.0
SHOWN_LINES = 40
LOGS = RUNS / "images"
CHECKED = "pdproxy-images-check"
"""The name of the container that `running` starts."""


class ContainerEngineError(Exception):
    """There is no container engine, or a command of it failed; the message has what it said."""


@dataclass(frozen=True)
class ContainerEngine:
    """A container engine that answers. `command`: docker or podman; `compose`: the first words of a compose command."""

    command: str
    compose: tuple[str, ...]

    def output(self, *words: str, within: float = ANSWERS_WITHIN_S) -> str:
        """Run a command of the engine and return its stdout. Raises ContainerEngineError."""
        return execute([self.command, *words], os.environ, within).stdout.strip()

    def build(self, image: str, dockerfile: str, options: Sequence[str]) -> None:
        """Build an image from the repository; the output is the terminal's. Raises ContainerEngineError."""
        line = [self.command, "build", *options, "--file", dockerfile, "--tag", image, "."]
        # podman's own format has no place for a health check.
        done = subprocess.run(line, env={**os.environ, "BUILDAH_FORMAT": "docker"}, cwd=ROOT, check=False)
        if done.returncode != 0:
            raise ContainerEngineError(f"{' '.join(line)}\nended with status {done.returncode}; what it said is above")

    def save_log(self, container: str, to: Path) -> str:
        """Write a container's stdout and stderr to a file, and return the last lines. Raises OSError."""
        to.parent.mkdir(parents=True, exist_ok=True)
        with to.open("wb") as log:
            subprocess.run([self.command, "logs", container], stdout=log, stderr=subprocess.STDOUT, check=False)
        return _indented(to.read_text(encoding="utf-8", errors="replace"))

    def inspect(self, template: str, *containers: str) -> str:
        """A Go template, filled in for each container, a line each. Raises ContainerEngineError."""
        return self.output("container", "inspect", f"--format={template}", *containers)

    @contextmanager
    def running(self, *words: str) -> Iterator[str]:
        """A container, started with these options, image and arguments and removed at the end; its name.

        Its log is kept where what is done with it raises. Raises ContainerEngineError.
        """
        self._remove(CHECKED)  # left by a run that was killed
        try:
            self.output("run", "--detach", f"--name={CHECKED}", *words)
            with self.logs_kept({CHECKED: CHECKED}):
                yield CHECKED
        finally:
            self._remove(CHECKED)

    @contextmanager
    def logs_kept(self, containers: Mapping[str, str]) -> Iterator[None]:
        """Where what happens inside raises, write each container's log to a file of that name, and print its end."""
        try:
            yield
        except BaseException:
            for name, container in containers.items():
                log = LOGS / f"{name}.log"
                print(f"\nthe end of {log}:\n{self.save_log(container, log)}", file=sys.stderr, flush=True)
            raise

    def require_running(self, *containers: str) -> None:
        """Raise ContainerEngineError where one of them has ended."""
        running = self.inspect("{{.State.Running}}", *containers).splitlines()
        ended = [container for container, state in zip(containers, running, strict=True) if state != "true"]
        if ended:
            raise ContainerEngineError(f"{ended[0]} has ended with status {self.exit_status(ended[0])}")

    def exit_status(self, container: str) -> int:
        """How it ended; 137 is what the engine killed."""
        return int(self.inspect("{{.State.ExitCode}}", container))

    def await_healthy(self, container: str, within: float = HEALTHY_WITHIN_S) -> None:
        """Wait until the health check of the container's image succeeds in it. Raises ContainerEngineError.

        It is run here, not read from the engine's state: podman leaves the schedule to systemd, and without systemd
        there is none.
        """
        check = self._health_check(container)
        deadline = time.monotonic() + within
        while subprocess.run([self.command, "exec", container, *check], capture_output=True, check=False).returncode:
            self.require_running(container)
            if time.monotonic() > deadline:
                raise ContainerEngineError(f"{container} is not healthy after {within:.0f} s")
            time.sleep(POLL_S)

    def _remove(self, container: str) -> None:
        """Remove it if it is there, running or not: some versions fail where it is not."""
        subprocess.run([self.command, "rm", "--force", container], capture_output=True, check=False)

    def _health_check(self, container: str) -> list[str]:
        found = json.loads(self.inspect("{{json .Config.Healthcheck}}", container))
        if not found:
            raise ContainerEngineError(f"the image of {container} has no health check: build it with --format docker")
        kind, *check = found["Test"]
        if kind != "CMD":
            raise ContainerEngineError(f"the health check of {container} is not in exec form: {found['Test']}")
        return [str(word) for word in check]


def execute(line: Sequence[str], environment: Mapping[str, str], within: float) -> subprocess.CompletedProcess[str]:
    """Run a command line in the repository and return what came of it. Raises ContainerEngineError for any failure."""
    try:
        done = subprocess.run(
            line, env=dict(environment), cwd=ROOT, capture_output=True, text=True, timeout=within, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ContainerEngineError(f"{' '.join(line)}\nwas not done after {within:.0f} s") from error
    if done.returncode != 0:
        said = _indented(done.stdout + done.stderr)
        raise ContainerEngineError(f"{' '.join(line)}\nended with status {done.returncode}:\n{said}")
    return done


def _indented(said: str) -> str:
    """The last lines of it."""
    return "\n".join(f"  | {line}" for line in said.splitlines()[-SHOWN_LINES:])


def find(wanted: Sequence[str] = COMMANDS) -> ContainerEngine:
    """The first of these container engines that answers and has a compose.

    Raises ContainerEngineError where there is none; the message says of each what is missing.
    """
    reasons = []
    for command in wanted:
        reason = _why_not(command)
        if reason is None:
            return ContainerEngine(command, COMPOSE[command])
        reasons.append(f"\n  {command}: {reason}")
    raise ContainerEngineError(
        f"images are built with docker and its compose plugin, or with podman; what was looked for:{''.join(reasons)}\n"
        "Install one of them, or start its service."
    )


def _why_not(command: str) -> str | None:
    """The reason why this container engine cannot be used; None where there is none."""
    if shutil.which(command) is None:
        return "not installed"
    if (said := _failure([command, "ps", "--quiet"])) is not None:
        return f"installed, but it does not answer: {said}"
    if (said := _failure([*COMPOSE[command], "version"])) is not None:
        return f"it answers, but has no compose: {said}"
    return None


def _failure(line: Sequence[str]) -> str | None:
    """A command that fails, and all that it says, in one line; None where it succeeds.

    docker may tell its reason in the first line, and podman tells it in the last one.
    """
    try:
        execute(line, os.environ, ANSWERS_WITHIN_S)
    except ContainerEngineError as error:
        return " ".join(str(error).replace("  |", "").split())
    return None
