"""Build the proxy's and the CPU node's image, try each, and ask compose.yaml's `cpu` profile a question: `make images`.

Every check is of a container that was started from the image. The first one that fails ends the run and shows that
container's log.
"""

import argparse
import functools
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import httpx

from deploy.container_engine import COMMANDS, ContainerEngine, ContainerEngineError, execute, find
from deploy.local.cache_hits import Counts, await_change, parse
from deploy.local.client import AnswerError, body, pieces
from deploy.local.model.quiz import Quiz, quiz, recite
from deploy.local.ports import HOST, PortTakenError, free_ports
from deploy.local.readiness import NotReadyError, await_ready
from deploy.local.supervise import Stopped, stop_signals
from deploy.local.wait_joined import NodeRefusedError, all_joined
from pdproxy import __version__

PROXY = "pdproxy"
NODE = "pdproxy-cpu-node"
DOCKERFILES = {PROXY: "deploy/docker/proxy.Dockerfile", NODE: "deploy/docker/cpu-node.Dockerfile"}
"""By the name of the image, as compose.yaml has it."""

HARDENED = ("--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges")
"""As Kubernetes' `restricted` level has it, and a root file system that cannot be written besides."""
PROJECT = "pdproxy-images"
TOKEN_FILE = "/access/admin.token"
"""Where compose.yaml has the token of the operators' port."""
SERVICES = ("cpu-prefill", "cpu-decode", "cpu-proxy")
GRACE_S = 45
"""Between SIGTERM and SIGKILL, as in compose.yaml."""
UP_WITHIN_S = 600.0
REQUEST_TIMEOUT_S = 120.0
PROMPT_TOKENS = 900
LONG_ANSWER_LINES = 60
MOST_TOKENS = 400
FETCH_METRICS = (
    "import http.client as h; c = h.HTTPConnection('127.0.0.1', 8000); c.request('GET', '/metrics'); "
    "print(c.getresponse().read().decode())"
)


class ImageError(Exception):
    """An image, or what runs from it, is not as it should be."""


def say(line: str) -> None:
    print(f"  {line}", flush=True)


@contextmanager
def timed(what: str) -> Iterator[None]:
    """Say how long it took."""
    began = time.monotonic()
    yield
    say(f"{what} ({time.monotonic() - began:.0f} s)")


def require(holds: bool, otherwise: str) -> None:
    """Raise ImageError with these words unless it holds."""
    if not holds:
        raise ImageError(otherwise)


def build(engine: ContainerEngine, options: Sequence[str]) -> None:
    """Build both images. Raises ContainerEngineError."""
    for image, dockerfile in DOCKERFILES.items():
        print(f"\nBuilding {image} from {dockerfile}:", flush=True)
        with timed("built"):
            engine.build(image, dockerfile, [f"--label=org.opencontainers.image.version={__version__}", *options])
        size = int(engine.output("image", "inspect", "--format={{.Size}}", image))
        say(f"{size / 1e6:.0f} MB, its base image included")


def check_user(engine: ContainerEngine, image: str) -> None:
    """Raise ImageError where it runs as root."""
    user = engine.output("run", "--rm", *HARDENED, "--entrypoint=id", image, "-u")
    require(user != "0", f"{image} runs as root")
    say(f"runs as user {user}")


def check_end(engine: ContainerEngine, container: str) -> None:
    """End a container by SIGTERM. Raises ImageError where it does not end in order."""
    with timed("ends in order when it is told to"):
        engine.output("stop", "-t", str(GRACE_S), container, within=2 * GRACE_S)
    status = engine.exit_status(container)
    require(status == 0, f"{container} ended with status {status} after SIGTERM")


def check_scan(engine: ContainerEngine) -> None:
    """Raise ImageError where streams are scanned in Python: where no compiler answers, a build goes on without it."""
    asked = "from pdproxy.stream.scan import BEST; print(BEST.language)"
    language = engine.output("run", "--rm", *HARDENED, "--entrypoint=python", PROXY, "-c", asked)
    require(language == "C", f"{PROXY} has no compiled scan of streams; its build says why")
    say("has the compiled scan of streams")


def check_proxy(engine: ContainerEngine) -> None:
    """Raises ImageError and ContainerEngineError."""
    print(f"\nTrying {PROXY}, with a read-only root file system and no capabilities:", flush=True)
    check_user(engine, PROXY)
    version = engine.output("run", "--rm", *HARDENED, PROXY, "--version")
    require(__version__ in version.split(), f"this is version {__version__}, and the image says {version!r}")
    say(f"says that it is {version}")
    check_scan(engine)
    node_less = "--env=PDPROXY_DECODE=http://127.0.0.1:9"
    with engine.running(*HARDENED, "--network=none", node_less, PROXY) as container:
        with timed("healthy"):
            engine.await_healthy(container)
        check_end(engine, container)


def check_node(engine: ContainerEngine) -> None:
    """A node as the image starts it, without arguments. Raises ImageError and ContainerEngineError."""
    print(f"\nTrying {NODE}, the same way; vLLM compiles in /tmp, and runs what it compiled:", flush=True)
    check_user(engine, NODE)
    options = ("--tmpfs=/tmp:rw,exec", "--shm-size=1g", "--init")
    with engine.running(*HARDENED, *options, NODE) as container:
        with timed("healthy, its model loaded"):
            engine.await_healthy(container)
        check_end(engine, container)


@dataclass(frozen=True)
class Composed:
    """The `cpu` profile of compose.yaml as a project of its own, on free ports of this host."""

    engine: ContainerEngine
    port: int
    admin_port: int

    def compose(self, *words: str, within: float = UP_WITHIN_S) -> str:
        """A compose command for it, with no `.env` file read. Raises ContainerEngineError."""
        line = [*self.engine.compose, "--project-name", PROJECT, "--file", "compose.yaml", "--env-file", os.devnull]
        settings = {"PROXY_IMAGE": PROXY, "PROXY_PORT": str(self.port), "ADMIN_PORT": str(self.admin_port)}
        environment = {**os.environ, **settings, "ROUTING": "cache"}
        return execute([*line, "--profile", "cpu", *words], environment, within).stdout

    def container(self, service: str) -> str:
        """A service's container, by its id. Raises ImageError where there is not one."""
        labels = (f"--filter=label=com.docker.compose.{name}" for name in (f"project={PROJECT}", f"service={service}"))
        found = self.engine.output("ps", "--all", "--quiet", *labels).split()
        require(len(found) == 1, f"{service} should have one container, and has {len(found)}")
        return found[0]

    @contextmanager
    def up(self) -> Iterator[Mapping[str, str]]:
        """Start it and give the containers by their services; remove it afterwards. Raises ContainerEngineError."""
        self.compose("down", "--volumes")  # left by a run that was killed
        try:
            self.compose("up", "--detach", "--no-build")
            containers = {service: self.container(service) for service in SERVICES}
            with self.engine.logs_kept(containers):
                yield containers
        finally:
            self.compose("down", "--volumes")

    @contextmanager
    def chat(self, question: Quiz) -> Iterator[Iterator[str]]:
        """Ask, and get the pieces of the answer. Raises ImageError where it was not handed over, httpx.HTTPError."""
        asked = body(question.messages(), MOST_TOKENS)
        with (
            httpx.Client(timeout=REQUEST_TIMEOUT_S, trust_env=False) as client,
            client.stream("POST", f"http://{HOST}:{self.port}/v1/chat/completions", json=asked) as response,
        ):
            require(response.status_code == httpx.codes.OK, f"{response.status_code} {response.read().decode()}")
            route = response.headers.get("x-pdproxy-route", "")
            require(route.startswith("disaggregated;"), f"the chat was not handed over: {route}")
            say(f"x-pdproxy-route: {route}")
            yield pieces(response.iter_lines())


def check_compose(engine: ContainerEngine) -> None:
    """Raises ImageError, ContainerEngineError, NotReadyError, NodeRefusedError, AnswerError and httpx.HTTPError."""
    print("\nStarting compose.yaml's profile cpu from them, two nodes and the proxy:", flush=True)
    composed = Composed(engine, *free_ports(2))
    with composed.up() as containers:
        await_joined(composed, containers)
        engine.output("exec", containers["cpu-proxy"], "pdproxy", "check")
        say("pdproxy check, run in the proxy's container: the nodes can work together")
        check_hand_over(composed, containers["cpu-decode"])
        check_stop(composed, containers)


def await_joined(composed: Composed, containers: Mapping[str, str]) -> None:
    """Wait until all are healthy and the proxy has taken its nodes in. Raises as `check_compose` does."""

    token = composed.engine.output("exec", containers["cpu-proxy"], "cat", TOKEN_FILE).strip()

    def still_alive() -> None:
        composed.engine.require_running(*containers.values())

    await_ready(
        {"the profile": f"http://{HOST}:{composed.admin_port}/nodes"},
        within=UP_WITHIN_S, still_alive=still_alive, say=say, probe=functools.partial(all_joined, token=token),
    )  # fmt: skip
    for container in containers.values():
        composed.engine.await_healthy(container)


def check_hand_over(composed: Composed, decode: str) -> None:
    """A chat gets the right answer, by blocks that the decode node read. Raises as `check_compose` does."""

    def counts() -> Counts:
        return parse(composed.engine.output("exec", decode, "python", "-c", FETCH_METRICS))

    question, before = quiz(905, PROMPT_TOKENS), counts()
    with composed.chat(question) as told:
        answer = "".join(told)
    require(answer == question.answer, f"the answer should have been {question.answer!r}, and was {answer!r}")
    added: Counter[tuple[str, ...]] = await_change(before, counts)
    pulled = added["pdproxy_connector_prompt_tokens_total", "pulled"]
    require(pulled > 0, f"the decode node pulled nothing: {dict(added)}")
    say(f"a chat got the right answer, and the decode node read the KV cache of {pulled} tokens from the prefill node")


def check_stop(composed: Composed, containers: Mapping[str, str]) -> None:
    """All are stopped while an answer streams; it ends whole, and so do they. Raises as `check_compose` does."""
    question = recite(906, PROMPT_TOKENS, LONG_ANSWER_LINES)
    with ThreadPoolExecutor(1) as aside, composed.chat(question) as told:
        begun = next(told, "")
        stopped = aside.submit(composed.compose, "stop")
        answer = begun + "".join(told)
        stopped.result()
    require(answer == question.answer, f"the answer that streamed meanwhile should have been whole, and was {answer!r}")
    for service, container in containers.items():
        status = composed.engine.exit_status(container)
        require(status == 0, f"{service} ended with status {status}")
    say("all ended in order when they were told to, the proxy with an answer on its way, which arrived whole")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m deploy.images", description=__doc__)
    parser.add_argument("--engine", choices=COMMANDS, help="which container engine (default: the first that answers)")
    parser.add_argument(
        "--build-option", dest="options", action="append", default=[], metavar="OPTION",
        help="passed on to `docker build` or `podman build`; may be repeated (--build-option=--network=host)",
    )  # fmt: skip
    asked = parser.parse_args(arguments)
    try:
        with stop_signals():
            engine = find((asked.engine,) if asked.engine else COMMANDS)
            build(engine, asked.options)
            check_proxy(engine)
            check_node(engine)
            check_compose(engine)
    except Stopped as stopped:
        print("\nStopped; nothing is left running.", flush=True)
        return 128 + stopped.number
    except (
        ImageError, ContainerEngineError, NotReadyError, NodeRefusedError, AnswerError, PortTakenError, httpx.HTTPError,
    ) as error:  # fmt: skip
        print(f"\nerror: {error}", file=sys.stderr, flush=True)
        return 1
    print(f"\nThe images {' and '.join(DOCKERFILES)} are there, and work.", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
